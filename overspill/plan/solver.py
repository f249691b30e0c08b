"""Chooses placements: device first, then host, then nvme.

What a byte on the device saves per step decides the order: weights that live elsewhere cross the link three times
(forward, backward, home again), gradients and states twice. So weights come first, then gradients, then states.

Note [Room for activations]: they are not known before the first step. Half of the device budget is kept for them where
that is possible, and never less than the largest unit's weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from overspill.errors import BudgetError, OptionError
from overspill.plan.plan import Line, Plan, human
from overspill.plan.simulate import Simulated, simulate
from overspill.program import Program
from overspill.specs import ROLES, Budget, KiB, Limits, MiB, ModelSpec, Placement, Role, TierName, align

WORKSPACE = 6
"""Copies of a page's parameters that an optimizer's own step may hold for a moment."""
NVME_BLOCK = 4096
STAGING = (128 * KiB, 8 * MiB)
PAGE = (64 * KiB, 64 * MiB)


def page_bytes(device_budget: int) -> int:
    """How large a page may be: small budgets get small pages."""
    return min(max(device_budget // 16, PAGE[0]), PAGE[1])


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be placed, and within what."""

    model: ModelSpec
    budget: Budget
    dtypes: Mapping[str, str]
    page_bytes: int
    micro_batches: int = 1
    place: Mapping[str, TierName] | None = None
    """Homes that are forced instead of solved for, by role."""


def solve(request: Request) -> Plan:
    """The plan, or a BudgetError that says what would work."""
    forced = request.place or {}
    unknown = set(forced) - set(ROLES)
    if unknown:
        raise OptionError(f"expected roles among {ROLES} in place=, found {sorted(unknown)}")
    if request.place:
        units = tuple(Placement(**forced) for _ in request.model.units)
        return _finish(request, units)
    lean = _lean(request)
    needed = _device_needed(request, lean)
    activations = _activations(request, needed)
    if needed + activations > request.budget.device:
        raise BudgetError(_too_small(request, needed + activations))
    return _finish(request, _fill(request, request.budget.device - needed - activations))


def _lean(request: Request) -> tuple[Placement, ...]:
    return tuple(Placement("host", "host", "host") for _ in request.model.units)


def _largest(model: ModelSpec) -> int:
    return max(u.weight_bytes for u in model.units)


