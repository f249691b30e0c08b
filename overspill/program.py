"""The program: a pure function from (state, event) to (state, ops). Simulator and executor fold the same one.

Events say what the training loop does: it *needs* units, a *gradient* arrives, a *step* makes updates due, or
everything must *settle*. Ops say what to do about it: on which lane, on which bytes, and after which earlier ops.
The function holds all policy (what leaves, what is fetched ahead, how many pages are in flight); whoever runs
the ops holds none.

Note [Waiting]: an op waits for the latest op of each key in `waits`. A key that never ran, or whose work is long
done, costs nothing. Ops on the compute lane happen in the order of the list, so they never name one another.

Note [Expected order]: `expected` is the order of needs of one step, predicted first (forward, then its mirror),
then learned: what was seen between two steps is expected between the next two. A need that is not where the
cursor points moves the cursor to its next place in the list, or is simply served on demand.

Note [Passing bytes]: gradients on their way home and pages staged for updates are never on the device together, so
the larger of the two is all the room that both need.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from overspill.specs import Limits, ModelSpec, Phase, Placement, TierName

LOOK_AHEAD = 4  # needs that are looked at for fetching ahead; how much is fetched, the window says
MEMORY = 4096  # needs of one step that are remembered; a loop that never steps has no end


class Kind(StrEnum):
    """What an op does. The words after the dash say what it means for device memory."""

    FETCH = "fetch"
    """weights: home to device — takes the unit's bytes"""
    STORE = "store"
    """weights: device to home"""
    RELEASE = "release"
    """weights leave the device — gives the unit's bytes back"""
    OPEN = "open"
    """weights are there: the unit may be used"""
    GRAD_FETCH = "grad_fetch"
    """one partial gradient: home to device — takes its bytes"""
    GRAD_ADD = "grad_add"
    """a new contribution is added to the partial sum — gives the sum's bytes back to the contribution"""
    GRAD_NORM = "grad_norm"
    """the norm of a gradient, while its bytes are on the device"""
    GRAD_STORE = "grad_store"
    """one gradient: device to home"""
    GRAD_DROP = "grad_drop"
    """a gradient that arrived home leaves the device — gives its bytes back"""
    STATE_FETCH = "state_fetch"
    """a page of state: home to device — takes the page's state bytes"""
    STATE_STORE = "state_store"
    """a page of state: device to home"""
    PAGE_GRADS = "page_grads"
    """the gradients of a page: home to device — takes the page's gradient bytes"""
    UPDATE = "update"
    """the optimizer runs on one page"""
    PAGE_DROP = "page_drop"
    """a page leaves the device — gives all its bytes back"""


class Lane(StrEnum):
    """Who runs an op. Every lane keeps its own order; lanes run side by side."""

    COMPUTE = "compute"
    UP = "up"
    DOWN = "down"
    READ = "read"
    WRITE = "write"


class Key(NamedTuple):
    kind: Kind
    unit: int
    item: int = -1


@dataclass(frozen=True, slots=True)
class Op:
    kind: Kind
    lane: Lane
    unit: int
    item: int = -1
    """The page or the parameter; -1: the whole unit."""
    nbytes: int = 0
    waits: tuple[Key, ...] = ()

    @property
    def key(self) -> Key:
        return Key(self.kind, self.unit, self.item)


@dataclass(frozen=True, slots=True)
class Need:
    """These units must be usable now, all of them at once."""

    units: tuple[int, ...]
    phase: Phase = "train"
    held: frozenset[int] = frozenset()
    """Units that must not leave now: somebody holds views of them, or a caller further up uses them."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What became of a use: `pin` keeps the units on the device until the end of the step (a graph that we do not
    see may use them), `written` says that their bytes may have changed and must be written home."""

    units: tuple[int, ...]
    pin: bool = False
    written: bool = False


@dataclass(frozen=True, slots=True)
class Grad:
    """A gradient arrived. `first`: nothing was there to be added to."""

    unit: int
    param: int
    first: bool


@dataclass(frozen=True, slots=True)
class Step:
    """The optimizer stepped: these units have an update due. `held` as in Need: what must stay pinned."""

    due: frozenset[int]
    held: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Settle:
    """Do the pending updates of these units now and bring what changed home; None: of all units. `held` as in Need."""

    units: tuple[int, ...] | None = None
    held: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Begin:
    """A forward pass of the whole model begins; in the eval phase the expected order starts anew."""

    phase: Phase


