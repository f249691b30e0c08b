"""Stock Transformers models on cuda: the bits of the plain loop, with every unit leaving as soon as it may."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import overspill
from tests.places import PLACES, mixed_budgets, prepare_tight
from tests.reference import Recipe, differing, train, weights
from tests.zoo import ZOO, Batch, loss_of

pytestmark = pytest.mark.gpu

NAMES = ["gpt2", "llama", "qwen2", "bert", "albert", "t5", "vit", "swin", "mixtral", "clip"]
RECIPE = Recipe(steps=20, micro_batches=3, clip=1.0)


def built(name: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = ZOO[name].build()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def on_gpu(batches: Iterator[Batch]) -> Iterator[Batch]:
    return ({k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in batch.items()} for batch in batches)


def recompute(model: torch.nn.Module, reentrant: bool | None) -> None:
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def plain(name: str, reentrant: bool | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, _ = built(name)
    model.cuda()
    recompute(model, reentrant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = train(model, optimizer, on_gpu(ZOO[name].batches()), RECIPE, loss_of)
    return losses, weights(model)


def check(name: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, reentrant: bool | None = None) -> None:
    recompute(model, reentrant)
    got_losses = train(model, optimizer, ZOO[name].batches(), RECIPE, loss_of)
    got = weights(overspill.close(model))
    losses, expected = plain(name, reentrant)
    assert got_losses == losses
    assert differing(got, expected) == []


@pytest.mark.parametrize("place", ["host", "mixed"])
@pytest.mark.parametrize("name", NAMES)
def test_forced_homes(name: str, place: str, tmp_path: Path) -> None:
    check(name, *prepare_tight(*built(name), PLACES[place], tmp_path))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_recompute(name: str, reentrant: bool, tmp_path: Path) -> None:
    check(name, *prepare_tight(*built(name), PLACES["mixed"], tmp_path), reentrant)


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_a_solved_plan_with_weights_on_every_tier(name: str, tmp_path: Path) -> None:
    model, optimizer = built(name)
    model, optimizer = overspill.prepare(model, optimizer, **mixed_budgets(model, optimizer, tmp_path))
    held = overspill.api._engine(model).parts.held
    assert held is not None
    # The budget is less than what torch's allocator takes at a time.
    held.lift()
    check(name, model, optimizer)


@pytest.mark.parametrize("name", ["gpt2", "t5", "mixtral", "vit"])
def test_reserved_memory_is_within_the_plan(name: str, tmp_path: Path) -> None:
    """The allocator takes 2 and 20 MiB at a time, so the budget is far above what models this small need."""
    model, optimizer = built(name)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_reserved()
    budgets = {"gpu": "96MiB", "place": PLACES["mixed"], "nvme": tmp_path, "precision": "fp32"}
    model, optimizer = overspill.prepare(model, optimizer, **budgets)
    train(model, optimizer, ZOO[name].batches(), RECIPE, loss_of)
    plan = optimizer.report()["plan"]
    assert torch.cuda.max_memory_reserved() - base <= plan.peak("device") <= plan.budget.device
    overspill.close(model)
    assert list(tmp_path.iterdir()) == []
