"""Chooses placements: device first, then host, then nvme.

What a byte on the device saves per step decides the order: weights that live elsewhere cross the link three times
(forward, backward, home again), gradients and states twice. So weights come first, then gradients, then states.

Note [Room for activations]: they are not known before the first step. Half of the device budget is kept for them where
that is possible; where the other tiers have no room for what does not fit beside that, as much as they leave, down to a
32nd, and never less than the largest unit's weights.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from overspill.errors import BudgetError
from overspill.plan.memory import (
    STAGING,
    Request,
    bytes_on,
    device_lines,
    first_of,
    lines_elsewhere,
    staging_bytes,
    taken_bytes,
    tracking_bytes,
)
from overspill.plan.plan import Line, Plan
from overspill.plan.sharing import moved, shared
from overspill.program import Lane
from overspill.slots import ring_slot_bytes
from overspill.specs import (
    ROLES,
    TIERS,
    KiB,
    Limits,
    MiB,
    ModelSpec,
    Placement,
    Role,
    TierName,
    human,
)
from overspill.times import Passing, behind, times_of

LEAST_SHARE = 32
"""See Note [Room for activations]."""
GRAIN = 128
"""Of the device's budget, the share by which it may be less than what the other tiers leave."""
MOST_SLOTS = 128
"""Of the ring, where states are told to live elsewhere and there is room: what it holds when a step begins, no forward
pass waits for. Where homes are ours to choose, states use that room for good."""
WORTH = 1.5
"""How many times as many slots are worth a pause, if nothing else changes."""
WORTH_LENDING = 2
"""How many times as many bytes as gradients must pass for their room to be lent to pages (runtime/loans.py): of fewer,
it is not the link that holds the model up but who hands them out, and nobody can hand them out far ahead of the GPU
into room that the model must leave first."""
PAGE = (64 * KiB, 128 * MiB)
LARGE_PAGE = 1024 * MiB
"""Of states that live on the device and pass nowhere."""
DEPTHS = (4, 3, 2)
"""Slots of the ring: one that comes, one that is updated, one that goes, and one for whoever hands the next one out too
late."""
CONSUMED = 16
"""Of the device's budget, the share for gradients that wait for their updates, where they are let go in the backward
pass: as long as some wait, pages pass in the forward pass too."""
LEAN = Placement("host", "host", "host")


