"""Once, when activations are known: another plan, with more on the device. The runtime measures, this plans anew."""

import dataclasses
import logging

from overspill.config import Options
from overspill.plan.plan import Plan
from overspill.planning import Ground, forms_of, improved
from overspill.runtime.engine import Engine
from overspill.specs import MiB, human

log = logging.getLogger("overspill")

MARGIN = 256 * MiB
MARGIN_SHARE = 0.02
"""Of the device budget: what is kept free beside what activations were seen to take, because steps are not all alike
and torch's allocator cannot use every hole."""


class InForce:
    """The plan that holds now."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan


def watch(engine: Engine, held: InForce, how: tuple[Options, Ground]) -> None:
    """Plan anew when the engine has measured, if the plan was ours to make and something is not on the device."""
    chosen, ground = how
    if chosen.place is not None or ground.comm is not None or not engine.measures.sees_activations:
        return
    if all(p.grad == p.state == "device" for p in held.plan.placements):
        return
    # What the user's optimizer would keep for each parameter is asked again, of the optimizer itself.
    layout, optimizer = engine.parts.layout, engine.parts.optimizer
    forms = forms_of(optimizer, chosen, ground.sharding(held.plan.model.sharding.zero, optimizer))

    def measured(activations: int) -> None:
        margin = max(MARGIN, int(MARGIN_SHARE * held.plan.budget.device))
        found = improved(held.plan, layout, (chosen, ground, forms), activations + margin)
        if found is None:
            log.info("activations took %s; the plan stays as it is", human(activations))
            return
        move_in(engine, found)
        moved = found.peak("device") - found.bytes_of("device", "activations")
        log.info(
            "activations took %s, so %s of what was elsewhere lives on the device now\n%s",
            human(activations),
            human(moved - held.plan.peak("device") + held.plan.bytes_of("device", "activations")),
            found,
        )
        held.plan = found

    engine.when_measured = measured


def move_in(engine: Engine, plan: Plan) -> None:
    """Another plan comes into force: gradients and states, for which there is room after all, move to the device."""
    engine.settle()
    old, made = engine.executor.program.placements, engine.parts.made
    for unit, (before, now) in enumerate(zip(old, plan.placements, strict=True)):
        assert before.weight == now.weight, "weights stay where they are"
        if before.state != now.state:
            made.pages.settle_down(unit)
        if before.grad != now.grad:
            made.grads.bytes.settle_down(unit)
    with engine.executor.lock:
        engine.executor.program = dataclasses.replace(engine.executor.program, placements=plan.placements)
    planned = engine.parts.planned
    planned.owned, planned.peak = plan.peak("device") - plan.bytes_of("device", "activations"), plan.peak("device")
