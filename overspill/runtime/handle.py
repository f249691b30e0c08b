"""What stands in `p.grad`: a tensor without bytes that knows where the gradient is.

torch's own clipping, gradient scalers and `zero_grad` work on it unchanged: norms come from the engine, changes in
place are written down (generation.py, Note [Generations]), and any other reader gets a copy. Views, and changes that
cannot be written down, get the gradient's own bytes (gradients.py, Note [Lent gradients]).

Note [Who adds]: under fp16 what autograd adds is scaled, and what a hook of the user's adds in the same backward pass
is not; their dtypes may be the same. What Python asks for comes by `__torch_function__`, what autograd adds does not,
unless a dispatch mode or a tensor that wraps this one passes it on: then it comes from a `__torch_dispatch__`.
"""

import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from overspill.errors import StateError
from overspill.runtime.generation import Change, Generation, check_change, full_dtype, number
from overspill.runtime.gradients import Gradients
from overspill.units.local import local_of

aten = torch.ops.aten

LATER = {aten.mul_, aten.div_, aten.clamp_, aten.clamp_min_, aten.clamp_max_, aten.neg_, aten.nan_to_num_}
"""Changes in place that only need the gradient itself, so they can be applied when its bytes come by."""


_python = threading.local()


def _by_autograd() -> bool:
    """See Note [Who adds]."""
    return torch._C._current_graph_task_id() != -1 and not getattr(_python, "asks", False)


def _is_passed_on(func: Any) -> bool:
    """Whether an op was asked for by whoever called a `__torch_dispatch__`, and not by its own caller."""
    if not isinstance(func, torch._ops.OpOverload) or torch._C._current_graph_task_id() == -1:
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
        frame = frame.f_back
    return frame is not None


def _change_nothing(kinds: list[type[Tensor]]) -> bool:
    """Whether tensors of these kinds do as plain ones do, but for the class of what comes of them."""
    every: list[type[Tensor]] = [Tensor, *kinds]
    return len({getattr(kind.__torch_function__, "__func__", kind) for kind in every}) == 1


