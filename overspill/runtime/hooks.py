"""Every hook there is.

Note [Backward needs]: module backward hooks change autograd and miss outputs, and a unit's last gradient may arrive
before its last use. So when the outermost call of a unit ends, the autograd graph that the call made is walked, and
every node that nobody claimed yet gets a pre-hook that asks for the unit. Units whose weights never leave the device
need none of this. Autograd numbers the nodes that a thread makes: those from the call's first number to its last are
the call's own, wherever its inputs came from; those of other threads have numbers of their own, and on a GPU a backward
pass, with all that it recomputes, runs in another thread than the forward pass. Where fewer were found than were
numbered, some hang on other tensors than the outputs, as an auxiliary loss kept on a module or keys and values in a
cache: then those are looked at too. If some are still missing, they are dead (most often), or hang on a tensor that was
put anywhere: then all tensors that Python knows of are looked at, which is dear, so a kind of module for which that
found nothing LOOKS times is not looked at like this again. What is missed even so is refused in backward
(runtime/weights.py, Note [Versions of what is away]).

Hook objects are copied and pickled as do-nothing hooks, so that a copied or saved model is an ordinary one.
"""

import dataclasses
import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from overspill.runtime.backward import in_backward
from overspill.runtime.behind import Behind
from overspill.runtime.door import Prepared, say_once
from overspill.runtime.turns import Turns
from overspill.runtime.untraced import untraced
from overspill.trace import own_time
from overspill.units.layout import NARROW, Layout

log = logging.getLogger("overspill")

CLAIMED = "overspill"
_ONE_DTYPE = "Linear Bilinear LayerNorm GroupNorm MultiheadAttention PReLU RNN LSTM GRU"
_CONVS = (f"Conv{way}{n}d" for way in ("", "Transpose") for n in (1, 2, 3))
ONE_DTYPE = {getattr(nn, name).forward for name in (*_ONE_DTYPE.split(), *_CONVS)}
"""Forwards of torch's modules that want inputs of the dtype of their weights."""
OF_MODULES = frozenset(vars(nn.Module()))
"""What every module has: its parameters, hooks and children."""
DEPTH = 4
"""How deep to look for tensors inside objects that are no containers (caches, output classes)."""
NESTED = -1
LOOKS = 2
"""How often to look everywhere in vain. See Note [Backward needs]."""


class Root(Protocol):
    """Hears of calls of the whole model and of gradients: the engine."""

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]: ...
    def end(self, output: Any) -> Any: ...
    def arrived(self, unit: int, param: int) -> None: ...


class Calls(Protocol):
    """Hears of calls of modules and of their backward."""

    @property
    def turns(self) -> Turns: ...
    @property
    def behind(self) -> Behind: ...
    def enter(self, units: tuple[int, ...]) -> None: ...
    def exit(self, units: tuple[int, ...], output: Any) -> tuple[int, ...]: ...
    def backward(self, units: tuple[int, ...]) -> None: ...


class StateDicts(Protocol):
    """Hears of state dicts being made."""

    def begin(self, module: nn.Module) -> None: ...
    def end(self, module: nn.Module) -> None: ...


class Loads(Protocol):
    """Hears of state dicts being loaded."""

    def begin(self, module: nn.Module, missing: list[str], errors: list[str]) -> None: ...
    def end(self, module: nn.Module, missing: list[str]) -> None: ...


@dataclass(frozen=True, slots=True)
class Listeners:
    root: Root
    calls: Calls
    state_dicts: StateDicts
    loads: Loads


class Hook:
    """A callable that is not copied with its module, and that torch.compile leaves alone: what it does depends on more
    than its arguments, and must be done every time. `quick`: whether there is nothing to do, as nearly always; to count
    the time that takes would take longer."""

    def __init__(self, run: Callable[..., Any], quick: Callable[..., bool] | None = None) -> None:
        self._run = run
        self._quick = quick

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._quick is not None and self._quick(*args, **kwargs):
            return None
        with own_time:
            return self._run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Hook":
        return Hook(_nothing)

    def __reduce__(self) -> Any:
        return Hook, (_nothing,)


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def install(model: nn.Module, layout: Layout, listeners: Listeners) -> list[Any]:
    """Hook up a model; returns the handles that remove the hooks."""
    handles: list[Any] = []
    looks: Counter[type] = Counter()
    for call in layout.calls:
        handles += _on_call(call.module, call.units, listeners.calls, looks)
        handles += _on_mixed_inputs(call.module)
    # The root's own come last, so that its begin is first (it is put before the others) and its end is last.
    handles += _on_root(model, listeners.root)
    for module in model.modules():
        handles += _on_state_dict(module, listeners.state_dicts)
        handles += _on_load(module, listeners.loads)
        if isinstance(module, nn.RNNBase):
            handles.append(Unflattened(module))
    for unit, params in enumerate(layout.params):
        for index, p in enumerate(params):
            if p.requires_grad:
                handles.append(p.register_post_accumulate_grad_hook(_on_gradient(unit, index, listeners.root)))
    return handles


