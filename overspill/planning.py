"""From options to a plan: the same on all ranks."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from overspill.config import DTYPES, Options, parse_nvme, parse_size
from overspill.errors import BudgetError, OptionError, OverspillError, RankError, TierError
from overspill.forms import dtypes_of, forms_of
from overspill.measured import Measured
from overspill.plan.hands import Chosen
from overspill.plan.memory import Request, as_first
from overspill.plan.plan import CORES, Plan
from overspill.plan.solver import finish, improve, page_sizes, resident_page_size, solve, timed
from overspill.runtime import parts
from overspill.runtime.updates import as_text
from overspill.specs import (
    ROLES,
    TIERS,
    Activations,
    Budget,
    Limits,
    ModelSpec,
    Placement,
    Role,
    Sharding,
    human,
)
from overspill.tiers import check_folder, device_available, disk_free, host_available
from overspill.units.layout import Forms, Layout, lay_out

if TYPE_CHECKING:
    from overspill.comm import Comm

log = logging.getLogger("overspill")

MOST_PAGES = 1000
"""With more pages than this, smaller ones would save next to nothing, and take minutes to plan."""
APART, ONE_MEMORY = {"gpu": 0.92, "host": 0.8}, {"gpu": 0.4, "host": 0.4}
"""What "auto" takes of the device and of the host; without a GPU both are the same memory."""
_ELEMENTWISE = "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD"
ELEMENTWISE = {getattr(torch.optim, name) for name in _ELEMENTWISE.split()}
"""Optimizers that treat every element by itself: ranks may own any elements. The others need whole parameters."""


@dataclass(frozen=True, slots=True)
class Ground:
    """What a plan is made for: a device, the machine around it, and the other ranks."""

    device: torch.device
    machine: Mapping[str, int] | None = None
    """Stands in for this one."""
    comm: Comm | None = None
    world: int = 1
    """How many ranks there would be, where there are none to ask."""
    rank: int = 0
    """Which of them."""

    def sharding(self, zero: int, optimizer: torch.optim.Optimizer) -> Sharding:
        whole = type(optimizer) not in ELEMENTWISE
        if self.comm is None and self.world == 1:
            # One process without a process group has nobody to divide anything with.
            return Sharding(whole=whole)
        if self.comm is None:
            return Sharding(zero, self.rank, self.world, True, whole)
        return Sharding(zero, self.comm.rank, self.comm.size, True, whole)

    @property
    def has_gpu(self) -> bool:
        """Another machine has one, whatever this one has."""
        return self.device.type == "cuda" or self.machine is not None

    @property
    def local_ranks(self) -> int:
        """Ranks that share this machine's host memory and disks."""
        found = self.comm.locals if self.comm is not None else self.world
        # Beside tensor parallelism more ranks are here than train the same parameters.
        joined = torch.distributed.is_available() and torch.distributed.is_initialized()
        return max(found, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) if joined and self.machine is None else found


def make_plan(
    model: nn.Module, optimizer: torch.optim.Optimizer, chosen: Options, ground: Ground
) -> tuple[Layout, Plan]:
    """The plan that the options ask for, or a refusal that says what would work: the same on all ranks."""
    budget = _budget(chosen, ground)
    if chosen.zero not in ("auto", 0) and ground.comm is None and ground.world == 1:
        log.info("one process alone divides nothing: zero=%s changes nothing", chosen.zero)
    stages = _stages(chosen, ground)
    refused: OverspillError | None = None
    found: tuple[Layout, Plan] | None = None
    for zero in stages:
        try:
            # The highest stage that fits, where none is enough: at a higher one collectives may need more.
            found = _plan_at(model, optimizer, chosen, (ground, budget, zero))
        except OverspillError as error:
            refused = error
            continue
        if _enough(found[1]):
            break
    if found is None and isinstance(refused, BudgetError):
        refused = _hardest(refused, lambda on: _plan_at(model, optimizer, chosen, (on, budget, stages[-1])), ground)
    elif found is not None and found[1].model.sharding.whole and found[1].model.sharding.zero:
        # Who has whole parameters may have far more than another rank.
        zero = found[1].model.sharding.zero
        refused = _hardest(None, lambda on: _plan_at(model, optimizer, chosen, (on, budget, zero)), ground)
        found = found if refused is None else None
    return _agreed(found, refused, model, (optimizer, chosen, ground, budget))


