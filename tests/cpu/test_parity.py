"""Moving bytes changes no bit: the small model on every placement of every role."""

from itertools import product
from pathlib import Path

import pytest
import torch

import overspill
from overspill.program import Kind
from tests import small
from tests.reference import Recipe, differing, train, weights

TIERS = ("device", "host", "nvme")
PLACES = [dict(zip(("weight", "grad", "state"), homes, strict=True)) for homes in product(TIERS, repeat=3)]
SPREAD = [PLACES[0], PLACES[26], {"weight": "host", "grad": "device", "state": "nvme"}]
SPREAD += [pytest.param(PLACES[13], marks=pytest.mark.full)]


def name(place: dict[str, str]) -> str:
    return "-".join(place.values())


def plain(recipe: Recipe, optimizer=torch.optim.AdamW, **keywords):
    model = small.build()
    steps = optimizer(model.parameters(), **{"lr": 1e-2, **keywords})
    losses = train(model, steps, small.batches(), recipe, small.loss_of)
    return losses, weights(model)


def spilled(recipe: Recipe, place: dict[str, str], nvme: Path, delays=None):
    model = small.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = overspill.prepare(model, optimizer, precision="fp32", place=place, nvme=nvme)
    overspill.api._engine(model).executor.lanes.delays.update(delays or {})
    losses = train(model, optimizer, small.batches(), recipe, small.loss_of)
    return losses, weights(model)


@pytest.mark.parametrize("place", PLACES, ids=name)
def test_every_placement_gives_the_bits_of_the_plain_loop(place: dict[str, str], tmp_path: Path) -> None:
    recipe = Recipe(clip=2.5, micro_batches=3)
    losses, expected = plain(recipe)
    got_losses, got = spilled(recipe, place, tmp_path)
    assert got_losses == losses
    assert differing(got, expected) == []


@pytest.mark.parametrize("place", SPREAD, ids=name)
@pytest.mark.parametrize("kind", [*Kind, None], ids=str)
def test_a_delay_before_any_kind_of_op_changes_no_bit(kind: Kind | None, place: dict[str, str], tmp_path: Path) -> None:
    recipe = Recipe(steps=4, clip=2.5, micro_batches=2)
    delays = {kind: 0.003} if kind else dict.fromkeys(Kind, 0.002)
    assert differing(spilled(recipe, place, tmp_path, delays)[1], plain(recipe)[1]) == []


def test_clipping_acts_on_some_steps_only() -> None:
    """Else the tests above would not show that both cases are right."""
    model = small.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    acted = []
    stream = small.batches()
    for _ in range(20):
        for _ in range(3):
            (small.loss_of(model, next(stream)) / 3).backward()
        acted.append(bool(torch.nn.utils.clip_grad_norm_(model.parameters(), 2.5) > 2.5))
        optimizer.step()
        optimizer.zero_grad()
    assert True in acted and False in acted
