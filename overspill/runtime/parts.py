"""The parts of one engine, built from a layout and a placement: storage first, then who works on it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from overspill.errors import BudgetError
from overspill.kernels.reference import Rule
from overspill.program import Program
from overspill.runtime.adopt import Source, adopt
from overspill.runtime.backward import in_backward
from overspill.runtime.collect import Collector
from overspill.runtime.executor import Executor
from overspill.runtime.gradient_bytes import GradientBytes
from overspill.runtime.gradients import Gradients
from overspill.runtime.kernel_update import KernelUpdate
from overspill.runtime.lanes import Lanes
from overspill.runtime.loans import Loans
from overspill.runtime.masters import Masters
from overspill.runtime.own_update import OwnUpdate
from overspill.runtime.pages import Home, Pages
from overspill.runtime.ranks import Ranks
from overspill.runtime.reduction import Reduction
from overspill.runtime.ring import Ring
from overspill.runtime.rooms import bytes_in_rooms
from overspill.runtime.scaling import LossScale
from overspill.runtime.updates import Update, Updates
from overspill.runtime.weights import Weights
from overspill.specs import BLOCK, Budget, ParamSpec, TierName, UnitSpec, align, human
from overspill.tiers import DeviceTier, HeldBudget, Tier, host_available
from overspill.trace import Recorder
from overspill.units.layout import NARROW, Layout
from overspill.units.unit import Unit

if TYPE_CHECKING:
    from overspill.comm import Comm

log = logging.getLogger("overspill")

Tiers = dict[TierName, Tier]

CORES = {"cuda"}
"""Kinds of devices beside which the host's cores can update pages too. See cores.py; a plan says whether they do."""
PAGED = {"cuda"}
"""Kinds of devices on which updates run ahead of their use. Without a GPU they would take cores from the model."""


@dataclass(frozen=True, slots=True)
class Materials:
    """What an engine is built from, beside its plan."""

    device: torch.device
    optimizer: torch.optim.Optimizer
    rule: Rule | None
    """Our own update rule; None: the user's optimizer does every update."""
    source: Source
    extend: Extend
    comm: Comm | None = None
    """The other ranks; None: there are none."""


@dataclass(slots=True)
class Planned:
    """What the plan in force takes of the device, and what was taken beyond it; another one may follow it."""

    owned: int
    """Planned bytes on the device, without activations."""
    peak: int
    """Planned bytes on the device, with activations: the most of all plans that were in force so far."""
    grads: int
    """Bytes of gradients among what is owned."""
    others: int = 0
    """What else the process has there."""
    granted: Counter[TierName] = field(default_factory=Counter)
    """Bytes that the plan did not foresee, by tier; on the device they are owned, too."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything that works for one engine."""

    layout: Layout
    buffers: tuple[tuple[Tensor, torch.device], ...]
    """The model's buffers and where they came from."""
    dtype: torch.dtype
    budget: Budget
    planned: Planned
    tiers: Tiers
    scale: LossScale | None
    """Under fp16."""
    made: Made
    optimizer: torch.optim.Optimizer
    """The user's own."""
    held: HeldBudget | None = None
    """What keeps torch within the budget, on cuda."""
    eager: bool = False
    """Whether updates begin in the backward pass."""
    delay_after: int | None = None
    """Steps after which updates are one step late; None: never."""

    @property
    def units(self) -> tuple[Unit, ...]:
        return self.made.units

    @property
    def executor(self) -> Executor:
        return self.made.executor

    def check_copies(self, nbytes: int, what: str) -> None:
        """Refuse host copies that the machine has no room for. They are the user's, so no budget counts them."""
        room = host_available()
        if nbytes > room:
            raise BudgetError(
                f"expected room for {human(nbytes)} of copies in host memory for {what}, found {human(room)} "
                "available; use overspill.save or export, which need no copies, or read parameter by parameter"
            )

    def check_room(self, nbytes: int) -> None:
        """Refuse a use of parameters that needs more weights on the device at once than the budget has room for."""
        room = self.budget.device - self.planned.owned + self.executor.program.limits.window
        if nbytes > room:
            raise BudgetError(
                f"expected a use of parameters that fits the device budget, found one that needs {human(nbytes)} of "
                f"weights there at once, with room for {human(room)}; use fewer parameters at a time, let go of views "
                "and graphs that are held, or raise gpu="
            )

    def check_full(self, nbytes: int) -> None:
        room = self.budget.device - self.planned.owned
        if nbytes > room:
            raise BudgetError(
                f"expected room for all weights on the device ({human(nbytes)} live elsewhere), found {human(room)}; "
                f"raise gpu= by {human(nbytes - room)}"
            )


Extend = Callable[[Mapping[TierName, int], bool], dict[TierName, Tier | None]]
"""(bytes by tier, whether they are for sums of backward passes) -> more room on each, None for the device; or an error,
and nothing more on any, where a budget has too little."""


@dataclass(frozen=True, slots=True)
class Made:
    """What `build` made."""

    units: tuple[Unit, ...]
    executor: Executor
    weights: Weights
    grads: Gradients
    pages: Pages
    masters: Masters
    update: Update
    updates: Updates
    recorder: Recorder
    ranks: Ranks | None
    collector: Collector | None


