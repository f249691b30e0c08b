"""Updates: page by page, before a unit's next use."""

from collections.abc import Iterator
from dataclasses import replace

from overspill.program.passing import drop_grad, lanes
from overspill.program.words import Key, Kind, Lane, Op, Program, State

Staged = tuple[int, int, int]
"""(unit, page, slot)"""
QUEUED = 3
"""Copies of pages that may be on their way in one direction. See Note [Never far ahead]."""


def due(state: State, units: frozenset[int], ops: list[Op]) -> State:
    """Updates of these units are due: with the gradients, weights and factors of this moment."""
    ops += [Op(Kind.DUE, Lane.COMPUTE, unit) for unit in sorted(units)]
    # In backward they become due the other way round.
    order = sorted(units, reverse=True)
    return state.but(
        pending=state.pending | units, due=(*state.due, *order), latest=order[-1] if order else state.latest
    )


def update(program: Program, state: State, unit: int, ops: list[Op]) -> State:
    """What is left of a unit's pending update, and the compute lane behind it; its weights are here, and still to be
    written home."""
    if unit not in state.pending:
        return state
    count = len(program.model.units[unit].pages)
    for page in range(state.issued.get(unit, 0), count):
        if program.passes(unit):
            state = stage(program, state, unit, page, ops)
            if page + 1 < count and program.limits.depth > 1:
                state = stage(program, state, unit, page + 1, ops)
            state = issue(program, state, unit, page, ops)
        elif page == 0:
            state = issue_all(program, state, unit, ops)
    last = (Key(Kind.UPDATE, unit, count - 1), Key(Kind.UPDATE, unit))
    ops.append(Op(Kind.UPDATED, Lane.COMPUTE, unit, waits=last))
    gathered = state.gathered - {unit} if program.gathers else state.gathered
    changed = state.changed | {unit} if program.away(unit) else state.changed
    issued = {u: n for u, n in state.issued.items() if u != unit}
    left = tuple(u for u in state.due if u != unit)
    state = state.but(pending=state.pending - {unit}, due=left, issued=issued)
    return state.but(gathered=gathered, changed=changed)


def deadlines(state: State) -> Iterator[int]:
    """Units in the order in which they are expected to be needed, this step's first."""
    expected = state.expected.get(state.phase, ())
    yield from expected[state.cursor :]
    yield from expected


def issue_all(program: Program, state: State, unit: int, ops: list[Op]) -> State:
    """Update all pages of a unit that has everything on the device."""
    waits = tuple(Key(kind, unit) for kind in (Kind.DUE, Kind.FETCH, Kind.GATHER, Kind.REDUCE))
    ops.append(Op(Kind.UPDATE, program.update_lane, unit, waits=waits, free=True))
    return state.but(issued={**state.issued, unit: len(program.model.units[unit].pages)})


def issue(program: Program, state: State, unit: int, page: int, ops: list[Op]) -> State:
    """Update a page that is staged, and send it home."""
    spec, home, lane = program.model.units[unit].pages[page], program.placements[unit].state, program.update_lane
    waits = [Key(kind, unit, page) for kind in (Kind.STATE_FETCH, Kind.PAGE_GRADS)]
    waits += [Key(kind, unit) for kind in (Kind.DUE, Kind.FETCH, Kind.GATHER, Kind.REDUCE)]
    ops.append(Op(Kind.UPDATE, lane, unit, page, waits=tuple(waits), free=True))
    if home != "device" and spec.state_bytes:
        # Behind the update, which the compute lane has not been told of if that has a lane of its own.
        behind, free = (Key(Kind.UPDATE, unit, page),), lane != Lane.COMPUTE
        stores = Op(Kind.STATE_STORE, lanes(home)[1], unit, page, spec.state_bytes, behind, free=free)
        ops.append(replace(stores, done=state.going[:1] if len(state.going) >= QUEUED else ()))
        state = state.but(going=(*state.going, stores.key)[-QUEUED:])
    issued, done = {**state.issued, unit: page + 1}, {(unit, page)}
    return state.but(issued=issued, ready=state.ready - done, fed=state.fed - done)


def stage(program: Program, state: State, unit: int, page: int, ops: list[Op]) -> State:
    """Bring what a page's update needs to the device, if that has not been done ahead."""
    while state.leaving and program.shares_room:
        state = drop_grad(program, state, ops)
    fetched = next((s[2] for s in state.staged if s[:2] == (unit, page) and (unit, page) in state.ready), None)
    slot, done = fetched, tuple[Key, ...]()
    if slot is None:
        state, slot, done = take_slot(program, state, (unit, page))
        state = fetch(program, state, (unit, page), (slot, done), ops)
    placement, spec = program.placements[unit], program.model.units[unit].pages[page]
    if placement.grad != "device" and spec.grad_bytes and (unit, page) not in state.fed:
        state = state.but(fed=state.fed | {(unit, page)})
        waits = (Key(Kind.DUE, unit), *(Key(Kind.GRAD_STORE, unit, part.param) for part in spec.parts))
        lane = lanes(placement.grad)[0]
        ops.append(Op(Kind.PAGE_GRADS, lane, unit, page, spec.grad_bytes, waits, slot, done, free=True))
    return state


def take_slot(
    program: Program, state: State, page: tuple[int, int], free: Staged | None = None
) -> tuple[State, int, tuple[Key, ...]]:
    """Give a page a slot: which, and what must be over before it may be used. See Note [Never far ahead]. `free`: whose
    slot it may have."""
    staged, ready, slot, done = state.staged, state.ready, len(state.staged), tuple[Key, ...]()
    old = free or next((s for s in staged if s[:2] == page), None)
    if old is None and len(staged) >= program.limits.depth:
        old = next((s for s in staged if s[:2] not in ready), None) or _needed_last(state, page)
    if old is not None:
        staged, slot, ready = tuple(s for s in staged if s is not old), old[2], ready - {old[:2]}
        state, done = state.but(fed=state.fed - {old[:2]}), uses(old)
    return state.but(staged=(*staged, (*page, slot)), ready=ready | {page}), slot, done


def uses(staged: Staged) -> tuple[Key, ...]:
    """What may be using a slot."""
    kinds = (Kind.STATE_STORE, Kind.UPDATE, Kind.STATE_FETCH, Kind.PAGE_GRADS)
    return tuple(Key(kind, *staged[:2]) for kind in kinds)


def fetch(
    program: Program, state: State, page: tuple[int, int], where: tuple[int, tuple[Key, ...]], ops: list[Op]
) -> State:
    home, spec = program.placements[page[0]].state, program.model.units[page[0]].pages[page[1]]
    if home == "device" or not spec.state_bytes:
        return state
    (slot, done), stored = where, (Key(Kind.STATE_STORE, *page),)
    done += state.coming[:1] if len(state.coming) >= QUEUED else ()
    op = Op(Kind.STATE_FETCH, lanes(home)[0], *page, spec.state_bytes, stored, slot, done, free=True)
    ops.append(op)
    return state.but(coming=(*state.coming, op.key)[-QUEUED:])


def _needed_last(state: State, page: tuple[int, int]) -> tuple[int, int, int]:
    """Of the pages that were fetched ahead, the one that is expected last gives its slot up; none that is updated just
    before the one that wants it."""
    order = {unit: i for i, unit in reversed(list(enumerate(deadlines(state))))}
    first = state.issued.get(page[0], 0)
    others = [s for s in state.staged if not (s[0] == page[0] and first <= s[1] < page[1])]
    return max(others, key=lambda s: (order.get(s[0], len(order)), s[1]))
