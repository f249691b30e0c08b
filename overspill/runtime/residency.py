"""Which units are open, which may not leave, and what a use of their parameters means for the program.

Note [Who is open when]: a unit is open (its parameters plain to use) while a call of one of its modules runs, and
closed otherwise, even when its bytes are on the device: an update may be pending, and a use from elsewhere must be
noticed. Units in a running call, and units of which somebody holds views, are *held*: they may not leave. So are those
of the backward node that is running: recomputing its saved tensors may call other units before it uses its own.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from overspill.errors import ModelError
from overspill.program import Key, Kind, Mark, Need
from overspill.runtime import hooks
from overspill.runtime.backward import in_backward
from overspill.runtime.behind import Behind
from overspill.runtime.copies import Copies
from overspill.runtime.door import Closed, Open, Prepared, register, set_door
from overspill.runtime.executor import Executor
from overspill.runtime.handle import gradient_of
from overspill.runtime.loads import Loads
from overspill.runtime.parts import Parts
from overspill.runtime.turns import Turns, calls_of
from overspill.specs import Phase
from overspill.units.layout import NARROW
from overspill.units.local import local_of, version_of
from overspill.units.unit import Unit

OUTSIDE = "outside of units"
"""In a trace: the model runs code of no unit."""


class Residency:
    """Turns calls of modules, steps of backward and uses of parameters into needs. Keeps the parameters' doors."""

    def __init__(self, model: nn.Module, parts: Parts) -> None:
        self.model = model
        self.executor = parts.executor
        self._recorder = parts.made.recorder
        self._check_room = parts.check_room
        self.masters = parts.made.masters
        self.scale = parts.scale
        self.units = parts.units
        self._places = {id(p): (u, i) for u, unit in enumerate(self.units) for i, p in enumerate(unit.params)}
        self.depth = [0] * len(self.units)
        self._versions: dict[int, list[int]] = {}
        self._visited: set[int] = set()
        self.full = False
        """All units are open, and none may leave."""
        self.closed = False
        """The model is plain again. What graphs from before refer to was left whole for them."""
        self._last: tuple[int, ...] = ()
        self.turns = Turns(self.depth, self._recorder, parts.made.executor.lanes.device)
        self.behind = Behind(parts.executor, self.turns)
        self.copies = Copies(self, parts)
        self.loads = Loads(model, parts.executor, lambda: self.look())
        self.check_use: Callable[[tuple[int, ...]], None] = lambda units: None
        """Refuses uses of units that may not be used now. Not by autograd, which looks itself whether weights are as
        they were in the forward pass."""
        self.strict = False
        """Whether it may refuse units of which nothing is pending."""
        self.look: Callable[[], object] = lambda: None
        """Somebody looks at the model from outside."""
        self.own_grads: dict[tuple[int, int], weakref.ref[Tensor] | None] = {}
        """Tensors that the user put into `p.grad`: they stay there, and autograd adds to them, as in plain torch."""
        self._unswappable = [weakref.ref(p) for unit in self.units for p in unit.params]
        """torch.utils.swap_tensors, which would put another tensor in a parameter's place, refuses what has these."""
        for unit in self.units:
            for p in unit.params:
                if p.requires_grad and p.dtype in NARROW:
                    # Gradients beside masters count as fp32.
                    p.grad_dtype = None
                register(p, self)
                set_door(p, Closed)

    def place_of(self, p: Tensor) -> tuple[int, int]:
        """(unit, index) of a parameter."""
        place = self._places.get(id(p))
        if place is None:
            raise ModelError(
                f"expected a parameter of the prepared {type(self.model).__name__}, found another tensor of shape "
                f"{tuple(p.shape)}; pass one of model.parameters()"
            )
        return place

    @property
    def phase(self) -> Phase:
        return "train" if self.model.training else "eval"

    def held(self) -> frozenset[int]:
        """See Note [Who is open when]."""
        if self.full:
            return frozenset(range(len(self.units)))
        if self._visited:
            with self.executor.views:
                self._visited = {u for u in self._visited if self.units[u].viewed}
        running = self.behind.units if in_backward() else ()
        return frozenset(self._visited.union(running, (u for u, depth in enumerate(self.depth) if depth)))

    def need(self, units: tuple[int, ...], ahead: bool = True) -> None:
        self.turns.take()
        if not in_backward():
            self.check_use(units)
        self._last = units
        self.executor(Need(units, self.phase, self.held(), ahead))

    def forget(self) -> None:
        """A step was taken: the next need is a new one, whatever it asks for, and no call is running any more, not
        even one that was interrupted from the keyboard and so never ended."""
        self._last = ()
        for u, depth in enumerate(self.depth):
            for _ in range(depth):
                self.exit((u,))

    # --- calls of modules, and backward

    def enter(self, units: tuple[int, ...]) -> None:
        self.turns.take()
        if self.scale is not None:
            self.scale.check_inside()
        outermost = [u for u in units if self.depth[u] == 0]
        if outermost and (self.strict or self.executor.program.limits.consumed):
            # What is updated in the backward pass is not pending any more, and new before its step.
            self.check_use(units)
        if outermost and not _current(self.executor, units):
            if in_backward():
                self.check_use(units)
            self._recorder.mark("")
            self.need(units)
        if self._recorder.on:
            self._recorder.mark(self.units[units[0]].spec.name if units else OUTSIDE)
        for u in outermost:
            _set_class(self.units[u], Open)
            if self.executor.program.away(u):
                self._versions[u] = [version_of(p) for p in self.units[u].params]
        for u in units:
            self.depth[u] += 1

    def exit(self, units: tuple[int, ...], output: Any = None) -> tuple[int, ...]:
        """The units whose outermost call ends here and whose weights may leave the device; with them those that are
        open further up, because a caller may have handed its own weights down."""
        self.turns.follow()
        ended = []
        for u in units:
            self.depth[u] -= 1
            if self.depth[u] != 0:
                self.depth[u] = max(self.depth[u], 0)
                continue
            if not self.full:
                _set_class(self.units[u], Closed)
            if self.executor.program.away(u):
                ended.append(u)
                if self._versions.pop(u) != [version_of(p) for p in self.units[u].params]:
                    self.executor(Mark((u,), written=True))
                if _escapes(self.units[u], output):
                    self._visited.add(u)
                    self.executor(Mark((u,), pin=torch.is_grad_enabled(), written=True))
        if not any(self.depth):
            self._recorder.mark(OUTSIDE)
        away = self.executor.program.away
        return (*ended, *(u for u, depth in enumerate(self.depth) if depth and away(u))) if ended else ()

    def backward(self, units: tuple[int, ...]) -> None:
        if self.closed:
            return
        self.turns.take()
        self.behind.units = units
        if torch.is_grad_enabled():
            # Backward of backward: the graph being built is nobody's, so keep what it uses.
            self.need(units)
            self.executor(Mark(units, pin=True))
        elif units != self._last or not all(self.executor.program.has(self.executor.state, u) for u in units):
            self._recorder.mark("")
            self.need(units)
            if self._recorder.on:
                self._recorder.mark(f"backward of {self.units[units[0]].spec.name}")
        self.behind.there()

    # --- uses of closed and open parameters (door.Keeper)

    def visit(self, params: list[nn.Parameter]) -> None:
        self.loads.changing()
        units = tuple(dict.fromkeys(self.place_of(p)[0] for p in params))
        kept = self.held() | self.executor.state.pinned | set(units)
        self._check_room(sum(self.units[u].nbytes for u in kept if self.executor.program.away(u)))
        self.need(units)

    def leave(self, params: list[nn.Parameter], graph: bool, written: bool) -> None:
        units = tuple(dict.fromkeys(self.place_of(p)[0] for p in params))
        if graph and self.scale is not None:
            self.scale.check_inside()
        self._visited.update(units)
        if graph or written:
            self.executor(Mark(units, pin=graph, written=written))

    def touched(self, p: nn.Parameter) -> None:
        unit, _ = self.place_of(p)
        self.masters.edits.handed_out(self.place_of(p))
        self._visited.add(unit)
        self.executor(Mark((unit,), written=True))

    def given(self, p: nn.Parameter, gradient: Tensor | None) -> None:
        self.own_grads[self.place_of(p)] = None if gradient is None else weakref.ref(gradient)

    def copy_of(self, p: nn.Parameter) -> Tensor | None:
        return self.copies.of(p)

    # --- all of them

    @contextmanager
    def all_open(self) -> Iterator[None]:
        """Every unit on the device and open; what lives elsewhere counts as written."""
        every = range(len(self.units))
        self.full = True
        try:
            for u in every:
                self.need((u,))
                _set_class(self.units[u], Open)
            yield
        finally:
            self.full = False
            here = self.executor.state.here
            self._visited.update(here)
            self.executor(Mark(here, written=True))
            for u in every:
                if self.depth[u] == 0:
                    _set_class(self.units[u], Closed)
            for p in (p for unit in self.units for p in unit.params):
                # An open parameter does not tell of gradients that the user puts there.
                if p.grad is not None and gradient_of(p) is None:
                    self.given(p, p.grad)