def _hardest(refused: BudgetError | None, plan_by: Callable[[Ground], object], ground: Ground) -> BudgetError | None:
    """Among the refusals of ranks that are not there to be asked, that of the one that needs most; None: all fit."""
    for rank in range(1, ground.world if ground.comm is None else 0):
        try:
            plan_by(dataclasses.replace(ground, rank=rank))
        except BudgetError as error:
            refused = error if refused is None else max(refused, error, key=lambda each: each.least)
    return refused


def _stages(chosen: Options, ground: Ground) -> tuple[int, ...]:
    """The ZeRO stages to try, in this order."""
    if chosen.zero != "auto":
        return (int(chosen.zero),)
    if isinstance(chosen.place, Plan):
        return (chosen.place.model.sharding.zero,)
    alone = ground.comm is None and ground.world == 1
    return (0,) if alone or (ground.comm is not None and ground.comm.size == 1) else (0, 1, 2, 3)


def _enough(plan: Plan) -> bool:
    """Whether "auto" stays with this stage: all is on the device; at stage 2 the weights are, which is all that a
    higher one would add."""
    roles = ROLES if plan.model.sharding.zero < 2 else ("weight",)
    return all(p.of(role) == "device" for p in plan.placements for role in roles)


def _agreed(
    found: tuple[Layout, Plan] | None,
    refused: OverspillError | None,
    model: nn.Module,
    asked: tuple[torch.optim.Optimizer, Options, Ground, Budget],
) -> tuple[Layout, Plan]:
    """The plan of all ranks: that of the one that owns most. They own different bytes: each looks whether it fits."""
    optimizer, chosen, ground, budget = asked
    if ground.comm is not None:
        mine = None if found is None else found[1]
        told = {"refused": None if refused is None or mine else str(refused), "plan": mine and _outline(mine)}
        owned = sum(mine.model.role_bytes(role) for role in ROLES) if mine else 0
        heard = ground.comm.exchange({**told, "owned": owned, "asked": _asked(chosen, optimizer)})
        _check_same([each["asked"] for each in heard], ground.comm.world_ranks)
        for rank, each in zip(ground.comm.world_ranks, heard, strict=True):
            if each["plan"] is None and found is not None:
                raise BudgetError(
                    f"expected a plan that fits on all ranks, found none on rank {rank}; it says: {each['refused']}"
                )
        if found is not None and any(each["plan"] != heard[0]["plan"] for each in heard):
            theirs = max(heard, key=lambda each: each["owned"])["plan"]
            place = [Placement(*homes) for homes in theirs["homes"]]
            zero, page, limits = theirs["zero"], theirs["page"], Limits(**theirs["limits"])
            forms = forms_of(optimizer, chosen, ground.sharding(zero, optimizer))
            laid_out = lay_out(model, forms, page)
            request = _request(laid_out, chosen, (ground, budget, page), forms)
            request = dataclasses.replace(request, chosen=Chosen(limits.hands, theirs["why"]))
            found = laid_out, _on_all(ground.comm, lambda: finish(request, tuple(place), limits))
    if found is None:
        assert refused is not None, "there is a plan or a refusal"
        raise refused
    return found


def _on_all(comm: Comm, plan: Callable[[], Plan]) -> Plan:
    """What fits on this rank must fit on all of them."""
    made: Plan | BudgetError
    try:
        made = plan()
    except BudgetError as error:
        made = error
    for rank, says in zip(
        comm.world_ranks, comm.exchange(str(made) if isinstance(made, BudgetError) else None), strict=True
    ):
        if says is not None:
            raise BudgetError(f"expected a plan that fits on all ranks, found none on rank {rank}; it says: {says}")
    assert isinstance(made, Plan), "no rank said anything"
    return made


OWN = ("gpu", "host", "nvme", "place", "mesh", "weights")
"""Options that ranks may have each for itself."""


