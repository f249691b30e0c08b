"""When more is known of activations: another plan, with more on the device. The runtime measures, this plans anew.

Note [Longer inputs]: what moved in leaves less room for activations than the first plan kept for them, and a longer
input than any before needs more. So before a call with one, if what is known says that it may not fit, the states, and
gradients if there are none just now, move out again, and then all is measured anew. Weights stay: a graph that is
being built may need them where they are. How activations grow with the input nobody knows; at most with its square.
Inputs of an evaluation count too, though it takes less: afterwards what moved out moves in again.

Note [Sums that were not planned]: a loop that adds up gradients without saying so (micro_batches=) takes twice the room
for them. When that begins, states move out, and nothing moves in any more.
"""

import dataclasses
import logging
import weakref
from typing import Protocol

import torch

from overspill.config import Options
from overspill.forms import forms_of
from overspill.plan.plan import Plan
from overspill.planning import Ground, improved, rearranged
from overspill.runtime.engine import Engine
from overspill.specs import ROLES, Activations, MiB, Role, human

log = logging.getLogger("overspill")

MARGIN = 256 * MiB
MARGIN_SHARE = 0.06
"""Of the device budget: what is kept free beside what activations were seen to take, because steps are not all alike
and torch's allocator cannot use every hole; twice that where it had to look for holes already."""
ALIKE = 0.9
"""Inputs of at least this share of the longest tell what that takes."""


Size = tuple[int, int]
"""Of inputs: elements in all, and the longest dimension."""
NONE: Size = (0, 0)


def _ratio(one: Size, other: Size) -> float:
    """How much longer one is."""
    return max(a / max(b, 1) for a, b in zip(one, other, strict=True))


def _longest(one: Size, other: Size) -> Size:
    return max(one[0], other[0]), max(one[1], other[1])