def _current(executor: Executor, units: tuple[int, ...]) -> bool:
    """Whether nothing is to be done or waited for before they are used, as most of the time where weights live on the
    device. Where they are gathered from other ranks, that may have been begun ahead and be on its way."""
    state, program = executor.state, executor.program
    return not program.gathers and all(u not in state.pending and not program.away(u) for u in units)


def _set_class(unit: Unit, cls: type[Prepared]) -> None:
    for p in unit.params:
        set_door(p, cls)


def _escapes(unit: Unit, output: Any) -> bool:
    """Whether a call hands out views of its own weights: whoever uses them later is not seen asking for the unit."""
    memory = unit.flat.untyped_storage()._cdata
    parts = map(local_of, hooks.tensors_in(output))
    return any(Tensor.untyped_storage(t)._cdata == memory for t in parts if _has_memory(t))


def _has_memory(t: Tensor) -> bool:
    return t.layout is torch.strided and not t.is_nested and not torch._C._functorch.is_functorch_wrapped_tensor(t)


def viewed(residency: Residency, units: Iterable[int]) -> tuple[int, ...]:
    """Those that are here and of which somebody else holds views. (What keeps its memory for old views when it leaves
    is seen by them, and is not what counts.)"""
    executor, own = residency.executor, residency.units
    with executor.views:
        found = [u for u in units if own[u].viewed and executor.program.has(executor.state, u)]
    if not found:
        return ()
    for ticket in executor.tickets.of([Key(Kind.STORE, u) for u in found]):
        # A thread that brings weights home has views of them, too.
        ticket.wait_issued()
    with executor.views:
        return tuple(u for u in found if own[u].viewed)


def seen(residency: Residency, units: Iterable[int]) -> tuple[int, ...]:
    """Those that somebody may look at without asking for them."""
    return tuple(units) if residency.full else viewed(residency, units)


def forget_interrupted(residency: Residency, begins: int = 0) -> None:
    """Calls that Ctrl-C ended, of which torch tells nobody. `begins`: how many of ours are just beginning."""
    scale = residency.scale
    seem_to_run = any(residency.depth) or (scale is not None and scale.running)
    if seem_to_run and residency.turns.mine and calls_of(residency.model) <= begins:
        residency.forget()
        if scale is not None:
            scale.forget()
