"""Turns nested Python values into JSON and tensors and back, without pickle and without loss.

What JSON lacks is an object with one key: {"$tuple": [...]}, {"$dict": [[key, value], ...]} where keys are not all
strings, {"$float": "inf"}, and {"$tensor": name}, {"$array": name}, {"$scalar": name} for what lies in a tensor file.
"""

import collections
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from overspill.checkpoint.writer import DTYPE_NAMES
from overspill.errors import ModelError, TierError

# Schedulers of torch keep such dicts.
_DICTS: dict[type, str] = {dict: "$dict", collections.OrderedDict: "$ordered", collections.Counter: "$counter"}


def pack(value: Any, name: str = "body") -> tuple[Any, dict[str, Tensor]]:
    """`value` as JSON that refers to tensors "name.0", "name.1", ...; ModelError where it holds anything else.

    Allowed are None, bool, int, float, str, list, tuple, dict (also OrderedDict and Counter), tensors, numpy arrays
    and numpy scalars.
    """
    tensors: dict[str, Tensor] = {}

    def put(tensor: Tensor) -> str:
        key = f"{name}.{len(tensors)}"
        tensors[key] = tensor
        return key

    return _pack(value, name, put), tensors


def unpack(value: Any, tensors: Callable[[str], Tensor]) -> Any:
    """What `pack` was given; `tensors` finds a tensor by its name."""
    match value:
        case list():
            return [unpack(item, tensors) for item in value]
        case {"$tuple": items}:
            return tuple(unpack(item, tensors) for item in items)
        case {"$float": text}:
            return float(text)
        case {"$tensor": name}:
            return tensors(name)
        case {"$array": name}:
            return tensors(name).numpy()
        case {"$scalar": name}:
            return tensors(name).numpy()[()]
        case dict():
            for kind, tag in _DICTS.items():
                if tag in value:
                    return kind({unpack(key, tensors): unpack(item, tensors) for key, item in value[tag]})
            unknown = [key for key in value if key.startswith("$")]
            if unknown:
                raise TierError(f"expected values as this version packs them, found {unknown[0]!r}; update overspill")
            return {key: unpack(item, tensors) for key, item in value.items()}
    return value


def _pack(value: Any, where: str, put: Callable[[Tensor], str]) -> Any:
    kind = type(value)  # exactly: a subclass would come back as something else
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is list:
        return [_pack(item, f"{where}[{i}]", put) for i, item in enumerate(value)]
    if kind is tuple:
        return {"$tuple": [_pack(item, f"{where}[{i}]", put) for i, item in enumerate(value)]}
    if kind in _DICTS:
        return _pack_dict(value, where, put)
    if kind in (Tensor, nn.Parameter):
        if value.dtype not in DTYPE_NAMES or value.layout != torch.strided or value.is_meta:
            raise _refused(where, f"a tensor ({value.dtype}, {value.layout}, on {value.device})")
        return {"$tensor": put(value)}
    if kind is np.ndarray or isinstance(value, np.generic):
        return {"$array" if kind is np.ndarray else "$scalar": put(_from_numpy(value, where))}
    raise _refused(where, f"{kind.__module__}.{kind.__qualname__}")


def _pack_dict(value: Mapping[Any, Any], where: str, put: Callable[[Tensor], str]) -> Any:
    items = [(key, _pack(item, f"{where}[{key!r}]", put)) for key, item in value.items()]
    if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return dict(items)

    def no_tensor(_tensor: Tensor) -> str:
        raise _refused(f"a key of {where}", "a tensor or numpy value")

    return {_DICTS[type(value)]: [[_pack(key, f"a key of {where}", no_tensor), item] for key, item in items]}


def _from_numpy(value: Any, where: str) -> Tensor:
    try:
        tensor = torch.from_numpy(np.array(value, order="C"))  # a copy: the array may be read-only
    except (TypeError, ValueError) as error:  # text, objects, foreign byte order
        raise _refused(where, f"numpy values of {value.dtype}") from error
    if tensor.dtype not in DTYPE_NAMES:
        raise _refused(where, f"numpy values of {value.dtype}")
    return tensor


def _refused(where: str, found: str) -> ModelError:
    return ModelError(
        f"expected numbers, strings, None, tensors, numpy values, and lists, tuples and dicts of these, found {found} "
        f"at {where}; save its state_dict() or plain values instead"
    )
