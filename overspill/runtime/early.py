"""Who begins updates: with the step (lazy.py), or in a backward pass: that of their own step (eager.py), or of the next
one (delayed.py)."""

import weakref
from typing import Any

from overspill.program import Due
from overspill.runtime.arrivals import Arrivals
from overspill.runtime.delayed import Delayed
from overspill.runtime.eager import Eager
from overspill.runtime.engine import Engine
from overspill.runtime.lazy import Early, Lazy
from overspill.runtime.residency import seen
from overspill.runtime.updates import Job


def early(engine: Engine, groups: list[dict[str, Any]]) -> Early:
    """As it was asked for."""
    itself, parts, units = weakref.proxy(engine), engine.parts, engine.units
    arrivals = Arrivals(units, groups, engine.executor.lanes.device)

    def begin(unit: int, jobs: list[Job]) -> bool:
        if unit in itself.executor.state.pending:
            itself.settle_units((unit,))
        if seen(itself.residency, (unit,)):
            # Whoever holds views of weights would see them before their step.
            return False
        # An update reads its gradients where they are now, and comes behind what the current stream was given.
        arrivals.wait(unit)
        itself.parts.made.grads.moved_in()
        itself.parts.made.updates.put(unit, tuple(jobs))
        itself.executor(Due(frozenset((unit,))))
        return True

    def take(unit: int, own: list[dict[str, Any]]) -> bool:
        return begin(unit, itself.steps.jobs(own)[unit])

    if parts.eager:
        consumed, made = engine.executor.program.limits.consumed, max(unit.spec.made_bytes for unit in units)
        room = consumed + made if consumed else 0
        found = Eager(units, arrivals, groups, take, engine.executor)
        found.room = room
        return found
    if parts.delay_after is not None:
        return Delayed(units, arrivals, parts.delay_after, begin, parts.made.grads.bytes.keep)
    return Lazy()
