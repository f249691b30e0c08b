"""When more is known of activations: another plan, with more on the device. The runtime measures, this plans anew."""

import dataclasses
import logging

from overspill.config import Options
from overspill.plan.plan import Plan
from overspill.planning import Ground, forms_of, improved
from overspill.runtime.engine import Engine
from overspill.specs import ROLES, Activations, MiB, human

log = logging.getLogger("overspill")

MARGIN = 256 * MiB
MARGIN_SHARE = 0.06
"""Of the device budget: what is kept free beside what activations were seen to take, because steps are not all alike
and torch's allocator cannot use every hole; twice that where it had to look for holes already."""


class CurrentPlan:
    """The plan that holds now."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan


def watch(engine: Engine, held: CurrentPlan, how: tuple[Options, Ground]) -> None:
    """Plan anew when the engine has measured, if the plan was ours to make and something is not on the device."""
    chosen, ground = how
    if chosen.place is not None or ground.comm is not None or not engine.measures.sees_activations:
        return
    if all(p.of(role) == "device" for p in held.plan.placements for role in ROLES):
        return
    # What the user's optimizer would keep for each parameter is asked again, of the optimizer itself.
    layout, optimizer = engine.parts.layout, engine.parts.optimizer
    forms = forms_of(optimizer, chosen, ground.sharding(held.plan.model.sharding.zero, optimizer))

    def measured(seen: Activations) -> bool:
        """Whether it is worth while to measure again."""
        shares = MARGIN_SHARE * (2 if engine.measures.pressed else 1)
        margin = max(MARGIN, int(shares * held.plan.budget.device))
        kept = Activations(seen.before + margin, seen.after + margin)
        found, most = improved(held.plan, layout, (chosen, ground, forms), kept), max(seen.before, seen.after)
        if found is None:
            log.info("activations took %s; the plan stays as it is", human(most))
            return False
        move_in(engine, found)
        moved = _owned(found) - _owned(held.plan)
        log.info("activations took %s, so %s more live on the device now\n%s", human(most), human(moved), found)
        held.plan = found
        return True

    engine.measures.begin()
    engine.when_measured = measured


def _owned(plan: Plan) -> int:
    return plan.peak("device") - plan.bytes_of("device", "activations")


def move_in(engine: Engine, plan: Plan) -> None:
    """Another plan comes into force: what there is room for after all moves to the device, unit by unit."""
    engine.settle()
    executor, made = engine.executor, engine.parts.made
    for unit, now in enumerate(plan.placements):
        before = executor.program.placements[unit]
        if before.weight != now.weight:
            engine.residency.need((unit,), ahead=False)
            made.weights.settle_down(unit)
        if before.state != now.state:
            made.pages.settle_down(unit)
        if before.grad != now.grad:
            made.grads.bytes.settle_down(unit)
        placements = (*plan.placements[: unit + 1], *executor.program.placements[unit + 1 :])
        with executor.lock:
            limits = plan.limits if executor.pager is not None else executor.program.limits
            executor.program = dataclasses.replace(executor.program, placements=placements, limits=limits)
            stay = {unit} if now.weight == "device" else set()
            here = tuple(u for u in executor.state.here if u not in stay)
            # What lives here is never written home again, whoever holds views of it.
            kept = {"changed": executor.state.changed - stay, "pinned": executor.state.pinned - stay}
            executor.state = executor.state.but(here=here, **kept)
    if executor.pager is not None:
        executor.pager.lengthen(plan.limits.depth)
    planned = engine.parts.planned
    planned.owned, planned.peak, planned.grads = _owned(plan), plan.peak("device"), plan.bytes_of("device", "grad")
