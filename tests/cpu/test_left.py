"""Host memory and disks are taken once: what a later plan moves to the device leaves its room taken, and counted."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill import replanning
from overspill.plan import solver
from overspill.plan.plan import LEFT, Plan
from overspill.runtime.measures import Measures
from overspill.specs import TIERS
from tests import small
from tests.both import adamw
from tests.cpu.test_ahead import of_length
from tests.places import smallest_budget
from tests.reference import weights

ELSEWHERE = TIERS[1:]


def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations are measured, as on a GPU, and take next to nothing; nothing that is longer seems to fit."""
    monkeypatch.setattr(Measures, "sees_activations", True)
    monkeypatch.setattr(Measures, "_peak", lambda self: self._planned.owned + 2**10)
    monkeypatch.setattr(replanning, "MARGIN", 0)
    monkeypatch.setattr(replanning.Replanner, "_fits", lambda self, size, power=2: self._held.plan is self._first)
    monkeypatch.setattr(solver, "PAGE", (1024, 1024))


def prepared(keywords: dict[str, Any]) -> tuple[Any, Any]:
    """With room for more on the device, once activations are known; the budget is put into the keywords."""
    model = small.build(blocks=8)
    gpu = smallest_budget(model, adamw(model), {**keywords, "gpu": 1})
    keywords["gpu"] = gpu + 20 * sum(p.numel() for p in model.parameters())
    return overspill.prepare(model, adamw(model), **keywords)


def trained(model: Any, optimizer: Any, lengths: list[int]) -> list[Plan]:
    """One step with inputs of each length; the plans that were in force."""
    plans = []
    for seed, length in enumerate(lengths):
        of_length(model, length, seed).backward()
        plans.append(optimizer.report()["plan"])
        optimizer.step()
        optimizer.zero_grad()
    return plans


def held(model: Any, tier: Any) -> int:
    """What the tier has taken."""
    found = overspill.api._engine(model).parts.tiers.get(tier)
    return 0 if found is None else found.capacity  # type: ignore[attr-defined]


@pytest.mark.parametrize("host", ["64MiB", "300KiB"], ids=["host", "host and nvme"])
def test_a_later_plan_counts_what_is_held(host: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known(monkeypatch)
    keywords: dict[str, Any] = {"host": host, "nvme": tmp_path, "precision": "fp32"}
    model, optimizer = prepared(keywords)
    first = optimizer.report()["plan"]
    assert (first.peak("nvme") > 0) == (host != "64MiB"), "what is tested here"
    plans = trained(model, optimizer, [4] * 6 + [8] + [8] * 6)
    left = [sum(plan.bytes_of(tier, LEFT) for tier in ELSEWHERE) for plan in plans]
    assert max(left) > left[0] == 0, "nothing moved in"
    assert any(later < earlier for earlier, later in itertools.pairwise(left)), "nothing moved out"
    for plan in plans:
        for tier in ELSEWHERE:
            assert held(model, tier) <= plan.taken(tier) <= plan.peak(tier) == first.peak(tier)
            assert plan.peak(tier) <= getattr(plan.budget, tier)
    last = optimizer.report()["plan"]
    assert LEFT in str(last) and LEFT in last.to_json()
    assert sum(optimizer.report()["bytes"][tier].get(LEFT, 0) for tier in ELSEWHERE if last.peak(tier)) == left[-1] > 0
    overspill.close(model)


@pytest.mark.parametrize("host", ["64MiB", "300KiB"], ids=["host", "host and nvme"])
def test_a_later_plan_is_for_a_model_that_has_nothing_yet_too(
    host: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """place= takes it without what was left: neither the room nor a budget for it is needed."""
    known(monkeypatch)
    keywords: dict[str, Any] = {"host": host, "nvme": tmp_path, "precision": "fp32"}
    model, optimizer = prepared(keywords)
    later = trained(model, optimizer, [4] * 6)[-1]
    expected = weights(overspill.close(model))
    assert any(later.bytes_of(tier, LEFT) for tier in ELSEWHERE)
    needed = {tier: later.peak(tier) - later.bytes_of(tier, LEFT) for tier in ELSEWHERE}
    model = small.build(blocks=8)
    keywords |= {"host": max(1, needed["host"]), "place": later}
    model, optimizer = overspill.prepare(model, adamw(model), **keywords)
    plan = optimizer.report()["plan"]
    assert plan.placements == later.placements and plan.peak("device") == later.peak("device")
    for tier in ELSEWHERE:
        assert not plan.bytes_of(tier, LEFT) and held(model, tier) <= plan.peak(tier) <= needed[tier]
    trained(model, optimizer, [4] * 6)
    found = weights(overspill.close(model))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