def build(layout: Layout, program: Program, tiers: Tiers, materials: Materials) -> Made:
    """Adopt the model's weights unit by unit and wire up the ops."""
    recorder, model, placements = Recorder(), program.model, program.placements
    comm = materials.comm
    program = replace(program, piped=materials.device.type in PAGED and program.pipeable)
    ranks = Ranks(comm, [unit.name for unit in model.units]) if comm is not None else None
    executor = Executor(program, Lanes(materials.device, recorder), ranks)
    # Weights first: what is in host memory already moves into the first slots of the arena.
    shares: Tiers = {"device": DeviceTier(materials.device)} if model.sharding.split("weight") else {}
    places = {**tiers, **shares}
    homes = [_weight_home(places, p.weight, u) for u, p in zip(model.units, placements, strict=True)]
    grad_homes = [
        [_gradient_homes(tiers, placement.grad, p) for p in unit.params]
        for unit, placement in zip(model.units, placements, strict=True)
    ]
    page_homes = [
        [_reserve(tiers, placement.state, page.state_bytes) for page in unit.pages]
        for unit, placement in zip(model.units, placements, strict=True)
    ]
    pages = Pages(model, page_homes, executor)
    units = tuple(adopt(layout, homes, pages, materials.source))
    collector = Collector(model.units, model.sharding, ranks, executor) if ranks is not None else None
    reduction = Reduction(model.units, model.sharding, comm, executor) if comm is not None else None
    own_bytes = GradientBytes(grad_homes, _Wider(executor, tiers, materials.extend, pages.ring), executor, collector)
    grads = Gradients(units, own_bytes, executor, reduction)
    masters = Masters(units, pages, collector)
    optimizer, rule = materials.optimizer, materials.rule
    update: Update = (
        KernelUpdate(rule, units, pages, masters, collector)
        if rule
        else OwnUpdate(optimizer, units, pages, masters, collector)
    )
    updates = Updates(update, grads, pages, masters)
    weights = Weights(units, places, comm)
    for part in (weights, grads.passing, pages, updates):
        executor.handle(part.handlers())
    if reduction is not None and ranks is not None:
        executor.handle(reduction.handlers())
        ranks.width, ranks.widen = reduction.width, reduction.widen
    if program.piped:
        # Only where they are used: importing this package shall cost little.
        from overspill.runtime.pager import Pager
        from overspill.runtime.passage import Passage

        loans = grads.rooms.loans if grads.rooms is not None else Loans()
        loans.allow(bytes_in_rooms(model.units, placements), program.limits.lent)
        passage, cores = Passage(executor, pages, updates, loans), None
        if program.limits.hands != "streamed" and isinstance(update, KernelUpdate):
            from overspill.runtime.cores import Cores, there_are

            if there_are():
                cores = Cores(executor, passage, updates, update)
            else:
                log.warning("the plan is for the host's cores, and there is no native library: the GPU updates alone")
        executor.pager = Pager(executor, passage, materials.device, cores)
    return Made(units, executor, weights, grads, pages, masters, update, updates, recorder, ranks, collector)


def _weight_home(tiers: Mapping[TierName, Tier], name: TierName, unit: UnitSpec) -> Home | None:
    """What has no bytes has a home away from the device all the same: a unit of which this rank owns nothing, or whose
    parameters are all empty. A rank that owns nothing of any has no such tier."""
    if (name in tiers or name != "device") and not unit.home_bytes:
        return tiers["null"], tiers["null"].reserve(0)
    return _reserve(tiers, name, unit.home_bytes)


def _gradient_homes(tiers: Mapping[TierName, Tier], name: TierName, p: ParamSpec) -> list[Home]:
    found = (_reserve(tiers, name, p.grad_bytes) for _ in range(p.grads if p.trainable else 0))
    return [home for home in found if home is not None]


def _reserve(tiers: Mapping[TierName, Tier], name: TierName, nbytes: int) -> Home | None:
    tier = tiers.get(name)
    return (tier, tier.reserve(nbytes)) if tier is not None and nbytes else None


class _Wider:
    """Gives wide gradients a home. See gradient_bytes.py, Note [Unplanned width]."""

    def __init__(self, executor: Executor, tiers: Tiers, extend: Extend, ring: Ring) -> None:
        self._executor = executor
        self._ring = ring
        self._tiers = tiers
        self._extend = extend
        self._extended: dict[TierName, Tier | None] = {}

    def make_ready(self, unit: int) -> None:
        tier, limits = self._executor.program.placements[unit].grad, self._executor.program.limits
        if tier in self._extended:
            return
        # For all gradients of the tier at once: they will all be summed.
        total = sum(align(self._bytes(p), BLOCK) for p in self._params(tier))
        sums = in_backward()
        wanted = Counter[TierName]({tier: total})
        wanted["device"] += limits.depth * self._ring.growth()
        self._extended[tier] = self._extend(wanted, sums)[tier]
        self._ring.widen()
        log.warning(
            "%s, for which %s more are taken on %s; say micro_batches=2 (or how many backward passes there are) to "
            "prepare, so that the plan counts them",
            "a second backward pass before step(): gradients are summed in fp32"
            if sums
            else "gradients are kept in fp32, as sums are and what is put into p.grad",
            human(total),
            tier,
        )

    def home(self, unit: int, param: int) -> Home | None:
        self.make_ready(unit)
        room = self._extended[self._executor.program.placements[unit].grad]
        spec = self._executor.program.model.units[unit].params[param]
        return None if room is None else (room, room.reserve(self._bytes(spec)))

    def _bytes(self, p: ParamSpec) -> int:
        """Of a wide gradient, or of this rank's share of it."""
        divided = self._executor.program.model.sharding.split("grad")
        return torch.float32.itemsize * (p.owned.room if divided else p.numel)

    def _params(self, tier: TierName) -> Iterator[ParamSpec]:
        for unit, placement in zip(self._executor.program.model.units, self._executor.program.placements, strict=True):
            if placement.grad == tier:
                wide = torch.float32.itemsize
                yield from (p for p in unit.params if p.trainable and p.dtype in NARROW and p.grad_item < wide)
