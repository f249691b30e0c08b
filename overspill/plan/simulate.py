"""Folds the program over the events of training steps and counts bytes, without moving any."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from overspill.program import Event, Grad, Kind, Lane, Need, Op, Program, Settle, Step, react, start


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a step takes, beyond what lives on the device: peak bytes, and bytes moved per lane."""

    window: int
    """Peak bytes of weights that live elsewhere."""
    gradients: int
    """Peak bytes of gradients on their way home."""
    moved: dict[Lane, int]


STEPS = 2
"""Steps that are simulated: what the first one leaves, the second finds."""
GIVES = {Kind.RELEASE: "window", Kind.GRAD_ADD: "gradients", Kind.GRAD_DROP: "gradients"}


def step_events(program: Program, micro_batches: int = 1) -> Iterator[Event]:
    """One training step as it is predicted: forward, mirrored backward with its gradients, step."""
    order = range(len(program.model.units))
    for batch in range(micro_batches):
        for unit in order:
            yield Need((unit,))
        for unit in reversed(order):
            yield Need((unit,))
            for index, p in enumerate(program.model.units[unit].params):
                if p.trainable:
                    yield Grad(unit, index, first=batch == 0, reduced=program.model.sharding.shared)
    due = (u for u in order if any(p.trainable for p in program.model.units[u].params))
    yield Step(frozenset(due))


def simulate(program: Program, micro_batches: int = 1) -> Simulated:
    """Peaks over two steps and the settling after them; traffic of the last step."""
    now: Counter[str] = Counter()
    peak: Counter[str] = Counter()
    moved: Counter[Lane] = Counter()
    last = moved
    state = start(program)
    for step in range(STEPS + 1):
        moved, last = Counter(), moved
        for event in step_events(program, micro_batches) if step < STEPS else (Settle(),):
            if isinstance(event, Grad) and program.placements[event.unit].grad != "device":
                now["gradients"] += program.model.units[event.unit].params[event.param].grad_bytes
                peak["gradients"] = max(peak["gradients"], now["gradients"])
            state, ops = react(program, state, event)
            for op in ops:
                _count(program, op, now, moved)
                for what, nbytes in now.items():
                    peak[what] = max(peak[what], nbytes)
    return Simulated(peak["window"], peak["gradients"], dict(last))


def _count(program: Program, op: Op, now: Counter[str], moved: Counter[Lane]) -> None:
    if op.lane != Lane.COMPUTE:
        moved[op.lane] += op.nbytes
    if op.kind == Kind.FETCH:
        # Its whole buffer is taken, however little of it comes from its home.
        now["window"] += program.model.units[op.unit].weight_bytes
    elif op.kind == Kind.GRAD_FETCH:
        now["gradients"] += op.nbytes
    if op.kind in GIVES:
        now[GIVES[op.kind]] -= op.nbytes
