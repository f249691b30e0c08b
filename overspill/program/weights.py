"""Weights: needed, fetched, gathered from all ranks, released, written home."""

from overspill.program.passing import lanes
from overspill.program.updates import update
from overspill.program.words import Key, Kind, Lane, Mark, Need, Op, Program, State
from overspill.specs import Phase

MEMORY = 4096
"""Needs of one step that are remembered; a loop that never steps has no end."""


def mark(program: Program, state: State, event: Mark) -> State:
    units = frozenset(u for u in event.units if program.away(u))
    assert units <= frozenset(state.here), f"units {sorted(units)} were used but are not on the device"
    pinned = state.pinned | units if event.pin else state.pinned
    if not event.written:
        return state.but(pinned=pinned)
    # Each rank's own share is what counts of what was written.
    gathered = state.gathered - frozenset(event.units) if program.gathers else state.gathered
    return state.but(pinned=pinned, changed=state.changed | units, gathered=gathered)


def advance(state: State, event: Need) -> State:
    """Move the cursor behind this need and remember it. See Note [Expected order]."""
    cursor, seen = state.cursor, dict(state.seen)
    expected = state.expected.get(event.phase, ())
    for unit in event.units:
        if unit in expected[cursor:]:
            cursor = expected.index(unit, cursor) + 1
        past = seen.get(event.phase, ())
        if (not past or past[-1] != unit) and len(past) < MEMORY:
            seen[event.phase] = (*past, unit)
    return state.but(cursor=cursor, seen=seen, phase=event.phase)


def learn(state: State, phase: Phase) -> State:
    seen = state.seen.get(phase, ())
    expected = {**state.expected, phase: seen} if seen else state.expected
    return state.but(expected=expected, seen={**state.seen, phase: ()}, cursor=0)


def bring(program: Program, state: State, unit: int, keep: frozenset[int], ops: list[Op]) -> State:
    """Fetch a unit's weights, or this rank's share of them, if they are not here, making room first."""
    if not program.away(unit) or unit in state.here:
        return state
    home, spec = program.placements[unit].weight, program.model.units[unit]
    state = make_room(program, state, spec.weight_bytes, keep, ops)
    ops.append(Op(Kind.FETCH, lanes(home)[0], unit, nbytes=spec.home_bytes, waits=(Key(Kind.STORE, unit),)))
    return state.but(here=(*state.here, unit))


def gather(program: Program, state: State, unit: int, ops: list[Op]) -> State:
    """Make a unit's weights, of which each rank has its own share, whole on this one."""
    if not program.gathers or unit in state.gathered:
        return state
    nbytes = program.model.units[unit].weight_bytes
    ops.append(Op(Kind.GATHER, Lane.COMM, unit, nbytes=nbytes, waits=(Key(Kind.FETCH, unit),)))
    # A home that is whole lacks what came from the others.
    behind = program.away(unit) and not program.model.sharding.split("weight")
    changed = state.changed | {unit} if behind else state.changed
    return state.but(gathered=state.gathered | {unit}, changed=changed)


def _window(program: Program, state: State) -> int:
    return sum(program.model.units[u].weight_bytes for u in state.here)


def make_room(program: Program, state: State, nbytes: int, keep: frozenset[int], ops: list[Op]) -> State:
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
    if unit in state.begun:
        # Its update has begun, on weights that are here.
        state = update(program, state, unit, ops)
    state = write_home(program, state, unit, ops)
    waits = tuple(Key(kind, unit) for kind in (Kind.FETCH, Kind.STORE, Kind.GATHER))
    ops.append(Op(Kind.RELEASE, Lane.COMPUTE, unit, nbytes=program.model.units[unit].weight_bytes, waits=waits))
    here = tuple(u for u in state.here if u != unit)
    gathered = state.gathered - {unit} if program.model.sharding.split("weight") else state.gathered
    return state.but(here=here, gathered=gathered)


def write_home(program: Program, state: State, unit: int, ops: list[Op]) -> State:
    if unit not in state.changed:
        return state
    home, nbytes = program.placements[unit].weight, program.model.units[unit].home_bytes
    waits = (Key(Kind.FETCH, unit), Key(Kind.GATHER, unit))
    ops.append(Op(Kind.STORE, lanes(home)[1], unit, nbytes=nbytes, waits=waits))
    return state.but(changed=state.changed - {unit})
