"""What stands in `p.grad`: a tensor without bytes that knows where the gradient is.

torch's own clipping, gradient scalers and `zero_grad` work on it unchanged: norms come from the engine, changes in
place are written down (gradients.py, Note [Generations]), and any other reader gets the bytes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from overspill.errors import StateError
from overspill.runtime.gradients import Generation, Gradients

aten = torch.ops.aten

LATER = {aten.mul_, aten.div_, aten.clamp_, aten.clamp_min_, aten.clamp_max_, aten.neg_, aten.nan_to_num_}
"""Changes in place that only need the gradient itself, so they can be applied when its bytes come by."""

LATER_EACH = {"_foreach_mul_", "_foreach_div_", "_foreach_clamp_min_", "_foreach_clamp_max_", "_foreach_neg_"}
"""The same over lists."""


class GradHandle(torch.Tensor):
    """A gradient whose bytes live with the engine. Aliases of it (`.detach()`, `.data`) share its cell."""

    _cell: list[Generation]
    _book: Gradients

    @staticmethod
    def __new__(cls, cell: list[Generation], book: Gradients, device: torch.device) -> "GradHandle":
        spec = cell[0].spec
        made: GradHandle = torch.Tensor._make_wrapper_subclass(
            cls, spec.shape, strides=spec.stride, dtype=spec.dtype, device=device
        )
        made._cell, made._book = cell, book
        return made

    def __init__(self, cell: list[Generation], book: Gradients, device: torch.device) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GradHandle({self.generation.spec.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @property
    def generation(self) -> Generation:
        return self._cell[0]

    def renew(self) -> Generation:
        """Start a new, zero generation; a pending update keeps the old one."""
        old = self.generation
        self._cell[0] = Generation(old.unit, old.param, old.spec, None)
        return self._cell[0]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if args and isinstance(args[0], list | tuple):
            return _on_lists(func, packet.__name__, args, kwargs)
        first = args[0]
        if isinstance(first, GradHandle):
            if packet is aten.detach:
                return GradHandle(first._cell, first._book, first.device)
            if packet is aten.linalg_vector_norm and len(args) <= 2 and not kwargs:
                return first._book.norm(first.generation, args[1] if len(args) > 1 else 2.0)
            if packet in LATER:
                rest = _frozen(args[1:])
                first.generation.change(lambda g: func(g, *rest, **kwargs))
                return first
            if packet in (aten.add_, aten.zero_, aten.copy_, aten.fill_):
                return _rewrite(packet, first, args, kwargs)
        _refuse_other_writes(func, args)
        return func(*tree_map(_bytes, args), **tree_map(_bytes, kwargs))


def _bytes(x: Any) -> Any:
    """A copy, never the engine's own bytes: what is handed out may be written to or kept."""
    return x._book.read(x.generation).clone() if isinstance(x, GradHandle) else x


def _frozen(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Operands as they are now; the change may be applied much later."""
    return tuple(x.clone() if isinstance(x, Tensor) else x for x in tree_map(_bytes, args))


def _rewrite(packet: Any, handle: GradHandle, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GradHandle:
    """Changes in place that bring other bytes: another contribution (autograd's own way), zero, or a new value."""
    if packet is aten.add_:
        value = _bytes(args[1])
        if not isinstance(value, Tensor) or value.shape != handle.shape:
            value = torch.as_tensor(value, dtype=handle.dtype, device=handle.device).expand(handle.shape)
        handle._book.add(handle.generation, value, kwargs.get("alpha", 1))
        return handle
    generation = handle.renew()
    if packet is aten.copy_:
        generation.zero, generation.value = False, generation.empty(handle.device).copy_(_bytes(args[1]))
    elif packet is aten.fill_ and not (isinstance(args[1], int | float) and args[1] == 0):
        generation.zero, generation.value = False, generation.empty(handle.device).fill_(args[1])
    return handle


def _on_lists(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Foreach ops, one tensor at a time where gradients are changed or normed."""
    tensors = args[0]
    if name == "_foreach_norm" and len(args) <= 2 and not kwargs:
        order = args[1] if len(args) > 1 else 2.0
        return [
            x._book.norm(x.generation, order) if isinstance(x, GradHandle) else func([x], order)[0] for x in tensors
        ]
    if name == "_foreach_zero_":
        for x in tensors:
            x.zero_()
        return None
    if name in LATER_EACH:
        shared = _frozen(args[1:])
        for i, x in enumerate(tensors):
            rest = tuple([a[i]] if isinstance(a, list | tuple) else a for a in shared)
            _later(func, x, rest)
        return None
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        return _unscale(func, tensors, args[1:])
    if name.endswith("_"):
        raise StateError(
            f"expected a change of gradients that overspill can defer, found {func}; read the gradient with "
            "overspill.grad(p), change the copy and assign it to p.grad"
        )
    return func(*tree_map(_bytes, args), **tree_map(_bytes, kwargs))


def _later(func: Callable[..., Any], x: Tensor, rest: tuple[Any, ...]) -> None:
    if isinstance(x, GradHandle):
        x.generation.change(lambda g: func([g], *rest))
    else:
        func([x], *rest)


def _unscale(func: Any, tensors: list[Tensor], rest: tuple[Any, ...]) -> None:
    """torch.amp's unscale: looks at every value and scales in place, so the bytes are rewritten."""
    values = [_bytes(x) for x in tensors]
    func(values, *rest)
    for x, value in zip(tensors, values, strict=True):
        if isinstance(x, GradHandle):
            x.copy_(value)


def _refuse_other_writes(func: Any, args: tuple[Any, ...]) -> None:
    for x, argument in zip(args, func._schema.arguments, strict=False):
        if isinstance(x, GradHandle) and argument.alias_info is not None and argument.alias_info.is_write:
            raise StateError(
                f"expected a change of the gradient of {x.generation.spec.name!r} that overspill can defer, found "
                f"{func}; read it with overspill.grad(p), change the copy and assign it to p.grad"
            )
