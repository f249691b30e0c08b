"""Gradients: reduced over ranks, added to what is there, and sent home."""

from overspill.program.passing import drop_grad, give_room, lanes
from overspill.program.words import Grad, Key, Kind, Lane, Op, Program, State

WAITING = 2
"""Units whose gradients may wait for the others of the same unit."""


def grad(program: Program, state: State, event: Grad, ops: list[Op]) -> State:
    """A contribution arrived: it goes its way, or waits for the others of its unit to be reduced with them."""
    unit = event.unit
    if not event.reduced:
        return _take(program, state, event, ops)
    before = state.arrived.get(unit, ())
    again = any(param == event.param for param, _ in before)
    arrived = before if again else (*before, (event.param, event.first))
    state = state.but(arrived={**state.arrived, unit: arrived})
    waited = {i for i, p in enumerate(program.model.units[unit].params) if p.trainable}
    if waited <= {param for param, _ in arrived}:
        return reduce(program, state, unit, ops)
    # What waits for parameters that are not used would pile up: the oldest goes, and what still comes goes later.
    oldest = next(u for u in state.arrived if u != unit) if len(state.arrived) > WAITING else None
    return state if oldest is None else reduce(program, state, oldest, ops)


def reduce(program: Program, state: State, unit: int, ops: list[Op]) -> State:
    """Average what arrived of a unit's gradients over all ranks; what did not counts as zero."""
    arrived = state.arrived.get(unit, ())
    state = state.but(arrived={u: found for u, found in state.arrived.items() if u != unit})
    state = give_room(program, state, ops)
    nbytes = sum(p.grad_item * p.numel for p in program.model.units[unit].params)
    ops.append(Op(Kind.REDUCE, Lane.COMM, unit, nbytes=nbytes))
    for param, first in arrived:
        state = _take(program, state, Grad(unit, param, first), ops)
    return state


def flush(program: Program, state: State, ops: list[Op]) -> State:
    return reduce(program, state, min(state.arrived), ops) if state.arrived else state


def _take(program: Program, state: State, event: Grad, ops: list[Op]) -> State:
    """Add a contribution to what is there, norm it while it is on the device, send it home; forget an older one."""
    home, unit, param = program.placements[event.unit].grad, event.unit, event.param
    nbytes = program.model.units[unit].params[param].grad_bytes
    reduced = Key(Kind.REDUCE, unit)
    if home == "device" or not nbytes:
        if not event.first:
            ops.append(Op(Kind.GRAD_ADD, Lane.COMPUTE, unit, param, waits=(reduced,)))
        return state
    state = give_room(program, state, ops)
    while state.leaving and nbytes + _flying(program, state) > program.limits.flight:
        state = drop_grad(program, state, ops)
    if not event.first:
        stored, fetched = Key(Kind.GRAD_STORE, unit, param), Key(Kind.GRAD_FETCH, unit, param)
        if (unit, param) not in state.leaving:
            ops.append(Op(Kind.GRAD_FETCH, lanes(home)[0], unit, param, nbytes, (stored,)))
        ops.append(Op(Kind.GRAD_ADD, Lane.COMPUTE, unit, param, nbytes, (stored, fetched, reduced)))
        state = state.but(leaving=tuple(k for k in state.leaving if k != (unit, param)))
    ops.append(Op(Kind.GRAD_NORM, Lane.COMPUTE, unit, param, waits=(reduced,)))
    # An update that has begun may still be fetching the gradient that was there before.
    behind = (reduced, Key(Kind.UPDATE, unit)) if unit in state.begun else (reduced,)
    ops.append(Op(Kind.GRAD_STORE, lanes(home)[1], unit, param, nbytes, behind))
    return state.but(leaving=(*(k for k in state.leaving if k != (unit, param)), (unit, param)))


def _flying(program: Program, state: State) -> int:
    return sum(program.model.units[u].params[p].grad_bytes for u, p in state.leaving)
