"""What the root call's inputs become: on the compute device, floating ones in the compute dtype."""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def cast_inputs(x: T, device: torch.device, dtype: torch.dtype) -> T:
    """The same structure with its tensors moved and cast; objects that are no plain containers pass as they are."""
    return _cast(x, device, dtype)  # type: ignore[no-any-return]


def _cast(x: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if isinstance(x, Tensor):
        wanted = dtype if x.is_floating_point() else x.dtype
        return x if x.device == device and x.dtype == wanted else x.to(device, wanted, non_blocking=True)
    if type(x) in (list, tuple):
        values = [_cast(v, device, dtype) for v in x]
        # The same object where nothing changes: a model may append to a list that it is given.
        return x if all(a is b for a, b in zip(values, x, strict=True)) else type(x)(values)
    if type(x) is dict or (isinstance(x, Mapping) and hasattr(x, "copy") and hasattr(x, "__setitem__")):
        changed = {k: _cast(v, device, dtype) for k, v in x.items()}
        if all(changed[k] is v for k, v in x.items()):
            return x
        if type(x) is dict:
            return changed
        copy = x.copy()
        for key, value in changed.items():
            copy[key] = value
        return copy
    return x