def _on_root(model: nn.Module, listener: Root) -> list[Any]:
    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return listener.begin(args, kwargs)

    def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return listener.end(output)

    return [
        model.register_forward_pre_hook(Hook(begin), prepend=True, with_kwargs=True),
        model.register_forward_hook(Hook(end), always_call=True),
    ]


def _on_call(module: nn.Module, units: tuple[int, ...], listener: Calls, looks: Counter[type]) -> list[Any]:
    first: list[int | None] = []
    """The number of the first node of each running call; None where the call could not begin, and NESTED where it is
    inside of another one of the same unit."""

    def is_inside(module: nn.Module, args: tuple[Any, ...]) -> bool:
        nested = listener.turns.nested(units)
        if nested:
            first.append(NESTED)
        return nested

    def was_inside(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> bool:
        nested = first[-1] == NESTED
        if nested:
            first.pop()
            listener.turns.unnest(units)
        return nested

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        first.append(None)
        listener.enter(units)
        first[-1] = next_node()

    def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        begin = first.pop()
        ended = listener.exit(units, output) if begin is not None else ()
        if begin is None or not ended or not torch.is_grad_enabled():
            return
        own = range(begin, next_node())
        if claim(ended, own, output, listener) == len(own):
            return
        recompute = in_backward()
        found = claim(ended, own, (output, args, kwargs, list(_kept(module))), listener)
        if found < len(own) and not recompute and looks[type(module)] < LOOKS:
            strays = list(_strays(own))
            claim(ended, own, strays, listener)
            if strays:
                what = "%s leaves tensors where only a search finds them; return them: faster"
                say_once(what, type(module).__name__, level=logging.INFO)
            else:
                looks[type(module)] += 1

    return [
        module.register_forward_pre_hook(Hook(enter, is_inside), prepend=True),
        module.register_forward_hook(Hook(leave, was_inside), with_kwargs=True, always_call=True),
    ]


def _on_mixed_inputs(module: nn.Module) -> list[Any]:
    """Buffers are not cast, so an fp32 one may have widened what reaches a module of 16-bit weights: cast that back.
    Only where torch would refuse the mixture, so this changes nothing that works."""
    own = {p.dtype for p in module.parameters(recurse=False) if p.is_floating_point()}
    if type(module).forward not in ONE_DTYPE or len(own) != 1 or not own <= set(NARROW):
        return []
    dtype = own.pop()

    def is_one(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return not kwargs and len(args) == 1 and type(args[0]) is Tensor and args[0].dtype == dtype

    def cast(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any(t.is_floating_point() and t.dtype != dtype for t in tensors_in((args, kwargs))):
            return None
        return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))

    return [module.register_forward_pre_hook(Hook(cast, is_one), with_kwargs=True)]


def _on_gradient(unit: int, param: int, listener: Root) -> Hook:
    def arrived(p: Tensor) -> None:
        # What is done to parameters here is no use of them.
        with torch._C.DisableTorchFunctionSubclass():
            listener.arrived(unit, param)

    return Hook(arrived)


def _on_state_dict(module: nn.Module, listener: StateDicts) -> list[Any]:
    def before(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        listener.begin(module)

    def after(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        listener.end(module)

    return [module.register_state_dict_pre_hook(Hook(before)), module.register_state_dict_post_hook(Hook(after))]


def _on_load(module: nn.Module, listener: Loads) -> list[Any]:
    def before(module: nn.Module, *details: Any) -> None:
        *_, missing, _, errors = details
        listener.begin(module, missing, errors)

    def after(module: nn.Module, incompatible: Any) -> None:
        listener.end(module, incompatible.missing_keys)

    return [
        module.register_load_state_dict_pre_hook(Hook(before)),
        module.register_load_state_dict_post_hook(Hook(after)),
    ]


class Unflattened:
    """Keeps an RNN from moving its weights, until it is removed.

    On cuda `flatten_parameters` points all weights of an RNN to memory of their own, in C++ and past any door of ours;
    torch calls it in `model.to`, and many models in forward. There is no hook for it, so it is overridden on the one
    module, by a bound method: that is copied and pickled with its module and is the plain one there.
    """

    def __init__(self, module: nn.RNNBase) -> None:
        self._module = module
        module.flatten_parameters = MethodType(flatten_parameters, module)  # type: ignore[method-assign]

    def remove(self) -> None:
        del self._module.__dict__["flatten_parameters"]


def flatten_parameters(rnn: nn.RNNBase) -> None:
    """What a prepared RNN has instead of its own: leaves the weights in their unit."""
    if not any(isinstance(w, Prepared) for w in rnn._flat_weights):
        type(rnn).flatten_parameters(rnn)
    elif any(p.is_cuda for p in rnn.parameters()):
        what = "an RNN's weights stay in the memory of their unit: cuDNN copies them at every call"
        say_once(what, level=logging.INFO)


def flatten(model: nn.Module) -> None:
    """A model is plain again: let its RNNs compact their weights, as they do when they are built."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def before_backward(output: Any, run: Callable[[], None]) -> None:
    """Call before a backward pass of what the root gave."""
    hook = Hook(lambda gradients: run())
    for t in tensors_in(output):
        if t.grad_fn is not None:
            t.grad_fn.register_prehook(hook)


def next_node() -> int:
    """The number that this thread's next autograd node will get."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def claim(units: tuple[int, ...], own: range, tensors: Any, listener: Calls) -> int:
    """Ask for `units` before any node behind `tensors` runs that has one of these numbers; how many there are.
    See Note [Backward needs]."""

    need = Hook(lambda gradients: listener.backward(units), lambda gradients: listener.behind.goes_on(units))
    todo = [t.grad_fn for t in tensors_in(tensors) if t.grad_fn is not None]
    seen: dict[int, Any] = {}
    while todo:
        node = todo.pop()
        # (A leaf's number is larger than any other.)
        if id(node) in seen or node._sequence_nr() not in own:
            continue
        seen[id(node)] = node
        todo += [following for following, _ in node.next_functions if following is not None]
        marks: dict[str, bool] = node.metadata  # type: ignore[assignment]
        if CLAIMED not in marks:
            marks[CLAIMED] = True
            node.register_prehook(need)
    return len(seen)


def _kept(module: nn.Module) -> Iterator[Any]:
    """What a module and those below keep as attributes, of kinds that are or hold tensors."""
    for each in module.modules():
        for name, value in vars(each).items():
            if name not in OF_MODULES and isinstance(value, Tensor | Mapping | list | tuple):
                yield value


def _strays(own: range) -> Iterator[Tensor]:
    """The tensors in this process whose nodes have these numbers and that nobody claimed."""
    for x in gc.get_objects():
        # By type, because asking an object for its class may run code of its own.
        if issubclass(type(x), Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                node = x.grad_fn
            if node is not None and node._sequence_nr() in own and CLAIMED not in node.metadata:
                yield x


def tensors_in(x: Any, depth: int = DEPTH) -> Iterator[Tensor]:
    """The tensors in an output or input: in containers, dataclasses and, a few levels deep, any object."""
    if isinstance(x, Tensor):
        yield x
        # A tensor inside of a transform of torch.func wraps the one that it stands for.
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            yield from tensors_in(torch._C._functorch.get_unwrapped(x))
    elif x is None or isinstance(x, str | bytes | int | float | bool | nn.Module | type) or callable(x):
        return
    elif isinstance(x, Mapping):
        for value in x.values():
            yield from tensors_in(value, depth)
    elif isinstance(x, list | tuple | set | frozenset):
        for value in x:
            yield from tensors_in(value, depth)
    elif dataclasses.is_dataclass(x):
        for field in dataclasses.fields(x):
            yield from tensors_in(getattr(x, field.name, None), depth)
    elif depth > 0 and hasattr(x, "__dict__"):
        for value in vars(x).values():
            yield from tensors_in(value, depth - 1)
