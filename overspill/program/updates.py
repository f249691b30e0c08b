"""Updates: page by page, before a unit's next use."""

from dataclasses import replace

from overspill.program.passing import drop_grad, drop_page, lanes
from overspill.program.words import Key, Kind, Lane, Op, Program, State


def update(program: Program, state: State, unit: int, ops: list[Op]) -> State:
    """Run a unit's pending update page by page; its weights are here, and still to be written home. See Limits.depth
    for the overlap."""
    if unit not in state.pending:
        return state
    pages = program.model.units[unit].pages
    for page in range(len(pages)):
        if page == 0 or program.limits.depth == 1:
            state = _stage(program, state, unit, page, ops)
        if page + 1 < len(pages) and program.limits.depth > 1:
            state = _stage(program, state, unit, page + 1, ops)
        waits = [Key(kind, unit, page) for kind in (Kind.STATE_FETCH, Kind.PAGE_GRADS)]
        waits += [Key(kind, unit) for kind in (Kind.FETCH, Kind.GATHER, Kind.REDUCE)]
        ops.append(Op(Kind.UPDATE, Lane.COMPUTE, unit, page, waits=tuple(waits)))
        home = program.placements[unit].state
        if home != "device" and pages[page].state_bytes:
            ops.append(Op(Kind.STATE_STORE, lanes(home)[1], unit, page, pages[page].state_bytes))
    gathered = state.gathered - {unit} if program.gathers else state.gathered
    changed = state.changed | {unit} if program.away(unit) else state.changed
    return replace(state, pending=state.pending - {unit}, gathered=gathered, changed=changed)


def _stage(program: Program, state: State, unit: int, page: int, ops: list[Op]) -> State:
    """Bring what a page's update needs to the device; drop the oldest staged page first, if there are too many."""
    placement, spec = program.placements[unit], program.model.units[unit].pages[page]
    while state.leaving:
        state = drop_grad(program, state, ops)
    while len(state.staged) >= program.limits.depth:
        state = drop_page(state, ops)
    if placement.state != "device" and spec.state_bytes:
        stored = (Key(Kind.STATE_STORE, unit, page),)
        ops.append(Op(Kind.STATE_FETCH, lanes(placement.state)[0], unit, page, spec.state_bytes, stored))
    if placement.grad != "device" and spec.grad_bytes:
        waits = tuple(Key(Kind.GRAD_STORE, unit, part.param) for part in spec.parts)
        ops.append(Op(Kind.PAGE_GRADS, lanes(placement.grad)[0], unit, page, spec.grad_bytes, waits))
    return replace(state, staged=(*state.staged, (unit, page)))
