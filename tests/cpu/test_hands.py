"""Who updates states in host memory: what a plan chooses for a machine, and how it says so."""

import json
from pathlib import Path
from typing import Any

import pytest

import overspill
from overspill.kernels import cpu
from overspill.plan.hands import Chosen, Sizes, Speeds, choose, executor
from overspill.runtime import parts
from overspill.specs import Hands, Placement
from overspill.tiers import known
from tests.cpu.test_ahead import prepare

EXACT, COMPACT = Sizes(10.0, 2.0, 2.0), Sizes(3.02, 2.0, 2.0)
LARGE = Speeds(98e9, 100e9, 5e9)
"""A GPU on a wide link, which takes all that the memory gives."""
DESKTOP = Speeds(44e9, 70e9, 2.5e9)
LAPTOP = Speeds(6e9, 50e9, 1.6e9)


@pytest.mark.parametrize(
    ("speeds", "sizes", "hands"),
    [
        (LARGE, EXACT, "link"),
        (LARGE, COMPACT, "link"),
        (DESKTOP, EXACT, "both"),
        (DESKTOP, COMPACT, "link"),
        (LAPTOP, EXACT, "cores"),
        (None, EXACT, "link"),
        (LAPTOP, None, "link"),
    ],
)
def test_the_link_the_cores_or_both(speeds: Speeds | None, sizes: Sizes | None, hands: Hands) -> None:
    assert choose(speeds, sizes).hands == hands


def test_what_is_promised_keeps_to_link_and_memory() -> None:
    """By hand: half of 44 GB/s down, 4 bytes for each element of the cores and 10 for the others; 70 GB/s of memory, 32
    and 20. Both are full at 1.083 G/s by the cores and 1.767 over the link."""
    why = choose(DESKTOP, EXACT).why
    assert why == "2.2 G elements/s over the link, 2.8 with the host's cores", why


def test_nothing_measured_says_how_to() -> None:
    assert "overspill probe" in choose(None, EXACT).why and choose(LAPTOP, None) == Chosen("link", "")


def test_every_unit_has_its_executor() -> None:
    host, away = Placement("device", "device", "host"), Placement("device", "host", "host")
    names = [executor(host, hands) for hands in ("link", "both", "cores")]
    assert names == ["streamed", "split", "host"]
    assert executor(away, "both") == "streamed" and executor(Placement("host", "host", "device"), "cores") == "device"


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine of which these rates are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(parts, "PAGED", {"cpu"})
    monkeypatch.setattr(parts, "CORES", {"cpu"})

    def keep(**rates: float | None) -> None:
        path = known.cache()
        path.parent.mkdir(parents=True, exist_ok=True)
        entry = {"date": "2026-11-16", "rates": rates, "disks": {}}
        path.write_text(json.dumps({known.machine_key(): entry}))

    return keep


@pytest.mark.skipif(cpu.library() is None, reason="no native library")
def test_a_plan_goes_by_what_was_measured(measured: Any, tmp_path: Path) -> None:
    def planned() -> Any:
        model, optimizer = prepare("states", tmp_path)
        plan = optimizer.report()["plan"]
        overspill.close(model)
        return plan

    assert planned().limits.hands == "link" and "overspill probe" in str(planned())
    measured(both=44e9, dram=70e9, cores=2.5e9, unknown=1.0)
    plan = planned()
    assert plan.limits.hands == "both" and "G elements/s over the link" in str(plan)
    units = json.loads(plan.to_json())["units"]
    assert {unit["update"] for unit in units} == {"split"}
    measured(both=6e9, dram=50e9, cores=1.6e9)
    assert planned().limits.hands == "cores"
    measured(both=44e9, dram=70e9)
    assert planned().limits.hands == "link", "measured by a version that did not look at the cores"


def test_what_the_cores_cannot_update_is_not_talked_of(measured: Any, tmp_path: Path) -> None:
    measured(both=6e9, dram=50e9, cores=1.6e9)
    for keywords in ({"precision": "fp32"}, {"kernels": "torch"}):
        model, optimizer = prepare("states", tmp_path, **keywords)
        plan = optimizer.report()["plan"]
        assert plan.limits.hands == "link" and not plan.why
        overspill.close(model)