def _activations(request: Request, needed: int) -> int:
    """See Note [Room for activations]."""
    room = request.budget.device - needed
    return max(_largest(request.model), min(request.budget.device // 2, room))


def _fill(request: Request, room: int) -> tuple[Placement, ...]:
    """Spend the device's room in the order of what a byte saves, then the host's, then nvme's."""
    model, budget = request.model, request.budget
    left: dict[TierName, int] = {"device": room, "host": budget.host - _staging_total(budget), "nvme": budget.nvme}
    homes: dict[tuple[int, Role], TierName] = {}
    for role in ROLES:
        for index, unit in enumerate(model.units):
            size = unit.role_bytes(role)
            for tier in ("device", "host", "nvme"):
                if _on_tier(unit.role_bytes(role), tier) <= left[tier] or size == 0:
                    left[tier] -= _on_tier(size, tier)
                    homes[index, role] = tier
                    break
            else:
                raise BudgetError(_too_little_elsewhere(request, room))
    return tuple(Placement(*(homes[i, role] for role in ROLES)) for i in range(len(model.units)))


def _on_tier(nbytes: int, tier: TierName) -> int:
    """nvme slots start on block boundaries; one slot per parameter at most is foretold by a generous rounding."""
    return align(nbytes, NVME_BLOCK) if tier == "nvme" else nbytes


def _staging_bytes(budget: Budget) -> int:
    return min(max(align(budget.host // 32, NVME_BLOCK), STAGING[0]), STAGING[1])


def _staging_total(budget: Budget) -> int:
    return 2 * _staging_bytes(budget) if budget.nvme else 0


def _limits(model: ModelSpec, placements: tuple[Placement, ...], spare: int = 0) -> Limits:
    """Room for what must be on the device together, and one more unit to fetch ahead where there is room."""
    away = [u if p.weight != "device" else None for u, p in zip(model.units, placements, strict=True)]
    together = [sum(u.weight_bytes for u in (away[i] for i in units) if u) for units in model.together]
    window = max(together, default=0)
    ahead = max((u.weight_bytes for u in away if u), default=0)
    flight = max((p.grad_bytes for u in model.units for p in u.params), default=0)
    return Limits(window=window + (ahead if ahead <= spare else 0), depth=3, flight=flight)


def _workspace(model: ModelSpec) -> int:
    """What the optimizer's own step holds for a moment, and states that it makes anew in the first step."""
    pages = [
        (sum(p.nbytes for p in u.params[page.first : page.last]), page.state_bytes)
        for u in model.units
        for page in u.pages
    ]
    return max((WORKSPACE * params + states for params, states in pages), default=0)


def _device_needed(request: Request, placements: tuple[Placement, ...]) -> int:
    lines = _device_lines(request, placements, _limits(request.model, placements))
    return sum(line.nbytes for line in lines)


def _device_lines(request: Request, placements: tuple[Placement, ...], limits: Limits) -> list[Line]:
    model = request.model
    simulated = _simulated(request, placements, limits)
    gradient = max((p.grad_bytes for u in model.units for p in u.params), default=0)
    lines = [Line("device", role, _resident(model, placements, role, "device")) for role in ROLES]
    lines += [
        Line("device", "buffers", model.buffer_bytes),
        Line("device", "weights passing", simulated.window),
        Line("device", "gradients passing", max(simulated.gradients, gradient)),
        Line("device", "states passing", simulated.staged),
        Line("device", "update workspace", _workspace(model)),
    ]
    return lines


def _simulated(request: Request, placements: tuple[Placement, ...], limits: Limits) -> Simulated:
    return simulate(Program(request.model, placements, limits), micro_batches=min(request.micro_batches, 2))


def _resident(model: ModelSpec, placements: tuple[Placement, ...], role: Role, tier: TierName) -> int:
    found = (u.role_bytes(role) for u, p in zip(model.units, placements, strict=True) if p.of(role) == tier)
    return sum(found)


def _nvme_bytes(model: ModelSpec, placements: tuple[Placement, ...], role: Role) -> int:
    """Exactly what the slots will take: a unit's weights, each gradient, each page of state."""
    total = 0
    for unit, placement in zip(model.units, placements, strict=True):
        if placement.of(role) != "nvme":
            continue
        sizes = {
            "weight": [unit.weight_bytes],
            "grad": [p.grad_bytes for p in unit.params],
            "state": [page.state_bytes for page in unit.pages],
        }[role]
        total += sum(align(size, NVME_BLOCK) for size in sizes)
    return total


def _finish(request: Request, placements: tuple[Placement, ...]) -> Plan:
    model, budget = request.model, request.budget
    limits = _limits(model, placements)
    lines = _device_lines(request, placements, limits)
    owned = sum(line.nbytes for line in lines)
    ahead = _limits(model, placements, spare=max(0, budget.device - owned - _activations(request, owned)) // 2)
    if ahead != limits:
        limits, lines = ahead, _device_lines(request, placements, ahead)
        owned = sum(line.nbytes for line in lines)
    if owned > budget.device:
        raise BudgetError(_too_small(request, owned + _largest(model)))
    lines.append(Line("device", "activations", min(_activations(request, owned), budget.device - owned)))
    lines += [Line("host", role, _resident(model, placements, role, "host")) for role in ROLES]
    uses_nvme = any(p.of(role) == "nvme" for p in placements for role in ROLES)
    staging = _staging_bytes(budget) if uses_nvme else 0
    lines.append(Line("host", "nvme staging", 2 * staging))
    lines += [Line("nvme", role, _nvme_bytes(model, placements, role)) for role in ROLES]
    moved = _simulated(request, placements, limits).moved
    plan = Plan(
        model=model,
        placements=placements,
        limits=limits,
        budget=budget,
        lines=tuple(line for line in lines if line.nbytes),
        moved={str(lane): n for lane, n in moved.items()},
        dtypes=dict(request.dtypes),
        page_bytes=request.page_bytes,
        staging=staging,
    )
    for tier, limit in (("host", budget.host), ("nvme", budget.nvme)):
        if plan.peak(tier) > limit:  # type: ignore[arg-type]
            raise BudgetError(_tier_too_small(plan, tier))
    return plan


def _tier_too_small(plan: Plan, tier: str) -> str:
    peak = plan.peak(tier)  # type: ignore[arg-type]
    limit = {"host": plan.budget.host, "nvme": plan.budget.nvme}[tier]
    cure = f"set {tier}= to at least {human(peak)}" if tier == "host" else "give nvme= a path with that much room"
    return f"expected at least {human(peak)} ({peak} bytes) of {tier} memory, found a budget of {human(limit)}; {cure}"


def _too_small(request: Request, smallest: int) -> str:
    lines = {x.what: x.nbytes for x in _device_lines(request, _lean(request), _limits(request.model, _lean(request)))}
    parts = ", ".join(f"{what} {human(n)}" for what, n in lines.items() if n)
    largest = max(request.model.units, key=lambda u: u.weight_bytes)
    return (
        f"expected a device budget of at least {human(smallest)} ({smallest} bytes), found "
        f"{human(request.budget.device)}; with everything else spilled the device still holds: {parts}, and "
        f"activations (at least {human(_largest(request.model))}); the largest unit is "
        f"{largest.name} with {human(largest.weight_bytes)}; "
        f'set gpu="{-(-smallest // MiB)}MiB" or more'
    )


def _too_little_elsewhere(request: Request, room: int) -> str:
    model, budget = request.model, request.budget
    total = sum(model.role_bytes(role) for role in ROLES)
    short = total - room - (budget.host - _staging_total(budget)) - budget.nvme
    # Units do not straddle tiers, so the sum alone is not enough: each tier may leave less than one unit unused.
    slack = max(u.role_bytes(role) for u in model.units for role in ROLES)
    smallest = budget.host + max(short, 0) + slack
    where = 'or give nvme="/path/on/a/fast/disk"' if not budget.nvme else "or give nvme= more room"
    return (
        f"expected room for {human(total)} of weights, gradients and states, found {human(max(room, 0))} on the "
        f"device, {human(budget.host)} of host memory and {human(budget.nvme)} on nvme; set host= to at least "
        f"{human(smallest)} ({smallest} bytes), {where}"
    )