class CurrentPlan:
    """The plan that holds now."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan


def watch(engine: Engine, held: CurrentPlan, how: tuple[Options, Ground]) -> None:
    """Plan anew when the engine has measured, if the plan was ours to make and something is not on the device."""
    chosen, ground = how
    if chosen.place is not None or ground.comm is not None or not engine.measures.sees_activations:
        return
    if not all(p.of(role) == "device" for p in held.plan.placements for role in ROLES):
        engine.planner = Replanner(engine, held, how)


class Replanner:
    """Looks at every call of the model."""

    def __init__(self, engine: Engine, held: CurrentPlan, how: tuple[Options, Ground]) -> None:
        self._engine: Engine = weakref.proxy(engine)
        self._held = held
        self._first = held.plan
        chosen, ground = how
        # What the user's optimizer would keep for each parameter is asked again, of the optimizer itself.
        optimizer = engine.parts.optimizer
        forms = forms_of(optimizer, chosen, ground.sharding(held.plan.model.sharding.zero, optimizer))
        self._how = (chosen, ground, forms)
        self._longest = self._longest_now = NONE
        """Of all inputs; of those since measuring began."""
        self._known: Activations | None = None
        """What the longest took, as far as that is known."""
        self._done = False
        """Whether nothing more can move in, for inputs like those so far."""
        self._summed = False
        """See Note [Sums that were not planned]."""

    def called(self, size: Size, graph: bool) -> None:
        """The model is called with inputs of this size, to train or, without a graph, to look at what it gives."""
        if not graph:
            self._evaluated(size)
            return
        longer = _ratio(size, self._longest) > 1
        may_add = self._how[0].micro_batches == 1 and self._held.plan is not self._first and not self._summed
        if self._done and not longer and not may_add:
            return
        held = self._engine.parts.made.grads.bytes
        there = [g for g in held.current() if not g.zero]
        adds = any(not g.stepped for g in there)
        self._summed |= self._how[0].micro_batches == 1 and (adds or bool(held.widths.widened))
        if (longer and not self._fits(size)) or (self._summed and may_add):
            self._go_back()
        if longer:
            self._longest, self._known, self._done = _longest(size, self._longest), None, False
            self._measure()
        self._longest_now = _longest(size, self._longest_now)
        if self._summed:
            self._end()
        seen = None if self._done or adds else self._engine.measures.activations()
        if seen is None:
            return
        if _ratio(self._longest, self._longest_now) <= 1 / ALIKE:
            self._known = seen
            if not self._improve(seen, tuple(role for role in ROLES if role != "grad" or not there)):
                self._end()
                return
        self._measure()

    def _evaluated(self, size: Size) -> None:
        """What there is no room for now moves out; when training goes on, it may move in again."""
        # Without a graph activations grow with the input at most.
        if _ratio(size, self._longest) <= 1 or self._fits(size, power=1):
            return
        if self._go_back() and not self._summed:
            self._done = False
            self._measure()

    def _end(self) -> None:
        self._done = True
        self._engine.measures.end()
        self._lend(True)

    def _measure(self) -> None:
        self._longest_now = NONE
        self._lend(False)
        self._engine.measures.begin()

    def _lend(self, on: bool) -> None:
        """While activations are measured, nobody else has room that is planned for gradients."""
        rooms = self._engine.parts.made.grads.rooms
        if rooms is not None:
            rooms.loans.paused = not on

    def _margin(self) -> int:
        shares = MARGIN_SHARE * (2 if self._engine.measures.pressed else 1)
        return max(MARGIN, int(shares * self._held.plan.budget.device))

    def _fits(self, size: Size, power: int = 2) -> bool:
        """Whether there is room for what an input may take. See Note [Longer inputs]."""
        if self._held.plan is self._first:
            return True
        if self._known is None:
            return False
        plan, grown = self._held.plan, _ratio(size, self._longest) ** power
        grads = plan.bytes_of("device", "grad")
        known = Activations(int(self._known.before * grown), int(self._known.after * grown))
        return _owned(plan) + known.beside(grads) <= plan.budget.device

    def _go_back(self) -> bool:
        """What moved in moves out again, but for weights, and for gradients while there are some; whether anything
        did."""
        held = self._engine.parts.made.grads.bytes
        keep_gradients = bool(held.widths.widened) or any(not g.zero for g in held.current())
        now, pairs = self._held.plan, zip(self._first.placements, self._held.plan.placements, strict=True)
        placements = tuple(
            dataclasses.replace(then, weight=p.weight, grad=(p if keep_gradients else then).grad) for then, p in pairs
        )
        if placements == now.placements:
            return False
        first = rearranged(self._first, self._engine.parts.layout, self._how, placements)
        less = human(_owned(now) - _owned(first))
        log.info("longer inputs than any before, or sums that were not planned: %s leave the device", less)
        come_into_force(self._engine, first)
        self._held.plan = first
        return True

    def _improve(self, seen: Activations, roles: tuple[Role, ...]) -> bool:
        """Whether there was room for more."""
        now, margin = self._held.plan, self._margin()
        kept = Activations(seen.before + margin, seen.after + margin)
        found = improved(now, self._engine.parts.layout, self._how, (kept, roles))
        most = max(seen.before, seen.after)
        if found is None:
            log.info("activations took %s; the plan stays as it is", human(most))
            return False
        come_into_force(self._engine, found)
        more = human(_owned(found) - _owned(now))
        log.info("activations took %s, so %s more live on the device now\n%s", human(most), more, found)
        self._held.plan = found
        return True


class _Homes(Protocol):
    def move_in(self, unit: int) -> None: ...
    def move_out(self, unit: int) -> None: ...


def _owned(plan: Plan) -> int:
    return plan.peak("device") - plan.bytes_of("device", "activations")


def come_into_force(engine: Engine, plan: Plan) -> None:
    """Another plan holds from now on: what it has on the device moves in, the rest moves out, unit by unit."""
    engine.settle(look=False)
    with torch.inference_mode(False), torch.no_grad():
        _move(engine, plan)
    planned = engine.parts.planned
    planned.owned, planned.grads = _owned(plan) + planned.granted["device"], plan.bytes_of("device", "grad")
    # What torch's allocator reserved for a plan it keeps under the next one, which may have less.
    planned.peak = max(planned.peak, plan.peak("device"))


def _move(engine: Engine, plan: Plan) -> None:
    executor, made = engine.executor, engine.parts.made
    roles: dict[Role, _Homes] = {"state": made.pages, "grad": made.grads.bytes}
    for unit, now in enumerate(plan.placements):
        before = executor.program.placements[unit]
        if before.weight != now.weight:
            assert now.weight == "device", "weights that moved in stay"
            engine.residency.need((unit,), ahead=False)
            made.weights.move_in(unit)
        for role, homes in roles.items():
            if before.of(role) != now.of(role):
                (homes.move_in if now.of(role) == "device" else homes.move_out)(unit)
        _place(engine, unit, plan)
    if executor.pager is not None:
        executor.pager.resize()


def _place(engine: Engine, unit: int, plan: Plan) -> None:
    """Tell the program where a unit lives."""
    executor = engine.executor
    with executor.lock:
        program, state = executor.program, executor.state
        placements = (*plan.placements[: unit + 1], *program.placements[unit + 1 :])
        limits = plan.limits if executor.pager is not None else program.limits
        executor.program = dataclasses.replace(program, placements=placements, limits=limits)
        if plan.placements[unit].weight == "device":
            # What lives here is never written home again, whoever holds views of it.
            own, here = frozenset((unit,)), tuple(u for u in state.here if u != unit)
            executor.state = state.but(here=here, changed=state.changed - own, pinned=state.pinned - own)