Event = Need | Mark | Grad | Step | Settle | Begin


@dataclass(frozen=True, slots=True)
class Program:
    """What the function needs to know and that never changes while it runs."""

    model: ModelSpec
    placements: tuple[Placement, ...]
    limits: Limits

    def away(self, unit: int) -> bool:
        """Whether the unit's weights live off the device."""
        return self.placements[unit].weight != "device"


@dataclass(frozen=True, slots=True)
class State:
    here: tuple[int, ...] = ()
    """Units away from home whose weights are (or are on their way to) the device, least recently needed first."""
    pinned: frozenset[int] = frozenset()
    changed: frozenset[int] = frozenset()
    """Units whose device bytes are newer than their home."""
    pending: frozenset[int] = frozenset()
    staged: tuple[tuple[int, int], ...] = ()
    """(unit, page) on the device for an update or on its way home."""
    leaving: tuple[tuple[int, int], ...] = ()
    """(unit, param) of gradients on their way home."""
    expected: dict[Phase, tuple[int, ...]] = field(default_factory=dict)
    seen: dict[Phase, tuple[int, ...]] = field(default_factory=dict)
    phase: Phase = "train"
    cursor: int = 0


def start(program: Program) -> State:
    """The state before the first event: nothing away from home is on the device."""
    order = tuple(range(len(program.model.units)))
    return State(expected={"train": order + order[::-1], "eval": order})


def react(program: Program, state: State, event: Event) -> tuple[State, list[Op]]:
    """The one place where decisions are made. See the module's notes."""
    ops: list[Op] = []
    if isinstance(event, Need):
        state = _need(program, state, event, ops)
    elif isinstance(event, Mark):
        state = _mark(program, state, event)
    elif isinstance(event, Grad):
        state = _grad(program, state, event, ops)
    elif isinstance(event, Step):
        state = _step(program, state, event, ops)
    elif isinstance(event, Settle):
        state = _settle(program, state, event, ops)
    elif event.phase == "eval":
        state = _learn(state, "eval")
    return state, ops


def _lanes(tier: TierName) -> tuple[Lane, Lane]:
    """Who carries bytes from a home tier to the device, and who carries them back."""
    return (Lane.READ, Lane.WRITE) if tier == "nvme" else (Lane.UP, Lane.DOWN)


def _need(program: Program, state: State, event: Need, ops: list[Op]) -> State:
    state = _advance(state, event)
    keep = event.held | state.pinned | frozenset(event.units)
    for unit in event.units:
        state = _bring(program, state, unit, keep, ops)
        state = _update(program, state, unit, ops)
        state = replace(state, here=(*(u for u in state.here if u != unit), unit) if program.away(unit) else state.here)
        ops.append(Op(Kind.OPEN, Lane.COMPUTE, unit, waits=(Key(Kind.FETCH, unit),)))
    return _prefetch(program, state, keep, ops)


def _mark(program: Program, state: State, event: Mark) -> State:
    units = frozenset(u for u in event.units if program.away(u))
    assert units <= frozenset(state.here), f"units {sorted(units)} were used but are not on the device"
    pinned = state.pinned | units if event.pin else state.pinned
    return replace(state, pinned=pinned, changed=state.changed | units if event.written else state.changed)


def _advance(state: State, event: Need) -> State:
    """Move the cursor behind this need and remember it. See Note [Expected order]."""
    cursor, seen = state.cursor, dict(state.seen)
    expected = state.expected.get(event.phase, ())
    for unit in event.units:
        if unit in expected[cursor:]:
            cursor = expected.index(unit, cursor) + 1
        past = seen.get(event.phase, ())
        if (not past or past[-1] != unit) and len(past) < MEMORY:
            seen[event.phase] = (*past, unit)
    return replace(state, cursor=cursor, seen=seen, phase=event.phase)


def _learn(state: State, phase: Phase) -> State:
    seen = state.seen.get(phase, ())
    expected = {**state.expected, phase: seen} if seen else state.expected
    return replace(state, expected=expected, seen={**state.seen, phase: ()}, cursor=0)


