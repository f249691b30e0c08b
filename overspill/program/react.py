"""The pure function: from (state, event) to (state, ops)."""

from overspill.program.gradients import flush, grad, reduce
from overspill.program.passing import drop_grad, give_room
from overspill.program.updates import ahead, due, update
from overspill.program.weights import advance, bring, gather, learn, make_room, mark, write_home
from overspill.program.words import (
    Begin,
    Due,
    Event,
    Flush,
    Grad,
    Join,
    Key,
    Kind,
    Lane,
    Mark,
    Need,
    Op,
    Program,
    Settle,
    State,
    Step,
)

LOOK_AHEAD = 4
"""Needs that are looked at for fetching ahead; how much is fetched, the window says."""


def start(program: Program) -> State:
    """The state before the first event: nothing away from home is on the device."""
    order = tuple(range(len(program.model.units)))
    whole = frozenset() if program.model.sharding.split("weight") else frozenset(order)
    return State(expected={"train": order + order[::-1], "eval": order}, gathered=whole)


def react(program: Program, state: State, event: Event) -> tuple[State, list[Op]]:
    """The one place where decisions are made. See the package's notes."""
    ops: list[Op] = []
    match event:
        case Need():
            state = _need(program, state, event, ops)
        case Mark():
            state = mark(program, state, event)
        case Grad():
            state = grad(program, state, event, ops)
        case Step():
            state = _step(program, state, event, ops)
        case Due():
            state = state.but(early=state.early | event.units)
            state = _consume(program, due(program, state, event.units, ops), event.units, ops)
        case Settle():
            state = _settle(program, state, event, ops)
        case Join():
            state = _join(program, state, event, ops)
        case Flush():
            state = state.but(arrived={}) if event.forget else flush(program, state, ops)
        case Begin():
            state = learn(state, "eval") if event.phase == "eval" else state
    return state, ops


def _need(program: Program, state: State, event: Need, ops: list[Op]) -> State:
    state = advance(state, event)
    if event.phase == "train" and event.ahead and not state.training:
        state = state.but(training=True)
    keep = event.held | state.pinned | frozenset(event.units)
    for unit in event.units:
        state = bring(program, state, unit, keep, ops)
        state = state.but(here=(*(u for u in state.here if u != unit), unit) if program.away(unit) else state.here)
    # Before the compute lane is made to wait for anything: what is fetched comes behind what that was given so far.
    state, upcoming = _prefetch(program, state, keep, ops) if event.ahead else (state, ())
    for unit in event.units:
        state = _renew(program, state, unit, ops)
        ops.append(Op(Kind.OPEN, Lane.COMPUTE, unit, waits=(Key(Kind.FETCH, unit), Key(Kind.GATHER, unit))))
    for position, unit in enumerate(upcoming if program.gathers else ()):
        if position == 0 or unit not in state.pending:
            state = _renew(program, state, unit, ops)
    return state


def _make_whole(program: Program, state: State, unit: int, keep: frozenset[int], ops: list[Op]) -> State:
    """A unit's weights on the device: all of them, and current."""
    return _renew(program, bring(program, state, unit, keep, ops), unit, ops)


def _renew(program: Program, state: State, unit: int, ops: list[Op]) -> State:
    """The pending update of a unit that is here, for all ranks, and to its home."""
    old = unit in state.pending or (program.gathers and unit not in state.gathered)
    state = gather(program, update(program, state, unit, ops), unit, ops)
    return write_home(program, state, unit, ops) if old else state


def _prefetch(program: Program, state: State, keep: frozenset[int], ops: list[Op]) -> tuple[State, tuple[int, ...]]:
    """Fetch what is expected next, as long as it displaces nothing that is expected sooner; with the units that are
    here now, or on their way."""
    upcoming = state.expected.get(state.phase, ())[state.cursor :]
    for position, unit in enumerate(upcoming[:LOOK_AHEAD]):
        if program.away(unit) and unit not in state.here:
            sooner = keep | frozenset(upcoming[:position])
            kept = sum(program.model.units[u].weight_bytes for u in state.here if u in sooner)
            if kept + program.model.units[unit].weight_bytes > program.limits.window:
                return state, upcoming[:position]
            state = bring(program, state, unit, sooner, ops)
        state = ahead(program, state, unit, ops)
    return state, upcoming[:LOOK_AHEAD]


def _join(program: Program, state: State, event: Join, ops: list[Op]) -> State:
    """Take part in what other ranks do with a unit. See Note [Ranks]."""
    if event.kind == Kind.REDUCE:
        return reduce(program, state, event.unit, ops)
    keep = event.held | state.pinned | {event.unit}
    if event.kind == Kind.FETCH:
        return bring(program, state, event.unit, keep, ops)
    assert event.kind == Kind.GATHER, f"nobody can join {event.kind}"
    return _make_whole(program, state.but(gathered=state.gathered - {event.unit}), event.unit, keep, ops)


def _step(program: Program, state: State, event: Step, ops: list[Op]) -> State:
    """Gradients are home, pins end, updates become due, and what was seen is what to expect."""
    assert not state.arrived, f"gradients of units {sorted(state.arrived)} were never reduced"
    while state.leaving:
        state = drop_grad(program, state, ops)
    state = learn(state, "train").but(pinned=state.pinned & event.held, early=frozenset())
    state = due(program, state, event.due, ops)
    return make_room(program, state, 0, event.held, ops)


def _consume(program: Program, state: State, units: frozenset[int], ops: list[Op]) -> State:
    """Let the compute lane come behind the oldest updates. See Note [Consumed gradients]. Weights that are away are
    here now, and may not be later, unless their update has begun."""
    if not program.limits.consumed:
        return state
    state = state.but(consuming=(*state.consuming, *sorted(units)))
    while state.consuming:
        made = sum(program.model.units[unit].made_bytes for unit in state.consuming)
        passing = (unit for unit in state.consuming if program.away(unit) and unit not in state.begun)
        first = next(passing, None)
        if first is None and made <= program.limits.consumed:
            return state
        first = state.consuming[0] if first is None else first
        keep = state.pinned | {first}
        state = update(program, bring(program, state, first, keep, ops), first, ops)
        state = write_home(program, state, first, ops)
    return state


def _settle(program: Program, state: State, event: Settle, ops: list[Op]) -> State:
    every = range(len(program.model.units))
    if event.units is None:
        state = state.but(training=False)
    units = [u for u in (every if event.units is None else event.units) if u in state.pending]
    for unit in units:
        keep = state.pinned | event.held | {unit}
        state = update(program, bring(program, state, unit, keep, ops), unit, ops)
        state = write_home(program, state, unit, ops)
    for unit in every if event.units is None else event.units:
        state = write_home(program, state, unit, ops)
    state = give_room(program, state, ops)
    while event.units is None and state.leaving:
        state = drop_grad(program, state, ops)
    return state
