"""Updates: page by page, before a unit's next use."""

from dataclasses import replace

from overspill.program.passing import drop_grad, lanes
from overspill.program.words import Key, Kind, Lane, Op, Program, State


def due(state: State, units: frozenset[int], ops: list[Op]) -> State:
    """Updates of these units are due: with the gradients, weights and factors of this moment."""
    ops += [Op(Kind.DUE, Lane.COMPUTE, unit) for unit in sorted(units)]
    return replace(state, pending=state.pending | units)


def update(program: Program, state: State, unit: int, ops: list[Op]) -> State:
    """What is left of a unit's pending update, and the compute lane behind it; its weights are here, and still to be
    written home."""
    if unit not in state.pending:
        return state
    count = len(program.model.units[unit].pages)
    for page in range(state.issued.get(unit, 0), count):
        if program.passes(unit):
            state = _stage(program, state, unit, page, ops)
            if page + 1 < count and program.limits.depth > 1:
                state = _stage(program, state, unit, page + 1, ops)
            state = _issue(program, state, unit, page, ops)
        elif page == 0:
            state = _issue_all(program, state, unit, ops)
    last = (Key(Kind.UPDATE, unit, count - 1), Key(Kind.UPDATE, unit))
    ops.append(Op(Kind.UPDATED, Lane.COMPUTE, unit, waits=last))
    gathered = state.gathered - {unit} if program.gathers else state.gathered
    changed = state.changed | {unit} if program.away(unit) else state.changed
    issued = {u: n for u, n in state.issued.items() if u != unit}
    return replace(state, pending=state.pending - {unit}, issued=issued, gathered=gathered, changed=changed)


def ahead(program: Program, state: State, ops: list[Op]) -> State:
    """The next page of the unit that is needed first, of those whose weights are here."""
    unit = next_unit(program, state)
    if unit is None:
        return state
    if not program.passes(unit):
        return _issue_all(program, state, unit, ops)
    page = state.issued.get(unit, 0)
    return _issue(program, _stage(program, state, unit, page, ops), unit, page, ops)


def next_unit(program: Program, state: State) -> int | None:
    """See Note [Earliest deadline first]."""
    open_ = [
        unit
        for unit in state.pending
        if state.issued.get(unit, 0) < len(program.model.units[unit].pages)
        and (not program.away(unit) or unit in state.here)
    ]
    if len(open_) <= 1:
        return open_[0] if open_ else None
    expected = state.expected.get(state.phase, ())
    for unit in (*expected[state.cursor :], *expected):
        if unit in open_:
            return unit
    return min(open_)


def _issue_all(program: Program, state: State, unit: int, ops: list[Op]) -> State:
    """Update all pages of a unit that has everything on the device."""
    waits = tuple(Key(kind, unit) for kind in (Kind.DUE, Kind.FETCH, Kind.GATHER, Kind.REDUCE))
    ops.append(Op(Kind.UPDATE, program.update_lane, unit, waits=waits, free=True))
    return replace(state, issued={**state.issued, unit: len(program.model.units[unit].pages)})


def _issue(program: Program, state: State, unit: int, page: int, ops: list[Op]) -> State:
    """Update a page that is staged, and send it home."""
    spec, home, lane = program.model.units[unit].pages[page], program.placements[unit].state, program.update_lane
    waits = [Key(kind, unit, page) for kind in (Kind.STATE_FETCH, Kind.PAGE_GRADS)]
    waits += [Key(kind, unit) for kind in (Kind.DUE, Kind.FETCH, Kind.GATHER, Kind.REDUCE)]
    ops.append(Op(Kind.UPDATE, lane, unit, page, waits=tuple(waits), free=True))
    if home != "device" and spec.state_bytes:
        # Behind the update, which the compute lane has not been told of if that has a lane of its own.
        behind, free = (Key(Kind.UPDATE, unit, page),), lane != Lane.COMPUTE
        ops.append(Op(Kind.STATE_STORE, lanes(home)[1], unit, page, spec.state_bytes, behind, free=free))
    return replace(state, issued={**state.issued, unit: page + 1}, ready=state.ready - {(unit, page)})


def _stage(program: Program, state: State, unit: int, page: int, ops: list[Op]) -> State:
    """Bring what a page's update needs to the device, into the slot that was taken the longest time ago. See
    Note [Never far ahead]."""
    placement, spec = program.placements[unit], program.model.units[unit].pages[page]
    state_bytes = spec.state_bytes if placement.state != "device" else 0
    grad_bytes = spec.grad_bytes if placement.grad != "device" else 0
    if (unit, page) in state.ready or not (state_bytes or grad_bytes):
        return state
    while state.leaving and program.shares_room:
        state = drop_grad(program, state, ops)
    slot, full = state.turn % program.limits.depth, len(state.staged) >= program.limits.depth
    old = state.staged[0] if full else None
    done = () if old is None else (Key(Kind.STATE_STORE, *old), Key(Kind.UPDATE, *old))
    if state_bytes:
        stored = (Key(Kind.STATE_STORE, unit, page),)
        lane = lanes(placement.state)[0]
        ops.append(Op(Kind.STATE_FETCH, lane, unit, page, state_bytes, stored, slot, done, free=True))
    if grad_bytes:
        waits = (Key(Kind.DUE, unit), *(Key(Kind.GRAD_STORE, unit, part.param) for part in spec.parts))
        lane = lanes(placement.grad)[0]
        ops.append(Op(Kind.PAGE_GRADS, lane, unit, page, grad_bytes, waits, slot, done, free=True))
    kept = state.staged[1:] if full else state.staged
    ready = state.ready | {(unit, page)}
    return replace(state, staged=(*kept, (unit, page)), ready=ready, turn=state.turn + 1)