def _bring(program: Program, state: State, unit: int, keep: frozenset[int], ops: list[Op]) -> State:
    """Fetch a unit's weights, if they are not here, making room first."""
    if not program.away(unit) or unit in state.here:
        return state
    home, nbytes = program.placements[unit].weight, program.model.units[unit].weight_bytes
    state = _make_room(program, state, nbytes, keep, ops)
    ops.append(Op(Kind.FETCH, _lanes(home)[0], unit, nbytes=nbytes, waits=(Key(Kind.STORE, unit),)))
    return replace(state, here=(*state.here, unit))


def _window(program: Program, state: State) -> int:
    return sum(program.model.units[u].weight_bytes for u in state.here)


def _make_room(program: Program, state: State, nbytes: int, keep: frozenset[int], ops: list[Op]) -> State:
    """Release units, the one expected last first, until `nbytes` fit the window; what is kept may overfill it."""
    while _window(program, state) + nbytes > program.limits.window:
        free = [u for u in state.here if u not in keep]
        if not free:
            break
        state = _release(program, state, _expected_last(state, free), ops)
    return state


def _expected_last(state: State, units: list[int]) -> int:
    upcoming = state.expected.get(state.phase, ())[state.cursor :]
    return max(units, key=lambda u: upcoming.index(u) if u in upcoming else len(upcoming))


def _release(program: Program, state: State, unit: int, ops: list[Op]) -> State:
    state = _write_home(program, state, unit, ops)
    waits = (Key(Kind.FETCH, unit), Key(Kind.STORE, unit))
    ops.append(Op(Kind.RELEASE, Lane.COMPUTE, unit, nbytes=program.model.units[unit].weight_bytes, waits=waits))
    return replace(state, here=tuple(u for u in state.here if u != unit))


def _write_home(program: Program, state: State, unit: int, ops: list[Op]) -> State:
    if unit not in state.changed:
        return state
    home, nbytes = program.placements[unit].weight, program.model.units[unit].weight_bytes
    ops.append(Op(Kind.STORE, _lanes(home)[1], unit, nbytes=nbytes, waits=(Key(Kind.FETCH, unit),)))
    return replace(state, changed=state.changed - {unit})


def _prefetch(program: Program, state: State, keep: frozenset[int], ops: list[Op]) -> State:
    """Fetch what is expected next, as long as it displaces nothing that is expected sooner."""
    upcoming = state.expected.get(state.phase, ())[state.cursor :]
    for position, unit in enumerate(upcoming[:LOOK_AHEAD]):
        if not program.away(unit) or unit in state.here:
            continue
        sooner = keep | frozenset(upcoming[:position])
        kept = sum(program.model.units[u].weight_bytes for u in state.here if u in sooner)
        if kept + program.model.units[unit].weight_bytes > program.limits.window:
            break
        state = _bring(program, state, unit, sooner, ops)
    return state


def _update(program: Program, state: State, unit: int, ops: list[Op]) -> State:
    """Run a unit's pending update page by page; its weights are here. See Limits.depth for the overlap."""
    if unit not in state.pending:
        return state
    pages = program.model.units[unit].pages
    for page in range(len(pages)):
        if page == 0 or program.limits.depth == 1:
            state = _stage(program, state, unit, page, ops)
        if page + 1 < len(pages) and program.limits.depth > 1:
            state = _stage(program, state, unit, page + 1, ops)
        waits = tuple(Key(kind, unit, page) for kind in (Kind.STATE_FETCH, Kind.PAGE_GRADS))
        ops.append(Op(Kind.UPDATE, Lane.COMPUTE, unit, page, waits=(Key(Kind.FETCH, unit), *waits)))
        home = program.placements[unit].state
        if home != "device" and pages[page].state_bytes:
            ops.append(Op(Kind.STATE_STORE, _lanes(home)[1], unit, page, pages[page].state_bytes))
    state = replace(state, pending=state.pending - {unit})
    if program.away(unit):
        state = _write_home(program, replace(state, changed=state.changed | {unit}), unit, ops)
    return state


