"""Stock Transformers models in bf16: the same bits wherever their bytes live, and every step that of torch's optimizer
up to 2 ulp of max(|p|, |update|)."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from tests.judge import Judge
from tests.places import PLACES, mixed_budgets, prepare_tight
from tests.reference import Recipe, differing, train, weights
from tests.zoo import ALL, EVERYWHERE, ZOO, loss_of

MICRO_BATCHES = 2
REPRESENTATIVES = ["gpt2", "t5", "resnet", "whisper", "mixtral", "mamba", "clip"]
FEW = ["gpt2", "mixtral"]
PRECISION = {"precision": "bf16", "micro_batches": MICRO_BATCHES}

every = pytest.mark.parametrize(
    "name", [a.name if a.name in REPRESENTATIVES else pytest.param(a.name, marks=pytest.mark.full) for a in ALL]
)


def built(name: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = ZOO[name].build()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def recipe(name: str) -> Recipe:
    """More steps for some, fewer for the other hundred, on five placements each."""
    return Recipe(8 if name in REPRESENTATIVES else 5, MICRO_BATCHES, clip=1.0)


def trained(name: str, model: torch.nn.Module, optimizer: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = train(model, optimizer, ZOO[name].batches(), recipe(name), loss_of)
    assert all(loss == loss for loss in losses), "a loss is NaN"
    return losses, weights(overspill.close(model))


@functools.cache
def on_device(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    return trained(name, *overspill.prepare(*built(name), place=PLACES["device"], **PRECISION))


def check(name: str, model: torch.nn.Module, optimizer: Any) -> None:
    losses, expected = on_device(name)
    found_losses, found = trained(name, model, optimizer)
    assert found_losses == losses
    assert differing(found, expected) == []


@every
def test_a_mixed_placement_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    check(name, *prepare_tight(*built(name), PLACES["mixed"], tmp_path, **PRECISION))


@pytest.mark.full
@pytest.mark.parametrize("place", ["host", "nvme"])
@pytest.mark.parametrize("name", [a.name for a in EVERYWHERE])
def test_forced_homes_give_the_same_bits(name: str, place: str, tmp_path: Path) -> None:
    check(name, *prepare_tight(*built(name), PLACES[place], tmp_path, **PRECISION))


@pytest.mark.parametrize(
    # The others are on one in fp32.
    "name",
    [*FEW, *(pytest.param(a.name, marks=pytest.mark.full) for a in EVERYWHERE[1::2] if a.name not in FEW)],
)
def test_a_solved_plan_with_weights_on_every_tier_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    model, optimizer = built(name)
    check(name, *overspill.prepare(model, optimizer, **mixed_budgets(model, optimizer, tmp_path, **PRECISION)))


@every
def test_every_step_is_within_two_ulp_of_torchs(name: str) -> None:
    model, optimizer = overspill.prepare(*built(name), place=PLACES["device"], **PRECISION)
    judge = Judge(model, optimizer)
    train(model, judge, ZOO[name].batches(), Recipe(4, 2, clip=1.0), loss_of)
    assert judge.steps == 4