def page_sizes(device_budget: int) -> Iterator[int]:
    """How large a page may be, the largest first: small budgets want small pages."""
    size = min(max(device_budget // 32, PAGE[0]), PAGE[1])
    while size > PAGE[0]:
        yield size
        size //= 4
    yield PAGE[0]


def resident_page_size(made: Plan) -> int:
    """How large a page may be, if all of them live on the device, where each costs launches and none needs room to
    pass."""
    ours = made.model.format.fields is not None
    passes = any((p.grad, p.state) != ("device", "device") for p in made.placements)
    return min(made.budget.device // 32, LARGE_PAGE) if ours and not passes else made.page_bytes


def solve(request: Request) -> Plan:
    """The plan, or a BudgetError that says what would work."""
    if request.place:
        return _finish(request, tuple(Placement(**request.place) for _ in request.model.units))
    needed = _needed(request, _lean(request.model), _least)
    if needed + _largest(request.model) > request.budget.device:
        raise _too_small(request, needed + _largest(request.model))
    room = request.budget.device - needed
    most, least = _activations(request, needed), max(_largest(request.model), request.budget.device // LEAST_SHARE)
    kept = min(most, least, room)
    placements = _fill(request, room - most, request.budget.host)
    if placements is not None:
        return _finish(request, placements)
    placements = _fill(request, room - kept, request.budget.host)
    if placements is None:
        raise _too_little_elsewhere(request, room - kept)
    best = _finish(request, placements)
    # The most that fits lies between what does and what does not. See Note [Room for activations].
    while most - kept > max(request.budget.device // GRAIN, 1):
        middle = (kept + most) // 2
        placements = _fill(request, room - middle, request.budget.host)
        if placements is None:
            most = middle
            continue
        try:
            made = _finish(request, placements)
        except BudgetError:
            # What more has to pass takes room, too: here more than there is.
            most = middle
            continue
        # Or more than what it leaves.
        kept, best = middle, max(best, made, key=lambda plan: plan.bytes_of("device", "activations"))
    return best


def _largest(model: ModelSpec) -> int:
    return max(u.weight_bytes for u in model.units)


def _activations(request: Request, needed: int, grads: int = 0) -> int:
    """See Note [Room for activations]. `grads`: what of `needed` are gradients."""
    if request.activations is not None:
        return max(request.activations.beside(grads), _largest(request.model))
    room = request.budget.device - needed
    return max(_largest(request.model), min(request.budget.device // 2, room))


# --- homes


def _lean(model: ModelSpec) -> tuple[Placement, ...]:
    """All that can be spilled is."""
    lean = replace(LEAN, grad="device") if _consumed(model) else LEAN
    return (lean,) * len(model.units)


def _fill(request: Request, room: int, host: int) -> tuple[Placement, ...] | None:
    """Spend the device's room in the order of what a byte saves, then the host's, then nvme's; None if it is full."""
    model, nvme = request.model, request.budget.nvme
    staging = 2 * staging_bytes(host) if nvme else 0
    left: dict[TierName, int] = {"device": room, "host": host - staging, "nvme": nvme - tracking_bytes(nvme)}
    homes: dict[tuple[int, Role], TierName] = {}
    for role in ROLES:
        for index, unit in enumerate(model.units):
            fits = [tier for tier in TIERS if taken_bytes(unit, role, tier) <= max(left[tier], 0)]
            if not fits:
                return None
            homes[index, role] = fits[0]
            left[fits[0]] -= taken_bytes(unit, role, fits[0])
    return tuple(Placement(*(homes[i, role] for role in ROLES)) for i in range(len(model.units)))


# --- the device


def _least(request: Request, placements: tuple[Placement, ...]) -> Limits:
    """Room for what must be on the device together, and nothing ahead of time."""
    away = _away(request.model, placements)
    window = max((sum(away[i] for i in units) for units in request.model.together), default=0)
    flight = max((p.grad_bytes for u in request.model.units for p in u.params), default=0)
    return Limits(window=window, depth=1, flight=flight, consumed=_consumed(request.model))


def _ahead(request: Request, placements: tuple[Placement, ...]) -> Limits:
    """More than the least, where a small share of the budget pays for it: pages and units ahead of their use."""
    least, share = _least(request, placements), request.budget.device // 8
    pages = [page.state_bytes + page.grad_bytes for u in request.model.units for page in u.pages]
    depth = next((d for d in DEPTHS if (d - 1) * max(pages, default=0) <= share), 1)
    unit = max(_away(request.model, placements), default=0)
    made = sum(u.made_bytes for u in request.model.units)
    consumed = least.consumed and max(least.consumed, min(made, request.budget.device // CONSUMED))
    return replace(least, depth=depth, window=least.window + (unit if unit <= share else 0), consumed=consumed)


def _consumed(model: ModelSpec) -> int:
    """Bytes of the gradients of one unit, where they are not kept until the step."""
    kept = any(p.grads for u in model.units for p in u.params if p.trainable)
    return 0 if kept else max((u.made_bytes for u in model.units), default=0)


def _away(model: ModelSpec, placements: tuple[Placement, ...]) -> list[int]:
    """Of each unit the bytes that are on the device only while it is used."""
    shared, pairs = model.sharding.split("weight"), zip(model.units, placements, strict=True)
    return [u.weight_bytes if shared or p.weight != "device" else 0 for u, p in pairs]


LimitsOf = Callable[[Request, tuple[Placement, ...]], Limits]


def _needed(request: Request, placements: tuple[Placement, ...], limits_of: LimitsOf) -> int:
    return sum(line.nbytes for line in device_lines(request, placements, limits_of(request, placements)))


# --- when activations are known


def improve(request: Request, made: Plan, roles: tuple[Role, ...] = ROLES) -> Plan | None:
    """A plan with more of these roles on the device than the one that was made before so much was known of activations;
    None: there is no room for more."""
    assert request.activations is not None, "only when activations are known"
    owned = sum(line.nbytes for line in device_lines(request, made.placements, made.limits))
    grads = bytes_on(request.model, made.placements, "grad", "device")
    # Before and after the first gradient of a step: gradients take room only of the latter.
    seen, largest = request.activations, _largest(request.model)
    before = request.budget.device - (owned - grads) - max(seen.before, largest)
    after = request.budget.device - owned - max(seen.after, largest)
    placements = list(made.placements)
    for role in roles:
        for index, unit in enumerate(request.model.units):
            taken, room = unit.role_bytes(role), after if role == "grad" else min(before, after)
            if placements[index].of(role) != "device" and taken and taken <= room:
                placements[index] = replace(placements[index], **{role: "device"})  # type: ignore[arg-type]
                after -= taken
                before -= taken if role != "grad" else 0
    limits = _with_slots(request, tuple(placements), made.limits, min(before, after))
    before -= (limits.depth - made.limits.depth) * ring_slot_bytes(request.model, tuple(placements))
    limits = replace(limits, lent=_lent(request.model, tuple(placements), before))
    alike = limits.depth < WORTH * made.limits.depth and limits.lent <= WORTH * made.limits.lent
    if tuple(placements) == made.placements and alike:
        return None
    return finish(request, tuple(placements), limits)


def _lent(model: ModelSpec, placements: tuple[Placement, ...], room: int) -> int:
    """Bytes that may be lent to pages. See WORTH_LENDING."""
    grads = bytes_on(model, placements, "grad", "device")
    states = sum(bytes_on(model, placements, "state", tier) for tier in TIERS[1:])
    return max(0, min(room, grads)) if states >= WORTH_LENDING * grads else 0


# --- the plan


def _finish(request: Request, placements: tuple[Placement, ...]) -> Plan:
    model, budget = request.model, request.budget
    least = _needed(request, placements, _least)
    if least + _largest(model) > budget.device:
        raise _too_small(request, least + _largest(model), placements)
    ahead = _needed(request, placements, _ahead)
    if ahead + _largest(model) > budget.device:
        return finish(request, placements, _least(request, placements))
    # Where homes are ours to choose, what is spare is for states, when activations are known.
    limits = _longer_ring(request, placements, ahead) if request.place else _ahead(request, placements)
    return finish(request, placements, limits)


def _longer_ring(request: Request, placements: tuple[Placement, ...], needed: int) -> Limits:
    """Where device memory is left beyond what is kept for activations, more pages are fetched ahead of the step."""
    limits = _ahead(request, placements)
    return _with_slots(request, placements, limits, request.budget.device - needed - _activations(request, needed))


def _with_slots(request: Request, placements: tuple[Placement, ...], limits: Limits, room: int) -> Limits:
    """As many more slots of the ring as there is room for, where pages pass by a thread of their own."""
    slot, pages = ring_slot_bytes(request.model, placements), sum(len(u.pages) for u in request.model.units)
    if not request.paged or request.model.format.fields is None or limits.depth == 1 or not slot:
        return limits
    return replace(limits, depth=max(limits.depth, min(limits.depth + room // slot, MOST_SLOTS, pages)))


def finish(request: Request, placements: tuple[Placement, ...], limits: Limits) -> Plan:
    """The plan with these homes and limits, as far as the other tiers have room for it."""
    model, budget = request.model, request.budget
    lines = device_lines(request, placements, limits)
    owned = sum(line.nbytes for line in lines)
    rest, activations = (
        budget.device - owned,
        _activations(request, owned, bytes_on(model, placements, "grad", "device")),
    )
    # Once they are known, all that nobody else needs is theirs: torch's allocator takes it before it looks for holes.
    lines.append(Line("device", "activations", rest if request.activations is not None else min(activations, rest)))
    uses_nvme = any(p.of(role) == "nvme" for p in placements for role in ROLES) or request.taken.get("nvme", 0)
    staging = staging_bytes(budget.host) if uses_nvme else 0
    chosen, cores = shared(request, placements, limits, 2 * staging)
    limits = replace(limits, hands=chosen.hands)
    lines += lines_elsewhere(request, placements, staging, cores)
    if owned + _largest(model) > budget.device:
        raise _too_small(request, owned + _largest(model), placements)
    plan = Plan(
        model=model,
        placements=placements,
        limits=limits,
        budget=budget,
        lines=tuple(line for line in lines if line.nbytes),
        moved=moved(request, placements, limits),
        dtypes=dict(request.dtypes),
        page_bytes=request.page_bytes,
        staging=staging,
        why=chosen.why,
        speeds=request.speeds,
    )
    limits_of: dict[TierName, int] = {"host": budget.host, "nvme": budget.nvme}
    for tier, limit in limits_of.items():
        if plan.peak(tier) > limit:
            raise _tier_too_small(plan, tier, limit, request.locals)
    return timed(request, plan)


def timed(request: Request, made: Plan) -> Plan:
    """With what a step takes here, or why that is not known."""
    if request.pace is None:
        return replace(made, times=None, untimed="")
    if made.limits.hands != "streamed":
        # How fast the link and the cores are together is not foretold.
        return replace(made, times=None, untimed="the host's cores update too")
    passing = Passing(*(made.moved.get(lane, 0) for lane in (Lane.UP, Lane.DOWN, Lane.READ, Lane.WRITE)))
    first = Passing() if request.spread else behind(*first_of(request, made.placements, made.limits))
    found = times_of(request.pace, passing, first)
    return replace(made, times=found, untimed="" if found is not None else request.unknown)


# --- refusals


def _tier_too_small(plan: Plan, tier: TierName, limit: int, ranks: int) -> BudgetError:
    peak = plan.peak(tier)
    cure = "set host= to at least" if tier == "host" else "give nvme= a path with room for"
    return BudgetError(
        f"expected at least {human(peak)} ({peak} bytes) of {tier} memory, found a budget of {human(limit)}; {cure} "
        + _of_all(peak, ranks),
        peak,
    )


def _of_all(each: int, ranks: int) -> str:
    """What must be said of host= or nvme= for every rank of a machine to have so much."""
    found = f"{human(each * ranks)} ({each * ranks} bytes)"
    return found if ranks == 1 else f"{found}, of which {ranks} ranks have {human(each)} each"


def _too_small(request: Request, smallest: int, placements: tuple[Placement, ...] = ()) -> BudgetError:
    model = request.model
    homes = placements or _lean(model)
    lines = device_lines(request, homes, _least(request, homes))
    parts = ", ".join(f"{line.what} {human(line.nbytes)}" for line in lines if line.nbytes)
    largest = max(model.units, key=lambda u: u.weight_bytes)
    about = f"{-(-smallest // MiB)}MiB" if smallest > 16 * MiB else f"{-(-smallest // KiB)}KiB"
    return BudgetError(
        f"expected a device budget of at least {human(smallest)} ({smallest} bytes), found "
        f"{human(request.budget.device)}; {'as placed' if placements else 'with all else spilled'} the device holds: "
        f"{parts}, activations (at least {human(_largest(model))}); the largest unit is {largest.name} with "
        f'{human(largest.weight_bytes)}; set gpu={smallest} or more, which is about "{about}"',
        smallest,
    )


def _too_little_elsewhere(request: Request, room: int) -> BudgetError:
    model, budget = request.model, request.budget
    total = sum(model.role_bytes(role) for role in ROLES)
    low, high = budget.host, budget.host + total + 2 * STAGING[1]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fill(request, room, middle) else (middle, high)
    where = "or give nvme= a path on a fast disk" if not budget.nvme else "or give nvme= more room"
    return BudgetError(
        f"expected room for {human(total)} of weights, gradients and states, found {human(max(room, 0))} on the "
        f"device, {human(budget.host)} of host memory and {human(budget.nvme)} on nvme; set host= to "
        f"at least {_of_all(high, request.locals)}, {where}",
        high,
    )
