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
        return type(x)(_cast(v, device, dtype) for v in x)
    if type(x) is dict or (isinstance(x, Mapping) and hasattr(x, "copy") and hasattr(x, "update")):
        changed = {k: _cast(v, device, dtype) for k, v in x.items()}
        if all(changed[k] is v for k, v in x.items()):
            return x
        if type(x) is dict:
            return changed
        copy = x.copy()
        copy.update(changed)
        return copy
    return x
