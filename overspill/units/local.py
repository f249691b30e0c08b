"""What of a parameter lies in this process.

Note [Local parts]: a parameter of a tensor-parallel model is a DTensor: a tensor of the whole's shape without memory
of its own, around the part that lies here. Units hold, move and update that part; the user sees DTensors everywhere, in
`p.grad` and in state dicts too. Autograd saves either with a version of its own: the DTensor mostly, the part where a
model calls `to_local()`. A subclass of Parameter with memory of its own needs none of this; any other tensor that only
wraps others is refused (`check_kind`).
"""

import dataclasses
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from overspill.errors import ModelError

_PLAIN: set[type] = set()
"""Classes whose tensors are no DTensors and need no waiting for: nearly all, so this is looked at first."""


def is_wrapper(t: Tensor) -> bool:
    """Whether it is a DTensor; nothing is one before somebody has imported them, which is dear."""
    if type(t) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and isinstance(t, module.DTensor):
        return True
    if not hasattr(type(t), "trigger_wait"):
        _PLAIN.add(type(t))
    return False


def check_kind(name: str, p: nn.Parameter) -> None:
    """Refuse parameters whose bytes are somewhere inside."""
    inside = local_of(p)
    if is_traceable_wrapper_subclass(inside) or (is_wrapper(p) and p.is_meta):
        raise ModelError(
            f"expected parameters with memory of their own, or DTensors around some, found {name!r} of "
            f"{type(inside).__name__} on {p.device}; prepare the model before it is wrapped, or with its values"
        )


def local_of(t: Tensor) -> Tensor:
    """The part of a DTensor that lies here; any other tensor is all here."""
    part: Any = t
    if type(t) in _PLAIN:
        return t
    while is_wrapper(part):
        part = part._local_tensor
    # What a collective is still bringing.
    found: Tensor = part.trigger_wait() if hasattr(type(part), "trigger_wait") else part
    return found


def part_for(p: Tensor, value: Tensor) -> Tensor:
    """The part of `value`, which has the shape of `p`, that belongs to the part of `p`; may communicate."""
    if is_wrapper(p) and is_wrapper(value):
        value = value.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]
    return local_of(value)


def wrapped(p: Tensor, part: Tensor) -> Tensor:
    """A tensor of the whole's shape around a part that is laid out as the part of `p` is."""
    if not is_wrapper(p):
        return part
    spec: Any = p._spec  # type: ignore[attr-defined]
    spec = dataclasses.replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=part.dtype))
    made: Tensor = sys.modules["torch.distributed.tensor"].DTensor(part, spec, requires_grad=False)
    return made


def set_data(p: Tensor, part: Tensor) -> None:
    """`p.data = part`, whatever class the parameter has at the moment; of a DTensor, its part."""
    with torch._C.DisableTorchFunctionSubclass():
        data = wrapped(p, part)
        torch.Tensor.data.__set__(p, data)  # type: ignore[attr-defined]
        if is_wrapper(p):
            # Its `.data`, which has a version of its own: what the engine writes to a unit's buffer is no change.
            p._local_tensor, p._spec = part.data, data._spec  # type: ignore[attr-defined]


def move_versions(params: Iterable[Tensor], by: int) -> None:
    """Of the parameters and of their parts."""
    with torch._C.DisableTorchFunctionSubclass():
        both = {id(t): t for p in params for t in (p, local_of(p))}
        torch._C._autograd._unsafe_set_version_counter(
            tuple(both.values()), tuple(t._version + by for t in both.values())
        )


def version_of(p: Tensor) -> int:
    """Changes with every write that torch sees, to the parameter or to its part."""
    version: int = p._version
    return version + local_of(p)._version if is_wrapper(p) else version
