"""Who updates states in host memory: what a plan chooses for a machine, and how it says so."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import overspill
from overspill import cgroups
from overspill import measured as measuring
from overspill.kernels import cpu, executors
from overspill.kernels.reference import ieee_root
from overspill.plan import hands, sharing
from overspill.plan.hands import UNKNOWN, Chosen, Sizes, Speeds, choose, hands_of
from overspill.plan.solver import LEAN
from overspill.runtime import parts
from overspill.specs import Hands, Placement
from overspill.tiers import known
from tests import small
from tests.both import adamw
from tests.cpu.test_ahead import crowded, of_lengths, prepare
from tests.places import smallest_budget

EXACT, COMPACT = Sizes(10.0, 2.0, 2.0), Sizes(3.02, 2.0, 2.0)
OFFLOAD, SMALL = Sizes(10.0, 2.0, 0.0, 2.0), Sizes(3.02, 2.0, 0.0, 2.0)
"""With gradients in host memory, as ZeRO-Offload has them."""
SUMMED = Sizes(10.0, 2.0, 0.0, 4.0)
"""And of several backward passes."""
LARGE = Speeds(100.68e9, 79.47e9, 4.62e9)
"""An H200 and 16 cores, as `overspill probe` found them: the link takes all that the memory gives."""
DESKTOP = Speeds(44e9, 70e9, 2.5e9)
LAPTOP = Speeds(6e9, 50e9, 1.6e9)
PCIE3 = Speeds(24e9, 120e9, 3e9)
"""12 GB/s each way, a server's memory and cores."""


@pytest.mark.parametrize(
    ("speeds", "sizes", "hands"),
    [
        (LARGE, EXACT, "streamed"),
        (LARGE, COMPACT, "streamed"),
        (DESKTOP, EXACT, "split"),
        (DESKTOP, COMPACT, "streamed"),
        (LAPTOP, EXACT, "host"),
        (LARGE, OFFLOAD, "streamed"),
        (LARGE, SUMMED, "streamed"),
        (LARGE, SMALL, "streamed"),
        (DESKTOP, OFFLOAD, "split"),
        (DESKTOP, SMALL, "split"),
        (LAPTOP, OFFLOAD, "host"),
        (PCIE3, EXACT, "host"),
        (PCIE3, OFFLOAD, "split"),
        (PCIE3, SUMMED, "split"),
        (PCIE3, SMALL, "split"),
        (UNKNOWN, EXACT, "streamed"),
        (Speeds(0.0, 50e9, 1e9), EXACT, "streamed"),
    ],
)
def test_the_link_the_cores_or_both(speeds: Speeds, sizes: Sizes, hands: Hands) -> None:
    assert choose(speeds, sizes).hands == hands


def test_what_is_promised_keeps_to_link_and_memory() -> None:
    """By hand: half of 44 GB/s down, 4 bytes for each element of the cores and 10 for the others; 70 GB/s of memory, 32
    and 20. Both are full at 1.083 G/s by the cores and 1.767 over the link."""
    why = choose(DESKTOP, EXACT).why
    assert why == "2.2 G elements/s over the link, 2.9 with the host's cores", why


def test_gradients_in_host_memory_go_up_or_nowhere() -> None:
    """By hand: 12 GB/s up, 12 bytes for each element of the GPU and 2 for the cores', which do 3 G/s: 1.0 alone, and
    0.5 + 3.0 together, of memory 22 * 0.5 + 30 * 3 = 101 of 120 GB/s. With gradients on the device 4 bytes go down for
    an element of the cores, and none of the way is left: 3.0."""
    assert choose(PCIE3, OFFLOAD).why == "1.0 G elements/s over the link, 3.5 with the host's cores"
    assert choose(PCIE3, EXACT).why == "1.2 G elements/s over the link, 3.0 with the host's cores"


@pytest.mark.parametrize("sizes", [EXACT, COMPACT, OFFLOAD, SMALL, SUMMED, Sizes(10.0, 2.0, 1.0, 1.0)])
@pytest.mark.parametrize("speeds", [LARGE, DESKTOP, LAPTOP, PCIE3, Speeds(20e9, 300e9, 1e9), Speeds(200e9, 90e9, 9e9)])
def test_nothing_between_the_corners_is_better(speeds: Speeds, sizes: Sizes) -> None:
    best = max(map(sum, hands._corners(speeds, sizes)))
    most = min(speeds.cores, *(bound.there / bound.cores for bound in hands._bounds(speeds, sizes)))
    tried = [sum(hands._by_link(speeds, sizes, most * i / 1000)) for i in range(1001)]
    assert max(tried) <= best * (1 + 1e-9) and max(tried) >= best * 0.99


def test_nothing_measured_says_how_to() -> None:
    assert "overspill probe" in choose(UNKNOWN, EXACT).why


