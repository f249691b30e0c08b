"""Placements: device first, within budgets, refused with the smallest budget that works."""

import random
import re
from dataclasses import replace

import pytest

from overspill.errors import BudgetError
from overspill.plan import solver
from overspill.plan.memory import Request
from overspill.plan.plan import Plan
from overspill.plan.solver import GRAIN, improve, page_sizes, solve
from overspill.specs import ROLES, Activations, Budget, GiB, KiB, MiB, ModelSpec, Placement
from tests.null.test_program import unit


def model(sizes: list[int]) -> ModelSpec:
    units = tuple(unit(f"u{i}", n) for i, n in enumerate(sizes))
    return ModelSpec(units, tuple((i,) for i in range(len(units))), 64)


def planned(spec: ModelSpec, device: int, host: int = GiB, nvme: int = 0) -> Plan:
    return solve(Request(spec, Budget(device, host, nvme), {}, 64 * KiB))


def smallest(spec: ModelSpec, host: int = GiB, nvme: int = 0) -> int:
    with pytest.raises(BudgetError) as refused:
        planned(spec, 1, host, nvme)
    return int(re.search(r"at least .*?\((\d+) bytes\)", str(refused.value))[1])


@pytest.mark.parametrize("seed", range(20))
def test_the_smallest_budget_that_is_named_works_and_less_does_not(seed: int) -> None:
    rng = random.Random(seed)
    spec = model([rng.randint(1, 40000) for _ in range(rng.randint(1, 8))])
    least = smallest(spec)
    assert planned(spec, least).peak("device") <= least
    with pytest.raises(BudgetError, match=f"{least} bytes"):
        planned(spec, least - 1)


@pytest.mark.parametrize("seed", range(20))
def test_the_smallest_host_budget_that_is_named_works_and_less_does_not(seed: int) -> None:
    rng = random.Random(seed)
    spec = model([rng.randint(1000, 40000) for _ in range(rng.randint(1, 8))])
    device = smallest(spec)
    with pytest.raises(BudgetError) as refused:
        planned(spec, device, host=1)
    least = int(re.search(r"set host= to at least .*?\((\d+) bytes\)", str(refused.value))[1])
    assert planned(spec, device, host=least).peak("host") <= least
    with pytest.raises(BudgetError):
        planned(spec, device, host=least - 1)


def test_units_of_one_placement_are_named_without_what_is_between_them() -> None:
    def told(homes: str) -> list[str]:
        made = planned(model([100] * len(homes)), GiB)
        placements = tuple(Placement(weight="host" if home == "h" else "device") for home in homes)
        lines = str(replace(made, placements=placements)).split("\n")
        return [line.split(":")[0] for line in lines if ": weights " in line]

    assert told("ddd") == ["u0 .. u2 (3 units)"]
    assert told("d") == ["u0"]
    assert told("ddddhhhd") == ["u0 .. u3, u7 (5 units)", "u4 .. u6 (3 units)"]
    assert told("dhd") == ["u0, u2 (2 units)", "u1"]
    assert told("d" + "hd" * 6) == [
        "u0, u2, u4, u6, u8, 2 others (7 units)",
        "u1, u3, u5, u7, u9, u11 (6 units)",
    ]


@pytest.mark.parametrize("seed", range(30))
def test_peaks_are_within_budgets(seed: int) -> None:
    rng = random.Random(seed)
    spec = model([rng.randint(1, 40000) for _ in range(rng.randint(1, 8))])
    device = smallest(spec) * rng.randint(1, 6)
    plan = planned(spec, device, rng.randint(600 * KiB, 4 * MiB), GiB)
    for tier, limit in (("device", plan.budget.device), ("host", plan.budget.host), ("nvme", plan.budget.nvme)):
        assert plan.peak(tier) <= limit


def test_more_device_memory_takes_weights_then_gradients_then_states() -> None:
    spec = model([10000] * 4)
    seen = []
    for device in range(smallest(spec), 6 * sum(spec.role_bytes(r) for r in ROLES), 100 * KiB):
        placements = planned(spec, device).placements
        seen.append(tuple(sum(p.of(role) == "device" for p in placements) for role in ROLES))
    assert seen == sorted(seen), "more memory never takes anything off the device"
    assert seen[0] == (0, 0, 0) and seen[-1] == (4, 4, 4)
    assert all(grads == 0 or weights == 4 for weights, grads, _ in seen)
    assert all(states == 0 or grads == 4 for _, grads, states in seen)


