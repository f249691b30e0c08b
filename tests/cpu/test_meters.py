"""What `overspill train` says that a run took of memory, without a GPU."""

import mmap
from pathlib import Path

import pytest
import torch

from overspill.cli import meters, screen
from overspill.report.run import Record
from overspill.specs import MiB

CPU, SIZE = torch.device("cpu"), 64 * MiB


def meter() -> meters.Meter:
    return meters.Meter(CPU, host=0, nvme=(), zero=meters.Zero(meters.resident_bytes(), 0))


def test_memory_counts_and_what_is_mapped_of_files_does_not(tmp_path: Path) -> None:
    path = tmp_path / "library"
    path.write_bytes(bytes(SIZE))
    found = meter()
    found.start()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[i] for i in range(0, SIZE, mmap.PAGESIZE)) == 0
        assert found.read()["device"] < SIZE // 4
    held = torch.ones(SIZE, dtype=torch.uint8)
    # What earlier tests in this process took may go back meanwhile.
    assert 3 * SIZE // 4 <= found.read()["device"] < 5 * SIZE // 4
    del held


@pytest.mark.parametrize("precision", meters.DTYPES)
def test_the_warm_up_is_of_the_runs_precision(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, steps = set(), meters.train_steps
    monkeypatch.setattr(
        meters,
        "train_steps",
        lambda trainee, *rest: seen.update(p.dtype for p in trainee.model.parameters()) or steps(trainee, *rest),
    )
    assert meters.zero_point(CPU, (), precision).resident > 0
    assert seen == {meters.DTYPES[precision]}


@pytest.mark.parametrize(("device", "told"), [("cpu", True), ("cuda", False)])
@pytest.mark.parametrize("taken", [5, 6])
def test_a_device_above_the_plan_is_explained(
    device: str, told: bool, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "compute_device", lambda: torch.device(device))
    tiers = {"device": 5 * MiB, "host": MiB, "nvme": 0}
    record = Record(1, 2.0, 0.1, None, 1.0, 10.0, moved={}, bytes={**tiers, "device": taken * MiB})
    text = screen.summary([record], {"peak": tiers, "budget": tiers, "settings": {"ranks": 1}}, 0)
    assert ("1.00 MiB above the plan" in text) == (taken == 6)
    assert (screen.ABOVE in text) == (told and taken == 6)


def test_a_resumed_run_is_compared_with_its_own_plan() -> None:
    """The steps before it had another one."""
    tiers = {"device": 100, "host": 0, "nvme": 0}
    plan = {"peak": tiers, "budget": tiers, "settings": {"ranks": 1}}
    records = [Record(step, 2.0, 0.1, None, 1.0, 10.0, {}, {"device": taken}) for step, taken in ((1, 900), (2, 50))]
    assert "800 B above the plan" in screen.summary(records, plan, 0)
    assert "above the plan" not in screen.summary(records, plan, 0, earlier=1)
    assert "no step was left to do: to train on, give more --steps" in screen.summary(records, plan, 0, earlier=2)