def test_every_unit_has_its_executor() -> None:
    for host in (Placement("device", "device", "host"), Placement("device", "host", "host"), LEAN):
        assert [hands_of(host, each) for each in ("streamed", "split", "host")] == ["streamed", "split", "host"]
    for disk in (Placement("host", "host", "nvme"), Placement("host", "nvme", "host")):
        assert hands_of(disk, "split") == "streamed"
    assert hands_of(Placement("host", "host", "device"), "host") == "device"


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine of which these rates are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(parts, "PAGED", {"cpu"})
    monkeypatch.setattr(parts, "CORES", {"cpu"})
    # However many there are here.
    monkeypatch.setattr(measuring, "cores_used", lambda threads: cgroups.cores())

    def keep(**rates: float | None) -> None:
        path = known.cache()
        path.parent.mkdir(parents=True, exist_ok=True)
        entry = {"date": "2026-11-16", "rates": rates, "disks": {}}
        path.write_text(json.dumps({known.machine_key(): entry}))

    return keep


def planned(place: str = "states", **keywords: Any) -> Any:
    model, optimizer = prepare(place, Path(), **keywords)
    plan = optimizer.report()["plan"]
    overspill.close(model)
    return plan


@pytest.mark.skipif(cpu.library() is None, reason="no native library")
def test_a_plan_goes_by_what_was_measured(measured: Any) -> None:
    assert planned().limits.hands == "streamed" and "overspill probe" in str(planned())
    measured(both=44e9, dram=70e9, cores=2.5e9, unknown=1.0)
    plan = planned()
    assert plan.limits.hands == "split" and "G elements/s over the link" in str(plan)
    units = json.loads(plan.to_json())["units"]
    assert {unit["update"] for unit in units} == {"split"}
    assert "at most" in str(plan)
    measured(both=6e9, dram=50e9, cores=1.6e9)
    assert planned().limits.hands == "host"
    measured(both=44e9, dram=70e9)
    assert planned().limits.hands == "streamed", "measured by a version that did not look at the cores"


@pytest.mark.skipif(cpu.library() is None, reason="no native library")
def test_a_plan_says_which_units_who_updates(measured: Any) -> None:
    """With gradients in host memory; and beside such units others that live elsewhere."""
    measured(both=6e9, dram=90e9, cores=1.6e9)
    plan = planned("offload")
    assert plan.limits.hands == "host" and "gradients host, states host, updated by the host's cores" in str(plan)
    assert "G elements/s over the link" in plan.why and f"updates of states on host: {plan.why}" in str(plan)
    away = planned("host")
    said = "weights host, gradients host, states host, updated by the host's cores"
    assert away.limits.hands == "host" and said in str(away)
    homes = (Placement("device", "host", "device"), Placement("device", "host", "nvme"), *plan.placements[2:])
    text = str(mixed := dataclasses.replace(plan, placements=homes)).splitlines()
    assert any("gradients host, states device, updated there" in line for line in text)
    assert any("gradients host, states nvme, updated by the device as they pass" in line for line in text)
    assert any("gradients host, states host, updated by the host's cores" in line for line in text)
    units = json.loads(mixed.to_json())["units"]
    assert [unit["update"] for unit in units] == ["device", "streamed", *("host" for _ in homes[2:])]


@pytest.mark.skipif(cpu.library() is None, reason="no native library")
@pytest.mark.parametrize("place", ["states", "offload"])
def test_what_moves_over_ranks_is_their_own_part(place: str, measured: Any) -> None:
    """Where the cores update, only what this rank updates goes up and down."""
    measured(both=6e9, dram=4 * 90e9, cores=1.6e9)
    model = small.build()
    homes = {"weight": "device", "grad": "host" if place == "offload" else "device", "state": "host"}
    asked = {"place": homes, "precision": "bf16", "gpu": "64MiB", "host": "64MiB", "world": 4, "zero": 1}
    plan = overspill.plan(model, adamw(model), **asked)
    parts = [(part, unit.params[part.param]) for unit in plan.model.units for page in unit.pages for part in page.parts]
    own = sum(part.numel * spec.dtype.itemsize for part, spec in parts)
    assert plan.limits.hands == "host" and 0 < 3 * own < sum(2 * p.numel() for p in model.parameters())
    alone = overspill.plan(model, adamw(model), **{**asked, "place": dict.fromkeys(homes, "device")})
    assert plan.moved["up"] - alone.moved.get("up", 0) == own


@pytest.mark.skipif(cpu.library() is None, reason="no native library")
def test_slow_and_fast_links(measured: Any) -> None:
    """12 GB/s each way, and the machine of benchmarks/."""
    measured(both=24e9, dram=120e9, cores=3e9)
    assert planned("offload").limits.hands == planned().limits.hands == "split"
    measured(both=100.68e9, dram=79.47e9, cores=4.62e9)
    assert planned("offload").limits.hands == planned().limits.hands == "streamed"


def test_what_the_cores_cannot_update_is_not_talked_of(measured: Any, tmp_path: Path) -> None:
    measured(both=6e9, dram=50e9, cores=1.6e9)
    for place, keywords in (
        ("states", {"precision": "fp32"}),
        ("states", {"precision": "fp16"}),
        ("states", {"kernels": "torch"}),
        ("nvme", {}),
        ("device", {}),
    ):
        model, optimizer = prepare(place, tmp_path, **keywords)
        plan = optimizer.report()["plan"]
        assert plan.limits.hands == "streamed" and not plan.why and not plan.bytes_of("host", "updates on cores")
        overspill.close(model)