def _asked(chosen: Options, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """What must be the same on all ranks, as they say it."""
    said = {f.name: repr(getattr(chosen, f.name)) for f in dataclasses.fields(chosen) if f.name not in OWN}
    groups = {
        f"{key} of parameter group {g}": value
        for g, group in enumerate(optimizer.param_groups)
        for key, value in as_text(group).items()
    }
    return {**said, **groups, "the optimizer": type(optimizer).__name__}


def _check_same(asked: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> None:
    for rank, each in zip(ranks, asked, strict=True):
        for key in {**asked[0], **each}:
            one, other = asked[0].get(key, "none"), each.get(key, "none")
            if one != other:
                raise RankError(
                    f"expected the same options and optimizers on all ranks, found {key}: {one} on rank {ranks[0]} and "
                    f"{other} on rank {rank}; say the same on every rank"
                )


def _outline(plan: Plan) -> dict[str, Any]:
    """What must be alike on all ranks."""
    return {
        "homes": [[p.weight, p.grad, p.state] for p in plan.placements],
        "limits": dataclasses.asdict(plan.limits),
        "page": plan.page_bytes,
        "zero": plan.model.sharding.zero,
        "why": plan.why,
    }


def _plan_at(
    model: nn.Module, optimizer: torch.optim.Optimizer, chosen: Options, where: tuple[Ground, Budget, int]
) -> tuple[Layout, Plan]:
    ground, budget, zero = where
    forms = forms_of(optimizer, chosen, ground.sharding(zero, optimizer))
    if isinstance(chosen.place, Plan):
        laid_out = lay_out(model, forms, chosen.place.page_bytes)
        given, request = chosen.place, _request(laid_out, chosen, (ground, budget, chosen.place.page_bytes), forms)
        if given.model != laid_out.spec and ground.comm is not None and _alike(given.model, laid_out.spec):
            # That of another rank, which owns other elements.
            given = finish(request, given.placements, given.limits)
        if given.model != laid_out.spec:
            raise OptionError(
                "expected place= to be a plan of this model and optimizer with the same precision, micro_batches, "
                "update and kernels, found another; plan anew with these keywords"
            )
        return laid_out, timed(request, _within(as_first(request, given), budget, chosen))
    if chosen.place and "nvme" in chosen.place.values() and not chosen.nvme:
        raise OptionError('expected nvme= with place= on nvme, found none; give a path on a fast disk: nvme="/scratch"')
    refused: BudgetError | None = None
    # A unit's weights must be there, and as much for activations: below that, whatever a page takes, nothing works.
    least = 2 * DTYPES[chosen.precision].itemsize * max((p.numel() for p in model.parameters()), default=0)
    for page in page_sizes(max(budget.device, least)):
        laid_out = lay_out(model, forms, page)
        try:
            made = solve(_request(laid_out, chosen, (ground, budget, page), forms))
        except BudgetError as error:
            refused = error
        else:
            return _with_large_pages((laid_out, made), (model, chosen, forms), ground)
        if sum(len(unit.pages) for unit in laid_out.spec.units) > MOST_PAGES:
            break
    assert refused is not None, "there is at least one page size"
    raise refused


def _with_large_pages(
    found: tuple[Layout, Plan], what: tuple[nn.Module, Options, Forms], ground: Ground
) -> tuple[Layout, Plan]:
    """The plan with the same homes, where nothing passes and large pages have room."""
    (_, made), (model, chosen, forms) = found, what
    large = resident_page_size(made)
    if large <= made.page_bytes:
        return found
    laid_out = lay_out(model, forms, large)
    request = _request(laid_out, chosen, (ground, made.budget, large), forms)
    try:
        return laid_out, finish(request, made.placements, made.limits)
    except BudgetError:
        return found


def _request(laid_out: Layout, chosen: Options, where: tuple[Ground, Budget, int], forms: Forms) -> Request:
    ground, budget, page = where
    place = None if isinstance(chosen.place, Plan) else chosen.place
    folders = tuple(str(path.absolute()) for path, _ in parse_nvme(chosen.nvme))
    known = Measured(ground.device.type, ground.machine, ground.local_ranks, folders)
    return Request(
        laid_out.spec,
        budget,
        dtypes_of(forms, chosen, laid_out.spec),
        page,
        chosen.micro_batches,
        place,
        copied_norms=not ground.has_gpu,
        paged=ground.device.type in parts.PAGED or ground.has_gpu,
        speeds=known.speeds(laid_out.spec),
        pace=known.pace(),
        unknown=known.unknown,
        spread=chosen.update != "lazy",
        locals=ground.local_ranks,
    )


def improved(
    made: Plan, laid_out: Layout, how: tuple[Options, Ground, Forms], seen: tuple[Activations, tuple[Role, ...]]
) -> Plan | None:
    """The plan anew, now that activations are known: with more of these roles on the device, if there is room."""
    (chosen, ground, forms), (activations, roles) = how, seen
    request = _again(made, _request(laid_out, chosen, (ground, made.budget, made.page_bytes), forms))
    return improve(dataclasses.replace(request, activations=activations), made, roles)


def rearranged(
    made: Plan, laid_out: Layout, how: tuple[Options, Ground, Forms], placements: tuple[Placement, ...]
) -> Plan:
    """The plan with other homes, within the same limits."""
    chosen, ground, forms = how
    request = _request(laid_out, chosen, (ground, made.budget, made.page_bytes), forms)
    return finish(_again(made, request), placements, made.limits)


def _again(made: Plan, request: Request) -> Request:
    """What is asked for another plan, by those who were there for the first one, by what was known of them then, beside
    what that one took."""
    request = dataclasses.replace(request, taken={tier: made.taken(tier) for tier in TIERS[1:]})
    if made.bytes_of("host", CORES):
        return dataclasses.replace(request, speeds=made.speeds, has_cores=True)
    return dataclasses.replace(request, chosen=Chosen(made.limits.hands, made.why))


def _alike(one: ModelSpec, other: ModelSpec) -> bool:
    """Whether two specs are those of two ranks of one model."""
    shardings = [dataclasses.replace(spec.sharding, rank=0) for spec in (one, other)]
    params = [[(p.name, p.shape, p.dtype, p.offset) for u in s.units for p in u.params] for s in (one, other)]
    return shardings[0] == shardings[1] and params[0] == params[1] and one.format == other.format


def _within(made: Plan, budget: Budget, chosen: Options) -> Plan:
    """A plan made earlier, in the budgets that are given now; "auto" keeps those that it was made for."""
    device = made.budget.device if chosen.gpu == "auto" else budget.device
    host = made.budget.host if chosen.host == "auto" else budget.host
    now = Budget(device, host, budget.nvme)
    for tier, limit in (("device", now.device), ("host", now.host), ("nvme", now.nvme)):
        if made.peaks[tier] > limit:
            raise BudgetError(
                f"expected a plan within the {tier} budget of {human(limit)}, found one with a peak of "
                f"{human(made.peaks[tier])}; plan anew with this budget, or raise it"
            )
    return dataclasses.replace(made, budget=now)


def _budget(chosen: Options, ground: Ground) -> Budget:
    """The budget of this rank: its share of what the machine's ranks have together; the least of all ranks."""
    device, machine = ground.device, ground.machine
    shares = APART if ground.has_gpu else ONE_MEMORY
    there = dict(machine) if machine else {"device": device_available(device), "host": host_available()}
    sizes = {}
    for name, tier in (("gpu", "device"), ("host", "host")):
        value = getattr(chosen, name)
        sizes[tier] = int(shares[name] * there[tier]) if value == "auto" else parse_size(name, value, there[tier])
        if machine and sizes[tier] > there[tier]:
            raise OptionError(
                f"expected {name}= within the {human(there[tier])} of that machine, found {human(sizes[tier])}; give a "
                "smaller budget, or a larger machine"
            )
    room = _disk_room(parse_nvme(chosen.nvme))
    if chosen.gpu == "auto" and not ground.has_gpu:
        # Then the device is memory that ranks share, too.
        sizes["device"] //= ground.local_ranks
    found = (sizes["device"], sizes["host"] // ground.local_ranks, room // ground.local_ranks)
    if ground.comm is not None:
        found = tuple(min(each) for each in zip(*ground.comm.exchange(list(found)), strict=True))
    return Budget(*found)


def _disk_room(paths: list[tuple[Path, int | None]]) -> int:
    """What is said of folders; and what is free on the disks of others, each counted once."""
    said = sum(size for _, size in paths if size is not None)
    free = dict(_free(path) for path, size in paths if size is None)
    return said + sum(int(0.95 * room) for room in free.values())


def _free(path: Path) -> tuple[int, int]:
    """Which disk a folder is on, and what is free there."""
    try:
        free = disk_free(path)
    except OSError as error:
        raise TierError(
            f"expected a folder at nvme path {str(path)!r}, found {error.strerror!r}; make it or give another path"
        ) from error
    check_folder(path)
    return os.stat(path).st_dev, free
