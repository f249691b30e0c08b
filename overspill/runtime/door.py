"""Closed and open parameters.

Note [Closed parameters]: between uses a parameter is *closed*: its class is `Closed`, so that every Python use comes
through one door. Metadata passes. Anything else first finishes the parameter's pending update and brings its bytes to
the device, so it sees the current value; what it changes is written home. Inside a call of a module of its unit a
parameter is *open*: an ordinary parameter for torch, without overhead; only the ways to its memory that leave no mark
on its version (`.data`, `.numpy()`, ...) report that its bytes may have been written. torch.compile must not trace any
of this: it would keep what happened the first time.
"""

import functools
import logging
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from overspill.errors import ModelError, StateError
from overspill.runtime.untraced import untraced
from overspill.units.local import local_of, version_of

log = logging.getLogger("overspill")

_GETTERS = """
    shape dtype device requires_grad grad is_leaf layout ndim grad_fn is_cuda is_cpu is_meta is_sparse is_quantized
    is_mkldnn is_nested is_mps is_xpu nbytes itemsize names output_nr retains_grad _version _backward_hooks grad_dtype
    is_sparse_csr is_vulkan is_ipu is_maia is_mtia
"""
_METHODS = """
    size dim numel nelement element_size stride is_floating_point is_complex is_contiguous is_signed get_device
    requires_grad_ register_hook register_post_accumulate_grad_hook __hash__ __len__ storage_offset is_inference
    is_pinned ndimension is_shared has_names __dir__
"""
METADATA: set[Any] = {
    *(getattr(Tensor, n).__get__ for n in _GETTERS.split() if hasattr(Tensor, n)),
    *(getattr(Tensor, n) for n in _METHODS.split() if hasattr(Tensor, n)),
    *(getattr(Tensor, n).__set__ for n in ("requires_grad", "grad", "grad_dtype") if hasattr(Tensor, n)),
    Tensor.grad.__delete__,  # type: ignore[union-attr]
    torch.is_floating_point,
    torch.is_complex,
    torch.is_tensor,
}


class HigherPrecision(Protocol):
    """Who keeps more of a parameter than its own dtype can hold."""

    def accept(self, p: nn.Parameter, value: Tensor) -> bool:
        """Give a parameter that is usable a value of higher precision than its own; False if it has no master."""

    def unscaled(self, gradient: Tensor) -> Tensor:
        """A gradient that autograd made, without the scale of the loss."""


class NoMasters:
    """Parameters are all there is."""

    def accept(self, p: nn.Parameter, value: Tensor) -> bool:
        return False

    def unscaled(self, gradient: Tensor) -> Tensor:
        return gradient


class Keeper(Protocol):
    """Who keeps the bytes of a parameter: the engine, or, before there is one, the builder of the model."""

    @property
    def masters(self) -> HigherPrecision: ...

    def visit(self, params: list[nn.Parameter]) -> None:
        """These closed parameters are used now, from outside of their modules: make them usable."""

    def leave(self, params: list[nn.Parameter], graph: bool, written: bool) -> None:
        """The use is over. `graph`: a graph may refer to them; `written`: their bytes may have changed, or may be
        changed later through a view."""

    @property
    def look(self) -> Callable[[], object]:
        """To be called before the model is copied."""

    def touched(self, p: nn.Parameter) -> None:
        """Somebody may write to the memory of an open parameter unseen."""

    def given(self, p: nn.Parameter, gradient: Tensor | None) -> None:
        """Somebody assigned `p.grad`."""

    def copy_of(self, p: nn.Parameter) -> Tensor | None:
        """A host copy, if the parameter is being written to a state dict; else None."""


HANDLE = "_overspill"
"""The one attribute set on a user's parameter: called, it gives the keeper. For an engine it is a weak reference; a
builder lives as long as its parameters do, so there it is a strong one."""


def keeper_of(p: Tensor) -> Keeper | None:
    ref = p.__dict__.get(HANDLE)
    return ref() if ref is not None else None


def register(p: nn.Parameter, keeper: Keeper) -> None:
    setattr(p, HANDLE, weakref.ref(keeper))


def _refusing(name: str) -> Any:
    """A method of Tensor that would take a parameter's memory away."""

    def method(self: nn.Parameter, *args: Any, **kwargs: Any) -> Any:
        raise ModelError(
            f"expected the memory of a prepared parameter to stay where it is, found {name}; call "
            "overspill.close(model) first"
        )

    method.__name__ = name
    return method