def _stage(program: Program, state: State, unit: int, page: int, ops: list[Op]) -> State:
    """Bring what a page's update needs to the device; drop the oldest staged page first, if there are too many."""
    placement, spec = program.placements[unit], program.model.units[unit].pages[page]
    while state.leaving:
        state = _drop_grad(program, state, ops)
    while len(state.staged) >= program.limits.depth:
        state = _drop_page(state, ops)
    if placement.state != "device" and spec.state_bytes:
        stored = (Key(Kind.STATE_STORE, unit, page),)
        ops.append(Op(Kind.STATE_FETCH, _lanes(placement.state)[0], unit, page, spec.state_bytes, stored))
    if placement.grad != "device" and spec.grad_bytes:
        waits = tuple(Key(Kind.GRAD_STORE, unit, part.param) for part in spec.parts)
        ops.append(Op(Kind.PAGE_GRADS, _lanes(placement.grad)[0], unit, page, spec.grad_bytes, waits))
    return replace(state, staged=(*state.staged, (unit, page)))


def _drop_page(state: State, ops: list[Op]) -> State:
    unit, page = state.staged[0]
    ops.append(Op(Kind.PAGE_DROP, Lane.COMPUTE, unit, page, waits=(Key(Kind.STATE_STORE, unit, page),)))
    return replace(state, staged=state.staged[1:])


def _grad(program: Program, state: State, event: Grad, ops: list[Op]) -> State:
    """Add a contribution to what is there, norm it while it is on the device, send it home; forget an older one."""
    home, unit, param = program.placements[event.unit].grad, event.unit, event.param
    nbytes = program.model.units[unit].params[param].grad_bytes
    if home == "device":
        if not event.first:
            ops.append(Op(Kind.GRAD_ADD, Lane.COMPUTE, unit, param))
        return state
    while state.staged:
        state = _drop_page(state, ops)
    while state.leaving and nbytes + _flying(program, state) > program.limits.flight:
        state = _drop_grad(program, state, ops)
    if not event.first:
        stored, fetched = Key(Kind.GRAD_STORE, unit, param), Key(Kind.GRAD_FETCH, unit, param)
        if (unit, param) not in state.leaving:
            ops.append(Op(Kind.GRAD_FETCH, _lanes(home)[0], unit, param, nbytes, (stored,)))
        ops.append(Op(Kind.GRAD_ADD, Lane.COMPUTE, unit, param, nbytes, (stored, fetched)))
        state = replace(state, leaving=tuple(k for k in state.leaving if k != (unit, param)))
    ops.append(Op(Kind.GRAD_NORM, Lane.COMPUTE, unit, param))
    ops.append(Op(Kind.GRAD_STORE, _lanes(home)[1], unit, param, nbytes))
    return replace(state, leaving=(*(k for k in state.leaving if k != (unit, param)), (unit, param)))


def _flying(program: Program, state: State) -> int:
    return sum(program.model.units[u].params[p].grad_bytes for u, p in state.leaving)


def _drop_grad(program: Program, state: State, ops: list[Op]) -> State:
    unit, param = state.leaving[0]
    nbytes = program.model.units[unit].params[param].grad_bytes
    ops.append(Op(Kind.GRAD_DROP, Lane.COMPUTE, unit, param, nbytes, (Key(Kind.GRAD_STORE, unit, param),)))
    return replace(state, leaving=state.leaving[1:])


def _step(program: Program, state: State, event: Step, ops: list[Op]) -> State:
    """Gradients are home, pins end, updates become due, and what was seen is what to expect."""
    while state.leaving:
        state = _drop_grad(program, state, ops)
    state = replace(_learn(state, "train"), pinned=state.pinned & event.held, pending=state.pending | event.due)
    return _make_room(program, state, 0, event.held, ops)


def _settle(program: Program, state: State, event: Settle, ops: list[Op]) -> State:
    every = range(len(program.model.units))
    units = [u for u in (every if event.units is None else event.units) if u in state.pending]
    for unit in units:
        keep = state.pinned | event.held | {unit}
        state = _update(program, _bring(program, state, unit, keep, ops), unit, ops)
    for unit in every if event.units is None else event.units:
        state = _write_home(program, state, unit, ops)
    while state.staged:
        state = _drop_page(state, ops)
    while event.units is None and state.leaving:
        state = _drop_grad(program, state, ops)
    return state
