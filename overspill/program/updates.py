"""Updates: before a unit's next use, or ahead of it."""

from collections.abc import Iterator

from overspill.program.passing import drop_grad, lanes
from overspill.program.words import Key, Kind, Lane, Op, Program, State


def due(program: Program, state: State, units: frozenset[int], ops: list[Op]) -> State:
    """Updates of these units are due: with the gradients, weights and factors of this moment. See Note [Earliest
    deadline first]."""
    ops += [Op(Kind.DUE, Lane.COMPUTE, unit) for unit in sorted(units)]
    state = state.but(pending=state.pending | units)
    for unit in sorted(units, key=lambda unit: deadline(state, unit)) if program.piped else ():
        state = ahead(program, state, unit, ops)
    return state


def ahead(program: Program, state: State, unit: int, ops: list[Op]) -> State:
    """Hand a pending update out ahead of its use, where somebody takes it and the weights are here."""
    wanted = program.piped and unit in state.pending and unit not in state.begun
    return _begin(program, state, unit, ops) if wanted and program.has(state, unit) else state


def update(program: Program, state: State, unit: int, ops: list[Op]) -> State:
    """A unit's pending update, if it has not begun, and the compute lane behind it; its weights are here, and still to
    be written home."""
    if unit not in state.pending:
        return state
    if unit not in state.begun:
        state = _begin(program, state, unit, ops)
    last = (Key(Kind.UPDATE, unit, len(program.model.units[unit].pages) - 1), Key(Kind.UPDATE, unit))
    ops.append(Op(Kind.UPDATED, Lane.COMPUTE, unit, waits=last))
    gathered = state.gathered - {unit} if program.gathers else state.gathered
    changed = state.changed | {unit} if program.away(unit) else state.changed
    state = state.but(pending=state.pending - {unit}, begun=state.begun - {unit})
    consuming = tuple(u for u in state.consuming if u != unit)
    return state.but(gathered=gathered, changed=changed, consuming=consuming)


def next_updates(program: Program, state: State) -> Iterator[int]:
    """Units in the order in which updates will begin next: as they are needed, if all are due with the step; else the
    other way round, as gradients are complete, and those that have begun in this pass not before the next one. Who
    lives on the device and has been updated since its last use is not asked for, so what was seen lacks it: it comes
    where the model has it, behind what was."""
    seen = state.expected.get("train", ())
    if not program.eager:
        return (unit for unit in dict.fromkeys(seen) if program.passes(unit) and unit not in state.begun)
    order = [*dict.fromkeys((*seen, *range(len(program.model.units))))]
    order.reverse()
    order.sort(key=lambda unit: unit in state.early)
    return (unit for unit in order if program.passes(unit))


def deadline(state: State, unit: int) -> int:
    """When a unit is expected to be needed: the position of that need, in this step or the next."""
    expected = state.expected.get(state.phase, ())
    if unit in expected[state.cursor :]:
        return expected.index(unit, state.cursor)
    return len(expected) + (expected.index(unit) if unit in expected else 0)


def _begin(program: Program, state: State, unit: int, ops: list[Op]) -> State:
    """Hand a unit's pages out: all together to whoever passes them through the ring, or one by one."""
    pages = program.model.units[unit].pages
    if program.piped or not program.passes(unit):
        lane = Lane.PAGES if program.piped else program.update_lane
        waits = [Key(kind, unit) for kind in (Kind.DUE, Kind.FETCH, Kind.STORE, Kind.GATHER, Kind.REDUCE)]
        if program.placements[unit].grad != "device":
            params = dict.fromkeys(part.param for page in pages for part in page.parts)
            waits += [Key(Kind.GRAD_STORE, unit, param) for param in params]
        ops.append(Op(Kind.UPDATE, lane, unit, waits=tuple(waits), free=True))
    else:
        for page in range(len(pages)):
            state = _stage(program, state, unit, page, ops)
            if page + 1 < len(pages) and program.limits.depth > 1:
                state = _stage(program, state, unit, page + 1, ops)
            state = _issue(program, state, unit, page, ops)
    return state.but(begun=state.begun | {unit})


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
    return state.but(ready=state.ready - {(unit, page)})


def _stage(program: Program, state: State, unit: int, page: int, ops: list[Op]) -> State:
    """Bring what a page's update needs to the device, into the slot that was taken the longest time ago. See
    Note [Never far ahead]."""
    if (unit, page) in state.ready:
        return state
    while state.leaving and program.shares_room:
        state = drop_grad(program, state, ops)
    placement, spec = program.placements[unit], program.model.units[unit].pages[page]
    states = placement.state != "device" and spec.state_bytes > 0
    grads = placement.grad != "device" and spec.grad_bytes > 0
    if not states and not grads:
        # It takes no slot: whoever took that after it would wait for its update, not for who was inside before.
        return state.but(ready=state.ready | {(unit, page)})
    slot, full = state.turn % program.limits.depth, len(state.staged) >= program.limits.depth
    old = state.staged[0] if full else None
    done = () if old is None else tuple(Key(kind, *old) for kind in (Kind.STATE_STORE, Kind.UPDATE))
    if states:
        stored, lane = (Key(Kind.STATE_STORE, unit, page),), lanes(placement.state)[0]
        ops.append(Op(Kind.STATE_FETCH, lane, unit, page, spec.state_bytes, stored, slot, done, free=True))
    if grads:
        waits = (Key(Kind.DUE, unit), *(Key(Kind.GRAD_STORE, unit, part.param) for part in spec.parts))
        lane = lanes(placement.grad)[0]
        ops.append(Op(Kind.PAGE_GRADS, lane, unit, page, spec.grad_bytes, waits, slot, done, free=True))
    kept = state.staged[1:] if full else state.staged
    return state.but(staged=(*kept, (unit, page)), ready=state.ready | {(unit, page)}, turn=state.turn + 1)