class Prepared(nn.Parameter):
    """What closed and open parameters have in common: their memory stays, and a copy of one is a plain parameter."""

    plain: ClassVar[type[nn.Parameter]] = nn.Parameter
    """What the parameter is when it is not prepared."""

    share_memory_ = _refusing("share_memory_")
    resize_ = _refusing("resize_")
    resize_as_ = _refusing("resize_as_")
    set_ = _refusing("set_")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduced(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return _copied(self, memo)


class Closed(Prepared):
    """A parameter between uses. See Note [Closed parameters]."""

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            if func == _SET_GRAD:
                _keeper(args[0]).given(args[0], args[1])
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.autograd.grad:
            return _gradients(*args, **kwargs)
        if func is torch.autograd.backward:
            return _backward(*args, **kwargs)
        closed = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Closed)]
        if func is Tensor.detach and closed:
            copy = _keeper(closed[0]).copy_of(closed[0])
            if copy is not None:
                return copy
        return _through_the_door(INSTEAD.get(func, func), args, kwargs, closed)


def _keeper(p: Tensor) -> Keeper:
    keeper = keeper_of(p)
    if keeper is None:
        raise StateError(
            "expected a parameter of a prepared model, found one whose model is gone; keep the model, or call "
            "overspill.close(model) before dropping it"
        )
    return keeper


def _gradients(outputs: Any, inputs: Any, *, materialize_grads: bool = False, **options: Any) -> Any:
    """torch.autograd.grad by parameters. It is no use of them, and runs the code of others, which must come through the
    door: so parameters are named by their places in the graph, which is all that matters of them."""
    if materialize_grads:
        options["allow_unused"] = True
    found = tuple(map(_unscaled, inputs, torch.autograd.grad(_results(outputs), _places(inputs), **options)))
    if not materialize_grads:
        return found
    zeros = {"requires_grad": options.get("create_graph", False)}
    return tuple(torch.zeros_like(p, **zeros) if g is None else g for p, g in zip(inputs, found, strict=True))


def _backward(outputs: Any, *, inputs: Any = None, **options: Any) -> None:
    """torch.autograd.backward into some parameters: as `_gradients`."""
    torch.autograd.backward(_results(outputs), inputs=None if inputs is None else _places(inputs), **options)


def _places(inputs: Any) -> list[Any]:
    with torch._C.DisableTorchFunctionSubclass():
        return [get_gradient_edge(p) if isinstance(p, Closed) else p for p in inputs]


def _results(outputs: Any) -> list[Any]:
    with torch._C.DisableTorchFunctionSubclass():
        return [p.view_as(p) if isinstance(p, Closed) else p for p in outputs]


def _unscaled(p: Tensor, gradient: Tensor | None) -> Tensor | None:
    if gradient is None or not isinstance(p, Closed):
        return gradient
    return _keeper(p).masters.unscaled(gradient)


def _through_the_door(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], closed: list[Closed]
) -> Any:
    keepers = {id(k): k for k in map(_keeper, closed)}
    mine = {key: [p for p in closed if _keeper(p) is keeper] for key, keeper in keepers.items()}
    for key, keeper in keepers.items():
        keeper.visit(list(mine[key]))
    with torch._C.DisableTorchFunctionSubclass():
        versions = [version_of(p) for p in closed]
        result = func(*args, **kwargs)
        tensors = [t for t in tree_leaves(result) if isinstance(t, Tensor) and not any(t is p for p in closed)]
        graph = any(t.requires_grad for t in tensors)
        alias = _may_alias(result, tensors, closed)
        written = [version_of(p) for p in closed] != versions or alias
    for key, keeper in keepers.items():
        keeper.leave(list(mine[key]), graph, written)
        if alias and (func == _GET_DATA or not isinstance(result, Tensor | list | tuple)):
            # Views share their parameter's version; these ways to its memory do not.
            for p in mine[key]:
                keeper.touched(p)
    return result


def _may_alias(result: Any, tensors: list[Tensor], closed: list[Closed]) -> bool:
    """Whether the result is a way to the parameters' memory: a view, a storage, a pointer, an array."""
    if result is None or isinstance(result, bool | float | str | bytes) or any(result is p for p in closed):
        return False
    if not isinstance(result, Tensor | list | tuple):
        return True
    memory = {local_of(p).untyped_storage()._cdata for p in closed}
    return any(t.layout is torch.strided and local_of(t).untyped_storage()._cdata in memory for t in tensors)


def _assign(p: nn.Parameter, value: Tensor) -> None:
    """`p.data = value`: the parameter keeps its place and takes the value."""
    if not isinstance(value, Tensor) or value.shape != p.shape or value.dtype != p.dtype or value.device != p.device:
        found = f"{value.dtype} {tuple(value.shape)} on {value.device}" if isinstance(value, Tensor) else type(value)
        raise ModelError(
            f"expected new data of {p.dtype} {tuple(p.shape)} on {p.device} for a prepared parameter, found {found}; "
            "a prepared model keeps its sizes, dtypes and device: change them before prepare, or after overspill.close"
        )
    with torch.no_grad():
        p.copy_(value)


def _only_cast(p: nn.Parameter, value: object) -> bool:
    """Whether this is `module.to(dtype)`, which some models call in their forward: the same values in another dtype."""
    if not isinstance(value, Tensor) or value.shape != p.shape or value.device != p.device or value.dtype == p.dtype:
        return False
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        return value.is_floating_point() and torch.equal(value.to(p.dtype), p)


