"""The parts of one engine, built from a layout and a placement: storage first, then who works on it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from overspill.errors import BudgetError
from overspill.program import Program
from overspill.runtime.executor import Executor
from overspill.runtime.gradients import Gradients
from overspill.runtime.lanes import Lanes
from overspill.runtime.states import States
from overspill.runtime.updates import Updates
from overspill.runtime.weights import Weights
from overspill.specs import Budget, TierName, human
from overspill.tiers import Slot, Tier, host_available
from overspill.trace import Recorder
from overspill.units.layout import Layout
from overspill.units.unit import Unit

Tiers = dict[TierName, Tier]


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything that works for one engine."""

    layout: Layout
    buffers: tuple[tuple[Tensor, torch.device], ...]
    """The model's buffers and where they came from."""
    dtype: torch.dtype
    budget: Budget
    owned: Budget
    """Bytes that the plan takes on each tier, without activations."""
    device_peak: int
    """What the plan foretells for the device, with activations."""
    tiers: Tiers
    units: tuple[Unit, ...]
    executor: Executor
    grads: Gradients
    states: States
    updates: Updates
    recorder: Recorder

    def check_copies(self, nbytes: int, what: str) -> None:
        """Refuse host copies that the machine has no room for. They are the user's, so no budget counts them."""
        room = host_available()
        if nbytes > room:
            raise BudgetError(
                f"expected room for {human(nbytes)} of copies in host memory for {what}, found {human(room)} "
                "available; read parameter by parameter (p.detach().cpu(), overspill.state(p)), or stop what else runs"
            )

    def check_room(self, nbytes: int) -> None:
        """Refuse a use of parameters that needs more weights on the device at once than the budget has room for."""
        room = self.budget.device - self.owned.device + self.executor.program.limits.window
        if nbytes > room:
            raise BudgetError(
                f"expected a use of parameters that fits the device budget, found one that needs {human(nbytes)} of "
                f"weights there at once, with room for {human(room)}; use fewer parameters at a time, let go of views "
                "and graphs that are held, or raise gpu="
            )

    def check_full(self, nbytes: int) -> None:
        room = self.budget.device - self.owned.device
        if nbytes > room:
            raise BudgetError(
                f"expected room for all weights on the device ({human(nbytes)} live elsewhere), found {human(room)}; "
                f"raise gpu= by {human(nbytes - room)}"
            )


def build(
    layout: Layout, program: Program, tiers: Tiers, optimizer: torch.optim.Optimizer, device: torch.device
) -> tuple[tuple[Unit, ...], Executor, Gradients, States, Updates, Recorder]:
    """Adopt the model's weights unit by unit and wire up the ops."""
    recorder = Recorder()
    executor = Executor(program, Lanes(device, recorder))
    units = tuple(_adopt(layout, program, tiers, device))
    grads = Gradients(units, _grad_slots(program, tiers), tiers, executor)
    states = States([u.spec for u in units], _state_slots(program, tiers), tiers, device)
    updates = Updates(optimizer, units, grads, states)
    executor.handle(Weights(units, tiers).handlers())
    executor.handle(grads.handlers())
    executor.handle(states.handlers())
    executor.handle(updates.handlers())
    return units, executor, grads, states, updates, recorder


def _adopt(layout: Layout, program: Program, tiers: Tiers, device: torch.device) -> list[Unit]:
    """One unit after the other, so that never more than one is in two places. If one fails, all are given back."""
    units: list[Unit] = []
    try:
        for index, spec in enumerate(program.model.units):
            tier = tiers.get(program.placements[index].weight)
            home = tier.reserve(spec.weight_bytes) if tier is not None else None
            units.append(Unit(spec, layout.params[index], device, home))
            if tier is not None and home is not None:
                _move_out(units[-1], tier, home, device)
    except BaseException:
        for unit in reversed(units):
            if unit.home is not None and not unit.here:
                unit.grow()
                tiers[unit.home.tier].load(unit.home, unit.flat)  # type: ignore[index]
            unit.give_back()
        raise
    return units


def _move_out(unit: Unit, tier: Tier, home: Slot, device: torch.device) -> None:
    tier.store(home, unit.flat)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    unit.shrink()


def _grad_slots(program: Program, tiers: Tiers) -> Sequence[Sequence[Slot | None]]:
    slots: list[list[Slot | None]] = []
    for spec, placement in zip(program.model.units, program.placements, strict=True):
        tier = tiers.get(placement.grad)
        slots.append([tier.reserve(p.grad_bytes) if tier is not None and p.trainable else None for p in spec.params])
    return slots


def _state_slots(program: Program, tiers: Tiers) -> Sequence[Sequence[Slot | None]]:
    slots: list[list[Slot | None]] = []
    for spec, placement in zip(program.model.units, program.placements, strict=True):
        tier = tiers.get(placement.state)
        slots.append([tier.reserve(p.state_bytes) if tier is not None and p.state_bytes else None for p in spec.pages])
    return slots