@pytest.mark.skipif(cpu.library() is None, reason="no native library")
@pytest.mark.parametrize("room", [8, 20])
def test_who_updates_stays_when_homes_change(room: int, measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are on the host at first move to the device; the cores are there from the beginning, and plans go
    by the same rates, whatever is measured meanwhile."""
    monkeypatch.setattr(executors, "torch_root", ieee_root)

    def trained() -> tuple[Any, list[float], set[Any], int]:
        model, optimizer = crowded(room, monkeypatch)
        first = optimizer.report()["plan"]
        cores, plans = overspill.api._engine(model).executor.pager.cores, []
        found = [*of_lengths(model, optimizer, plans, [[5]] * 3)]
        if cores is not None:
            measured(both=6e9, dram=50e9, cores=1.6e9)
        found += of_lengths(model, optimizer, plans, [[5]] * 9)
        plan = optimizer.report()["plan"]
        assert (plan.speeds, plan.limits.hands) == (first.speeds, first.limits.hands)
        overspill.close(model)
        return plan, found, set(plans), 0 if cores is None else cores.elements

    measured(both=44e9, dram=70e9, cores=2.5e9)
    plan, losses, plans, updated = trained()
    assert len(plans) > 1 and plan.limits.hands == "split" and updated > 0
    assert plan.bytes_of("host", "updates on cores") > 0
    measured()
    alone, expected, _, none = trained()
    assert losses == expected and alone.limits.hands == "streamed" and not none


@pytest.mark.skipif(cpu.library() is None, reason="no native library")
def test_when_homes_change_others_may_update(measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While gradients are on the host the cores pay, and when they are on the device they do not."""
    monkeypatch.setattr(executors, "torch_root", ieee_root)
    chosen: list[Sizes] = []

    def told(speeds: Speeds, sizes: Sizes) -> Chosen:
        chosen.append(sizes)
        return Chosen("host" if sizes.at_home > sizes.gradient else "streamed", "as told")

    def trained() -> tuple[Any, list[float], int, int]:
        model, optimizer = crowded(12, monkeypatch)
        cores = overspill.api._engine(model).executor.pager.cores
        before = [*of_lengths(model, optimizer, [], [[5]] * 4)]
        half = 0 if cores is None else cores.elements
        found = [*before, *of_lengths(model, optimizer, [], [[5]] * 8)]
        plan = optimizer.report()["plan"]
        overspill.close(model)
        return plan, found, half, 0 if cores is None else cores.elements

    monkeypatch.setattr(sharing, "choose", told)
    measured()
    plan, losses, early, whole = trained()
    assert chosen[0].at_home > chosen[-1].at_home == 0, "gradients moved in"
    assert plan.limits.hands == "streamed" and plan.bytes_of("host", "updates on cores") > 0
    assert 0 < early == whole
    monkeypatch.setattr(sharing, "choose", choose)
    _, expected, *_ = trained()
    assert losses == expected


def test_one_slot_is_too_few_to_share(measured: Any) -> None:
    measured(both=44e9, dram=70e9, cores=2.5e9)
    model = small.build()
    gpu = smallest_budget(model, adamw(model), {"gpu": 1, "host": "64MiB"})
    plan = overspill.plan(model, adamw(model), gpu=gpu, host="64MiB")
    assert plan.limits.depth == 1 and plan.limits.hands == "streamed" and not plan.bytes_of("host", "updates on cores")


@pytest.mark.skipif(cpu.library() is None, reason="no native library")
def test_the_cores_are_as_fast_as_they_were_with_states_of_that_format(measured: Any) -> None:
    """Norms and embeddings are exact beside states in bf16, and each counts as much as there is of it."""
    model = small.build()
    spec = overspill.plan(model, adamw(model), precision="bf16", states="bf16", gpu="64MiB", host="64MiB").model
    counts = Counter({"exact": 0, "bf16": 0})
    for page in (page for unit in spec.units for page in unit.pages):
        counts[page.format.name] += sum(part.numel for part in page.parts)
    assert min(counts.values()) > 0
    expected = sum(counts.values()) / (counts["exact"] / 2e9 + counts["bf16"] / 1e9)
    assert hands.rate_of_cores(spec, {"exact": 2e9, "bf16": 1e9}) == pytest.approx(expected)
    assert hands.rate_of_cores(spec, {"exact": 2e9, "bf16": None}) is None
    measured(both=6e9, dram=50e9, cores=1.6e9)
    assert planned(states="bf16").limits.hands == "streamed", "not measured"
    measured(both=6e9, dram=50e9, cores=1.6e9, cores_bf16=1.6e9)
    assert planned(states="bf16").limits.hands == "host"
    measured(both=6e9, dram=50e9, cores=1.6e9, cores_bf16=1e7)
    assert planned(states="bf16").limits.hands == "streamed", "far slower than the link"