@functools.cache
def say_once(message: str, *details: object, level: int = logging.WARNING) -> None:
    log.log(level, message, *details)


def _copy(p: nn.Parameter, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`p.copy_(source)`, as load_state_dict does it: a value of higher precision reaches the master."""
    return p if _accepted(p, source) else p.copy_(source, non_blocking)


def _accepted(p: nn.Parameter, source: Tensor) -> bool:
    keeper, allowed = keeper_of(p), not (torch.is_grad_enabled() and p.requires_grad)
    plain = not isinstance(source, Tensor) or source.shape != p.shape or source.dtype == p.dtype
    return keeper is not None and not plain and allowed and keeper.masters.accept(p, source)


def _shown(p: nn.Parameter, **options: Any) -> str:
    return repr(p.detach().requires_grad_(p.requires_grad))


INSTEAD: dict[Any, Callable[..., Any]] = {
    Tensor.data.__set__: _assign,  # type: ignore[attr-defined]
    Tensor.copy_: _copy,
    Tensor.__repr__: _shown,
}
"""What is done in place of what was asked for. Looked up by equality: every access makes a new method object."""
_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_SET_GRAD = Tensor.grad.__set__  # type: ignore[union-attr]


def _reduced(p: nn.Parameter) -> Any:
    """Pickled as a plain parameter in host memory with the current value."""
    _look(p)
    with torch.no_grad():
        return nn.Parameter, (p.detach().to("cpu", copy=True), p.requires_grad)


def _copied(p: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """A plain parameter with the current value; a copied model is an ordinary model."""
    if id(p) not in memo:
        _look(p)
        with torch.no_grad():
            memo[id(p)] = nn.Parameter(p.detach().clone(memory_format=torch.preserve_format), p.requires_grad)
    copied: nn.Parameter = memo[id(p)]
    return copied


def _look(p: nn.Parameter) -> None:
    keeper = keeper_of(p)
    if keeper is not None:
        keeper.look()


@untraced
def _touch(p: nn.Parameter) -> None:
    keeper = keeper_of(p)
    if keeper is not None:
        keeper.touched(p)


def _reporting(name: str) -> Any:
    """A method of Tensor that gives a way to the memory, and says so."""
    plain = getattr(Tensor, name)

    def method(self: nn.Parameter, *args: Any, **kwargs: Any) -> Any:
        _touch(self)
        return plain(self, *args, **kwargs)

    method.__name__ = name
    return method


class Open(Prepared):
    """A parameter inside a call of its own unit's modules. See Note [Closed parameters]."""

    @property
    def data(self) -> Tensor:
        _touch(self)
        return Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        if _only_cast(self, value):
            say_once("a prepared parameter keeps its dtype: module.to(%s) leaves it %s", value.dtype, self.dtype)
            return
        _touch(self)
        _assign(self, value)

    def detach(self) -> Tensor:
        copy = keeper.copy_of(self) if (keeper := keeper_of(self)) is not None else None
        return Tensor.detach(self) if copy is None else copy

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        return self if _accepted(self, source) else Tensor.copy_(self, source, non_blocking)

    numpy = _reporting("numpy")
    __array__ = _reporting("__array__")
    __dlpack__ = _reporting("__dlpack__")
    untyped_storage = _reporting("untyped_storage")
    data_ptr = _reporting("data_ptr")


def set_door(p: nn.Parameter, door: type[Prepared] | None) -> None:
    """Close or open a parameter; None makes it what it was before it was prepared."""
    p.__class__ = _behind(type(p), door)


@functools.cache
def _behind(cls: type[nn.Parameter], door: type[Prepared] | None) -> type[nn.Parameter]:
    """What becomes of a class behind another door. Kept, because every call of a unit opens and closes all of its."""
    plain = cls.plain if issubclass(cls, Prepared) else cls
    return plain if door is None else _prepared_class(door, plain)


@functools.cache
def _prepared_class(door: type[Prepared], plain: type[nn.Parameter]) -> type[Prepared]:
    """A door for parameters of some class: a subclass of both, whose ways to the memory go through the door too."""
    if plain is nn.Parameter:
        return door
    own: dict[str, Any] = {"plain": plain, "__module__": door.__module__}
    if door is Closed:
        own |= {name: _passing(getattr(plain, name)) for name in PARTS if hasattr(plain, name)}
    else:
        own["__torch_function__"] = plain.__torch_function__
    return types.new_class(door.__name__, (door, plain), exec_body=lambda namespace: namespace.update(own))


PARTS = ("to_local", "full_tensor", "redistribute")
"""Methods of DTensors that torch does not show to `__torch_function__`."""


def _passing(plain: Callable[..., Any]) -> Any:
    @functools.wraps(plain)
    def method(self: Closed, *args: Any, **kwargs: Any) -> Any:
        return _through_the_door(plain, (self, *args), kwargs, [self])

    return method