@pytest.mark.parametrize("seed", range(30))
def test_a_plan_that_knows_activations_holds_before_and_after_gradients(seed: int) -> None:
    rng = random.Random(seed)
    spec = model([rng.randint(1, 40000) for _ in range(rng.randint(1, 8))])
    total = sum(spec.role_bytes(role) for role in ROLES)
    budget = Budget(smallest(spec) + rng.randrange(total), GiB, 0)
    made = solve(Request(spec, budget, {}, 64 * KiB))
    seen = Activations(rng.randrange(1, total), rng.randrange(1, total))
    better = improve(Request(spec, budget, {}, 64 * KiB, activations=seen), made)
    if better is None:
        return
    grads = better.bytes_of("device", "grad")
    owned = better.peak("device") - better.bytes_of("device", "activations")
    was = made.peak("device") - made.bytes_of("device", "activations")
    for more, now, then in (
        (seen.before, owned - grads, was - made.bytes_of("device", "grad")),
        (seen.after, owned, was),
    ):
        assert now + more <= budget.device or now <= then, "what is too much already gets no more"
    assert better.peak("device") <= budget.device
    moved = [(p.of(r), q.of(r)) for p, q in zip(made.placements, better.placements, strict=True) for r in ROLES]
    assert all(now in (before, "device") for before, now in moved)


def test_gradients_take_the_room_that_activations_leave() -> None:
    """Activations that are gone when gradients come have the same room."""
    spec = model([10000] * 4)
    grads, least = spec.role_bytes("grad"), smallest(spec)
    budget = Budget(least + spec.role_bytes("weight") + grads, GiB, 0)
    made = solve(Request(spec, budget, {}, 64 * KiB))
    assert made.bytes_of("device", "grad") == 0
    owned = made.peak("device") - made.bytes_of("device", "activations")
    room = budget.device - owned
    together, apart = Activations(room, room), Activations(room, room - grads)
    assert improve(Request(spec, budget, {}, 64 * KiB, activations=together), made) is None
    better = improve(Request(spec, budget, {}, 64 * KiB, activations=apart), made)
    assert better is not None and better.bytes_of("device", "grad") > grads // 2
    assert better.bytes_of("device", "weight") == made.bytes_of("device", "weight")


def test_less_is_kept_for_activations_where_nothing_else_has_room() -> None:
    spec, device = model([40000] * 8), 16 * MiB
    plans = [planned(spec, device, host * MiB) for host in (12, 8, 4, 2, 1)]
    kept = [plan.bytes_of("device", "activations") for plan in plans]
    assert kept[0] >= 0.4 * device and kept[1] < kept[0] and max(kept[3:]) < 0.1 * device
    assert min(kept) >= max(u.weight_bytes for u in spec.units)
    assert all(plan.peak("device") <= device for plan in plans)
    # As much as what is on the host leaves, less the ring for that: with other units there it would hardly be more.
    for plan, found in zip(plans[1:], kept[1:], strict=True):
        request = Request(spec, plan.budget, {}, 64 * KiB)
        filled = (solver._fill(request, room, plan.budget.host) for room in range(0, device, device // GRAIN))
        others = [solver._finish(request, placements) for placements in filled if placements is not None]
        assert found >= max(other.bytes_of("device", "activations") for other in others) - 2 * device // GRAIN
    with pytest.raises(BudgetError, match="set host= to at least"):
        planned(spec, device, 1)


def test_what_the_host_cannot_hold_goes_to_nvme() -> None:
    spec = model([10000] * 4)
    plan = planned(spec, smallest(spec), host=900 * KiB, nvme=GiB)
    homes = {p.of(role) for p in plan.placements for role in ROLES}
    assert homes == {"host", "nvme"}


def test_pages_get_small_with_the_budget() -> None:
    assert next(page_sizes(100 * GiB)) == 128 * MiB
    assert list(page_sizes(MiB)) == [64 * KiB]
    assert list(page_sizes(GiB))[-1] == 64 * KiB


def test_whatever_a_disk_can_hold_is_planned() -> None:
    """More room for activations is looked for up to the edge of what fits, where a plan may turn out to fit no more."""
    spec, most = model([40_000] * 8), 0
    for nvme in range(0, 8 * MiB, 16 * KiB):
        try:
            made = solve(Request(spec, Budget(16 * MiB, MiB, nvme), {}, 64 * KiB))
        except BudgetError:
            assert not most, "what fits into less fits into more"
            continue
        most = nvme
        assert made.peak("nvme") <= nvme
    assert most
