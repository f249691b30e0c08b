"""The same parity on cuda: every placement, delays before every kind of op, copies that take longer than compute."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

import overspill
from overspill.program import Kind
from overspill.specs import MiB
from overspill.tiers.device import GROWTH
from tests import small
from tests.reference import Recipe, differing, train, weights

pytestmark = pytest.mark.gpu

TIERS = ("device", "host", "nvme")
PLACES = [dict(zip(("weight", "grad", "state"), homes, strict=True)) for homes in product(TIERS, repeat=3)]
SPREAD = [PLACES[0], PLACES[13], PLACES[26], {"weight": "host", "grad": "device", "state": "nvme"}]
RECIPE = Recipe(clip=2.5, micro_batches=3)


def name(place: dict[str, str]) -> str:
    return "-".join(place.values())


def on_gpu(batches: Iterator[dict[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    return ({k: v.cuda() for k, v in batch.items()} for batch in batches)


class Wide(nn.Module):
    """Large weights, next to no arithmetic: a missing wait shows."""

    def __init__(self, blocks: int = 8, width: int = 1536) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.head = nn.Linear(width, small.VOCABULARY)
        self.embedding = nn.Embedding(small.VOCABULARY, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def wide() -> Wide:
    torch.manual_seed(0)
    return Wide()


def plain(build, recipe: Recipe):
    model = build().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = train(model, optimizer, on_gpu(small.batches()), recipe, small.loss_of)
    return losses, weights(model)


def spilled(build, recipe: Recipe, delays=None, **keywords):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = overspill.prepare(model, optimizer, precision="fp32", **keywords)
    overspill.api._engine(model).executor.lanes.delays.update(delays or {})
    losses = train(model, optimizer, small.batches(), recipe, small.loss_of)
    got = weights(model)
    overspill.close(model)
    return losses, got


@pytest.mark.parametrize("place", PLACES, ids=name)
def test_every_placement(place: dict[str, str], tmp_path: Path) -> None:
    losses, expected = plain(small.build, RECIPE)
    got_losses, got = spilled(small.build, RECIPE, place=place, nvme=tmp_path)
    assert got_losses == losses
    assert differing(got, expected) == []


@pytest.mark.parametrize("place", SPREAD, ids=name)
@pytest.mark.parametrize("kind", [*Kind, None], ids=str)
def test_delays(kind: Kind | None, place: dict[str, str], tmp_path: Path) -> None:
    recipe = Recipe(steps=4, clip=2.5, micro_batches=2)
    delays = {kind: 0.003} if kind else dict.fromkeys(Kind, 0.002)
    got = spilled(small.build, recipe, delays, place=place, nvme=tmp_path)[1]
    assert differing(got, plain(small.build, recipe)[1]) == []


@pytest.mark.parametrize("place", SPREAD, ids=name)
def test_copies_that_take_longer_than_compute(place: dict[str, str], tmp_path: Path) -> None:
    recipe = Recipe(steps=6, clip=1.0, micro_batches=2)
    losses, expected = plain(wide, recipe)
    got_losses, got = spilled(wide, recipe, place=place, nvme=tmp_path)
    assert got_losses == losses
    assert differing(got, expected) == []


@pytest.mark.parametrize("kind", [Kind.FETCH, Kind.STORE, Kind.STATE_FETCH, Kind.STATE_STORE, Kind.GRAD_STORE, None])
def test_copies_that_take_longer_than_compute_with_delays(kind: Kind | None, tmp_path: Path) -> None:
    recipe = Recipe(steps=4, clip=1.0, micro_batches=2)
    delays = {kind: 0.01} if kind else dict.fromkeys(Kind, 0.003)
    place = {"weight": "host", "grad": "host", "state": "host"}
    assert differing(spilled(wide, recipe, delays, place=place)[1], plain(wide, recipe)[1]) == []


@pytest.mark.parametrize("budget", ["112MiB", "160MiB", "256MiB", "auto"])
def test_reserved_memory_stays_within_the_plan(budget: str) -> None:
    recipe = Recipe(steps=5, clip=1.0, micro_batches=2)
    expected = plain(wide, recipe)[1]
    torch.cuda.empty_cache()
    base = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    model = wide()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = overspill.prepare(model, optimizer, precision="fp32", gpu=budget, micro_batches=2)
    train(model, optimizer, small.batches(), recipe, small.loss_of)
    plan = optimizer.report()["plan"]
    peak = torch.cuda.max_memory_reserved() - base
    assert peak <= plan.peak("device") <= plan.budget.device, f"{peak} {plan}"
    assert differing(weights(overspill.close(model)), expected) == []


@pytest.mark.parametrize("asked", [11 * MiB, 33 * MiB, 47 * MiB])
def test_torch_reserves_no_more_than_the_budget(asked: int) -> None:
    """Sizes that its segments do not grow by."""
    torch.cuda.empty_cache()
    base, model = torch.cuda.memory_reserved(), wide()
    model, _ = overspill.prepare(model, torch.optim.AdamW(model.parameters()), precision="fp32", gpu="2GiB")
    kept = []
    with pytest.raises(torch.OutOfMemoryError):
        while True:
            kept.append(torch.empty(asked, dtype=torch.uint8, device="cuda"))
    assert torch.cuda.max_memory_reserved() - base <= 2048 * MiB
    del kept
    overspill.close(model)


def test_a_model_moves_in_beside_one_that_has_filled_its_budget() -> None:
    recipe = Recipe(steps=4, clip=1.0)
    expected = plain(wide, recipe)[1]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base, budget, place = torch.cuda.memory_reserved(), 256 * MiB, {"state": "host"}
    prepared, kept = [], []
    for _ in range(2):
        model = wide()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        prepared.append(overspill.prepare(model, optimizer, precision="fp32", gpu=budget, place=place))
        with pytest.raises(torch.OutOfMemoryError):
            while True:
                kept.append(torch.empty(8 * MiB, dtype=torch.uint8, device="cuda"))
    kept.clear()
    assert torch.cuda.max_memory_reserved() - base <= 2 * (budget + GROWTH)
    for model, optimizer in prepared:
        train(model, optimizer, small.batches(), recipe, small.loss_of)
    for model, _ in prepared:
        assert differing(weights(overspill.close(model)), expected) == []


@pytest.mark.parametrize("kind", [Kind.PAGE_GRADS, Kind.UPDATE, None])
def test_zeroed_gradients_and_skipped_blocks(kind: Kind | None) -> None:
    delays = {kind: 0.003} if kind else {}

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        stream = on_gpu(small.batches())
        for step in range(6):
            batch = next(stream)
            logits = model(batch["tokens"], skip=step % 4)
            nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return weights(model)

    plain_model = small.build().cuda()
    expected = loop(plain_model, torch.optim.AdamW(plain_model.parameters(), lr=1e-3))
    model = small.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    place = dict.fromkeys(("weight", "grad", "state"), "host")
    model, optimizer = overspill.prepare(model, optimizer, precision="fp32", place=place)
    overspill.api._engine(model).executor.lanes.delays.update(delays)
    assert differing(loop(model, optimizer), expected) == []
    overspill.close(model)


@pytest.mark.parametrize("place", SPREAD, ids=name)
def test_states_that_are_loaded_and_read_at_once(place: dict[str, str], tmp_path: Path) -> None:
    plain_model = wide().cuda()
    own = torch.optim.AdamW(plain_model.parameters(), lr=1e-3)
    train(plain_model, own, on_gpu(small.batches()), Recipe(steps=2), small.loss_of)
    saved = own.state_dict()
    model = wide()
    model, optimizer = overspill.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), precision="fp32", place=place, nvme=tmp_path
    )
    optimizer.load_state_dict(saved)
    got = optimizer.state_dict()["state"]
    for index, state in saved["state"].items():
        assert all(torch.equal(value.cpu(), got[index][key].cpu()) for key, value in state.items())
    model.load_state_dict(plain_model.state_dict())
    losses = train(model, optimizer, small.batches(9), Recipe(steps=2), small.loss_of)
    assert losses == train(plain_model, own, on_gpu(small.batches(9)), Recipe(steps=2), small.loss_of)
    overspill.close(model)


def test_evaluation_in_inference_mode_right_after_a_step() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        stream, seen = on_gpu(small.batches()), []
        for _ in range(4):
            batch = next(stream)
            small.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.inference_mode():
                seen.append(model(batch["tokens"]).cpu())
        return seen

    plain_model = small.build().cuda()
    expected = loop(plain_model, torch.optim.AdamW(plain_model.parameters(), lr=1e-3))
    model = small.build()
    place = dict.fromkeys(("weight", "grad", "state"), "host")
    model, optimizer = overspill.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), precision="fp32", place=place
    )
    assert all(torch.equal(a, b) for a, b in zip(loop(model, optimizer), expected, strict=True))
    assert overspill.close(model).shift.device.type == "cpu", "buffers come back with the weights"


def test_import_starts_no_context() -> None:
    import subprocess
    import sys

    code = "import torch, overspill; assert not torch.cuda.is_initialized()"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
