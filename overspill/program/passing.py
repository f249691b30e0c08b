"""What passes through the device on its way: pages of an update, gradients going home."""

from overspill.program.words import Key, Kind, Lane, Op, Program, State
from overspill.specs import TierName


def lanes(tier: TierName) -> tuple[Lane, Lane]:
    """Who carries bytes from a home tier to the device, and who carries them back."""
    return (Lane.READ, Lane.WRITE) if tier == "nvme" else (Lane.UP, Lane.DOWN)


def give_room(program: Program, state: State, ops: list[Op]) -> State:
    """Gradients come by: pages make room for them where there is none for both. See Note [Passing bytes]."""
    while state.staged and program.shares_room:
        unit, page = state.staged[0]
        waits = (Key(Kind.STATE_STORE, unit, page), Key(Kind.UPDATE, unit, page))
        ops.append(Op(Kind.PAGE_DROP, Lane.COMPUTE, unit, page, waits=waits))
        state = state.but(staged=state.staged[1:])
    return state


def drop_grad(program: Program, state: State, ops: list[Op]) -> State:
    unit, param = state.leaving[0]
    nbytes = program.model.units[unit].params[param].grad_bytes
    ops.append(Op(Kind.GRAD_DROP, Lane.COMPUTE, unit, param, nbytes, (Key(Kind.GRAD_STORE, unit, param),)))
    return state.but(leaving=state.leaving[1:])
