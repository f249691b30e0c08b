"""Updates ahead of their use: see Note [Earliest deadline first].

Two things go on side by side: pages are fetched into slots that are free, in the order in which they will be updated;
and those that are there and whose gradients are computed are updated and sent home. Neither gets far ahead of the link.
"""

from collections.abc import Iterable, Iterator

from overspill.program.updates import (
    QUEUED,
    Staged,
    deadlines,
    fetch,
    issue,
    issue_all,
    stage,
    take_slot,
    uses,
)
from overspill.program.words import Ahead, Key, Kind, Op, Program, State

SEEN = 4
"""Slots, those that were taken the longest time ago, of which it is looked whether they are free."""
KEPT_FREE = 2
"""Slots that are not given to pages of the next step."""


def ahead(program: Program, state: State, event: Ahead, ops: list[Op]) -> State:
    """Fetch a page and update another one, as far as that is possible now."""
    if program.shares_room:
        return state
    unit = next_unit(program, state, event.computed)
    if unit is not None and not program.passes(unit):
        return issue_all(program, state, unit, ops)
    state = _fetch_one(program, state, event, ops)
    return state if unit is None else _update_one(program, state, event, unit, ops)


def watched(program: Program, state: State) -> Iterator[Key]:
    """What may keep something from being done: whoever asks for something ahead must know what of this is not over,
    the most likely reasons first."""
    yield from state.coming
    yield from state.going
    for old in _oldest(state):
        yield from uses(old)
    for page in state.ready:
        if program.from_disk(page[0]):
            yield from (Key(kind, *page) for kind in (Kind.STATE_FETCH, Kind.PAGE_GRADS))


def next_unit(program: Program, state: State, computed: frozenset[int]) -> int | None:
    """Of the units whose weights are here and that have pages left, the one that is needed first; one whose gradients
    are still being computed only if there is no other."""
    return next(_in_order(program, state, computed), None)


def _in_order(program: Program, state: State, computed: frozenset[int]) -> Iterator[int]:
    left = [
        unit
        for unit in state.due
        if state.issued.get(unit, 0) < len(program.model.units[unit].pages)
        and (not program.away(unit) or unit in state.here)
    ]
    there = {unit for unit in left if unit in computed}
    yield from (unit for unit in dict.fromkeys(deadlines(state)) if unit in there)
    rest = [unit for unit in left if unit not in there]
    # In backward they are computed in the order in which they become due.
    known = [] if program.eager else [unit for unit in dict.fromkeys(deadlines(state)) if unit in rest]
    yield from dict.fromkeys((*known, *rest))


def _oldest(state: State) -> list[Staged]:
    """Slots that may be free: of pages that do not wait for their update."""
    found: list[Staged] = []
    for each in state.staged:
        if each[:2] not in state.ready:
            found.append(each)
            if len(found) == SEEN:
                break
    return found


def _full(queue: tuple[Key, ...], busy: frozenset[Key]) -> bool:
    return len(queue) >= QUEUED and queue[0] in busy


def _free(program: Program, state: State, page: tuple[int, int], busy: frozenset[Key]) -> tuple[bool, Staged | None]:
    """Whether there is a slot for a page, and whose it was."""
    own = next((s for s in state.staged if s[:2] == page), None)
    if own is not None:
        return not busy & set(uses(own)), own
    if len(state.staged) < program.limits.depth:
        return True, None
    old = next((s for s in _oldest(state) if not busy & set(uses(s))), None)
    return old is not None, old


def _fetch_one(program: Program, state: State, event: Ahead, ops: list[Op]) -> State:
    if _full(state.coming, event.busy):
        return state
    page = next(_unfetched(program, state, _in_order(program, state, event.computed)), None)
    if page is None and state.training and len(state.ready) + KEPT_FREE <= program.limits.depth:
        page = next(_unfetched(program, state, _next_step(program, state), again=True), None)
    if page is None:
        return state
    there, free = _free(program, state, page, event.busy)
    if not there:
        return state
    state, slot, done = take_slot(program, state, page, free)
    return fetch(program, state, page, (slot, done), ops)


def _unfetched(program: Program, state: State, units: Iterable[int], again: bool = False) -> Iterator[tuple[int, int]]:
    """Pages that live elsewhere and are not there yet; `again`: those of the next step."""
    for unit in units:
        if program.placements[unit].state != "device":
            first = 0 if again else state.issued.get(unit, 0)
            for page in range(first, len(program.model.units[unit].pages)):
                if program.model.units[unit].pages[page].state_bytes and (unit, page) not in state.ready:
                    yield unit, page


def _next_step(program: Program, state: State) -> Iterator[int]:
    """Units in the order in which the next updates will be due. Those that are pending have all they need."""
    order = list(dict.fromkeys(state.expected.get("train", ())))
    if program.eager:
        order.reverse()
        after = order.index(state.latest) + 1 if state.latest in order else 0
        order = order[after:] + order[:after]
    return (unit for unit in order if unit not in state.pending)


def _update_one(program: Program, state: State, event: Ahead, unit: int, ops: list[Op]) -> State:
    page = (unit, state.issued.get(unit, 0))
    if unit not in event.computed or _full(state.going, event.busy):
        return state
    if page not in state.ready and (
        program.placements[unit].state != "device" or not _free(program, state, page, event.busy)[0]
    ):
        return state
    if program.from_disk(unit):
        # Nobody shall wait for a disk while others want to go on.
        if page not in state.ready or event.busy & {Key(Kind.STATE_FETCH, *page), Key(Kind.PAGE_GRADS, *page)}:
            return state
        if program.placements[unit].grad == "nvme" and page not in state.fed:
            return stage(program, state, *page, ops)
    return issue(program, stage(program, state, *page, ops), *page, ops)
