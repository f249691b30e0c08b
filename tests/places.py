"""Placements for tests: forced ones with the smallest window there can be, and mixed ones that the solver makes."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill import replanning
from overspill.errors import BudgetError
from overspill.plan.plan import Plan
from overspill.runtime.engine import Engine

PLACES = {
    "device": {"weight": "device", "grad": "device", "state": "device"},
    "host": {"weight": "host", "grad": "host", "state": "host"},
    "nvme": {"weight": "nvme", "grad": "nvme", "state": "nvme"},
    "mixed": {"weight": "host", "grad": "nvme", "state": "host"},
}


def prepare_tight(
    model: nn.Module, optimizer: torch.optim.Optimizer, place: dict[str, str], nvme: Path, **keywords: Any
) -> Any:
    """Prepare with forced homes and no window at all: a unit leaves as soon as another one is needed."""
    keywords = {"precision": "fp32", "nvme": nvme, **keywords}
    made = overspill.plan(model, optimizer, place=place, **keywords)
    made = dataclasses.replace(made, limits=dataclasses.replace(made.limits, window=0))
    return overspill.prepare(model, optimizer, place=made, **keywords)


def mixed_budgets(model: nn.Module, optimizer: torch.optim.Optimizer, nvme: Path, **keywords: Any) -> dict[str, Any]:
    """Budgets with which the solver puts weights on the device, on the host and on nvme."""
    budgets = {"gpu": 1, "host": 2**30, "nvme": nvme, "precision": "fp32", **keywords}
    smallest = smallest_budget(model, optimizer, budgets)
    total = sum(p.nbytes for p in model.parameters())
    for gpu in range(smallest, 3 * smallest + 8 * total, total // 4):
        for host in range(2**18 + total // 8, 2**18 + total, total // 8):
            budgets |= {"gpu": gpu, "host": host}
            placements = overspill.plan(model, optimizer, **budgets).placements
            if {p.weight for p in placements} == {"device", "host", "nvme"}:
                return budgets
    raise AssertionError("no budget gives a plan with weights on every tier")


def smallest_budget(model: nn.Module, optimizer: torch.optim.Optimizer, budgets: dict[str, Any]) -> int:
    """What the refusal of a hopeless budget asks for."""
    try:
        overspill.plan(model, optimizer, **budgets)
    except BudgetError as error:
        return int(re.search(r"\((\d+) bytes\)", str(error))[1])
    raise AssertionError("expected a budget of one byte to be refused")


def peaks_in_force(optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """On the device: that of the plan in force, and of each that comes into force from now on."""
    peaks, come_into_force = [optimizer.report()["plan"].peak("device")], replanning.come_into_force

    def comes(engine: Engine, plan: Plan) -> None:
        peaks.append(plan.peak("device"))
        come_into_force(engine, plan)

    monkeypatch.setattr(replanning, "come_into_force", comes)
    return peaks