class GradHandle(torch.Tensor):
    """A gradient whose bytes live with the engine. Aliases of it (`.detach()`, `.data`) share its cell."""

    _cell: list[Generation]
    _ref: "weakref.ref[Gradients]"
    """Weakly, because `p.grad` lies where Python's garbage collector does not look for cycles."""

    @staticmethod
    def __new__(cls, cell: list[Generation], book: Gradients, device: torch.device) -> "GradHandle":
        spec = cell[0].spec
        made: GradHandle = torch.Tensor._make_wrapper_subclass(
            cls, spec.shape, strides=spec.stride, dtype=full_dtype(spec), device=device
        )
        made._cell, made._ref = cell, weakref.ref(book)
        return made

    def __init__(self, cell: list[Generation], book: Gradients, device: torch.device) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GradHandle({self.generation.spec.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return _bytes(self)  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _bytes(self).__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        return _memory(self).numpy(force=force)

    def tolist(self) -> Any:
        return _bytes(self).tolist()

    def data_ptr(self) -> int:
        return _memory(self).data_ptr()  # type: ignore[no-any-return]

    def untyped_storage(self) -> torch.UntypedStorage:
        return _memory(self).untyped_storage()  # type: ignore[no-any-return]

    @property
    def data(self) -> Tensor:
        return Tensor.detach(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        self.copy_(value)

    @property
    def _book(self) -> Gradients:
        book = self._ref()
        if book is None:
            raise StateError(
                f"expected the gradient of {self.generation.spec.name!r} to be used while its prepared model is there, "
                "found that the model is gone; keep it, or a copy of the gradient"
            )
        return book

    @property
    def generation(self) -> Generation:
        return self._cell[0]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, others = getattr(_python, "asks", False), [t for t in types if not issubclass(t, GradHandle)]
        _python.asks = before or not _is_passed_on(func)
        try:
            if others and not _change_nothing(others):
                # As a closed parameter, which opens for it; none of them need know of this class.
                return others[0].__torch_function__(func, tuple(others), args, kwargs or {})
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
                return tree_map(lambda x: _as_kind(others[0], x), result) if others else result
        finally:
            _python.asks = before

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        first = args[0] if args else None
        if isinstance(first, list | tuple):
            return _on_lists(packet.__name__)(func, args, kwargs)
        if isinstance(first, GradHandle):
            if packet is aten.detach:
                return GradHandle(first._cell, first._book, first.device)
            if packet is aten.linalg_vector_norm and len(args) <= 2 and not kwargs:
                return _norm(first, args[1] if len(args) > 1 else 2.0)
            if packet in LATER:
                _write_down(first, lambda g, *rest: func(g, *rest, **kwargs), args[1:], packet is aten.mul_)
                return first
            rewritten = packet in (aten.add_, aten.zero_, aten.copy_, aten.fill_)
            if rewritten and (not first.generation.lent or (packet is aten.add_ and _is_more(first._book))):
                return _rewrite(packet, first, args, kwargs)
        return _at_once(func, args, kwargs)


def _as_kind(kind: type[Tensor], x: Any) -> Any:
    """As the default `__torch_function__` gives it; a gradient that was changed in place stays what it is."""
    return x if not isinstance(x, Tensor) or isinstance(x, GradHandle | kind) else x.as_subclass(kind)


def gradient_of(p: Tensor | None) -> Generation | None:
    """The gradient in `p.grad`, if it is one of ours."""
    gradient = None if p is None else p.grad
    part = None if gradient is None else local_of(gradient)
    return part.generation if isinstance(part, GradHandle) else None


def _is_more(book: Gradients) -> bool:
    """Whether what is added now is more than its bytes say: to be averaged first, or scaled."""
    return book.reduces() or (book.factor is not None and _by_autograd())


def _bytes(x: Any) -> Any:
    """A copy, never the engine's own bytes: what is handed out may be written to or kept."""
    return x._book.bytes.read(x.generation).clone() if isinstance(x, GradHandle) else x


def _memory(x: Any) -> Any:
    """The gradient's own bytes, for a view or for a change that cannot wait."""
    return x._book.lend(x._cell) if isinstance(x, GradHandle) else x


def _write_down(
    handle: GradHandle, run: Callable[..., object], operands: tuple[Any, ...], multiplies: bool = False
) -> None:
    """The change may be made much later, so with the operands as they are now."""
    handle.generation.change(Change.of(run, tree_map(_bytes, operands), handle.generation.spec, multiplies))


def _norm(handle: GradHandle, order: float) -> Tensor:
    return handle._book.bytes.norms.of([handle.generation], order)[0]


def _rewrite(packet: Any, handle: GradHandle, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GradHandle:
    """Changes in place that bring other bytes: another contribution (autograd's own way), zero, or a new value."""
    old, book = handle.generation, handle._book
    if old.spent:
        # Not of what is gone after its step: it is replaced.
        check_change(old)
    if packet is aten.add_:
        value = _bytes(args[1])
        if not isinstance(value, Tensor) or value.shape != handle.shape:
            value = torch.as_tensor(value, dtype=handle.dtype, device=handle.device).expand(handle.shape)
        book.add(old, value, kwargs.get("alpha", 1), made=_by_autograd())
    elif packet is aten.zero_:
        handle._cell[0] = Generation(old.unit, old.param, old.spec, None)
    else:
        whole = torch.empty_strided(old.spec.shape, old.spec.stride, dtype=handle.dtype, device=handle.device)
        value = getattr(whole, packet.__name__)(*tree_map(_bytes, args[1:]), **kwargs)
        handle._cell[0] = book.take(old.unit, old.param, value)
    return handle


def _at_once(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Anything else: readers get copies; views and changes in place get the gradient's own bytes."""
    schema = {argument.name: argument for argument in func._schema.arguments}

    def given(name: str, x: Any) -> Any:
        info = schema[name].alias_info
        return tree_map(_memory if info is not None and (info.is_write or func.is_view) else _bytes, x)

    positional = [given(name, x) for name, x in zip(schema, args, strict=False)]
    result = func(*positional, **{name: given(name, x) for name, x in kwargs.items()})
    return args[0] if result is not None and any(result is x for x in positional[:1]) else result


# --- lists of gradients, one at a time


def _norms(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) > 2:
        return _at_once(func, args, kwargs)
    order = args[1] if len(args) > 1 else 2.0
    ours = [x for x in args[0] if isinstance(x, GradHandle)]
    found: dict[int, Tensor] = {}
    for book in {id(x._book): x._book for x in ours}.values():
        mine = [x for x in ours if x._book is book]
        found |= zip(map(id, mine), book.bytes.norms.of([x.generation for x in mine], order), strict=True)
    return [found[id(x)] if isinstance(x, GradHandle) else func([x], order)[0] for x in args[0]]


def _zero_each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for x in args[0]:
        x.zero_()


def _later_each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    lists, multiplies = [isinstance(a, list | tuple) for a in args[1:]], func.overloadpacket is aten._foreach_mul_
    # One copy of a number for all of them.
    args = (args[0], *(number(a) if isinstance(a, Tensor) and a.numel() == 1 else a for a in args[1:]))

    def run(g: Tensor, *rest: Any) -> None:
        func([g], *([a] if listed else a for a, listed in zip(rest, lists, strict=True)))

    alike = not any(lists) and not any(isinstance(a, Tensor) and a.dim() for a in args[1:])
    shared = Change(run, args[1:], multiplies and len(args) == 2) if alike else None
    for i, x in enumerate(args[0]):
        if shared is not None and isinstance(x, GradHandle):
            x.generation.change(shared)
            continue
        operands = tuple(a[i] if listed else a for a, listed in zip(args[1:], lists, strict=True))
        if isinstance(x, GradHandle):
            _write_down(x, run, operands, multiplies)
        else:
            run(x, *operands)


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """torch.amp's unscale: looks at every value and scales in place, so the bytes are rewritten."""
    for x in args[0]:
        value = _bytes(x)
        func([value], *args[1:])
        if isinstance(x, GradHandle):
            x.copy_(value)


def _on_lists(name: str) -> Callable[..., Any]:
    changes = name.startswith("_foreach_") and name.endswith("_")
    return ON_LISTS.get(name, _one_by_one if changes else _at_once)


def _one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Any other change in place: at once, but never with more than one gradient on the device."""
    for i in range(len(args[0])):
        each = [[a[i]] if isinstance(a, list | tuple) else a for a in args]
        named = {k: [a[i]] if isinstance(a, list | tuple) else a for k, a in kwargs.items()}
        _at_once(func, tuple(each), named)


ON_LISTS: dict[str, Callable[..., Any]] = {
    "_foreach_norm": _norms,
    "_foreach_zero_": _zero_each,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
    **{f"_foreach_{name}_": _later_each for name in ("mul", "div", "clamp_min", "clamp_max", "neg")},
}
"""Ops over lists that would otherwise bring all gradients to the device at once."""
