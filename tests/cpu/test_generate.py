"""A model that is being trained writes the same text as a plain one, wherever its weights live."""

import functools
from pathlib import Path

import pytest
import torch
from torch import Generator, Tensor, nn

import overspill
from tests.places import PLACES, prepare_tight
from tests.reference import Recipe, differing, train, weights
from tests.zoo import ALL, ZOO, loss_of

GENERATING = [a.name for a in ALL if a.generates]
REPRESENTATIVES = ["gpt2", "t5", "whisper", "mixtral", "mamba", "blip"]
RECIPE = Recipe(steps=2)


def built(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = ZOO[name].build()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def written(name: str, model: nn.Module) -> Tensor:
    """Six new tokens for each row of the prompt, always the likeliest."""
    prompt = ZOO[name].prompt(Generator().manual_seed(5))
    with torch.no_grad():
        return model.eval().generate(**prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False)


def run(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Tensor, list[float]]:
    """What the model writes between two stretches of training, and the losses of the second."""
    batches = ZOO[name].batches()
    train(model, optimizer, batches, RECIPE, loss_of)
    text = written(name, model)
    return text, train(model.train(), optimizer, batches, RECIPE, loss_of)


@functools.cache
def plain(name: str) -> tuple[Tensor, list[float], dict[str, Tensor]]:
    model, optimizer = built(name)
    text, losses = run(name, model, optimizer)
    return text, losses, weights(model)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *((name, place) for name in REPRESENTATIVES for place in ("host", "nvme")),
        *(pytest.param(name, "nvme", marks=pytest.mark.full) for name in GENERATING if name not in REPRESENTATIVES),
    ],
)
def test_the_same_text(name: str, place: str, tmp_path: Path) -> None:
    expected, losses, values = plain(name)
    model, optimizer = prepare_tight(*built(name), PLACES[place], tmp_path)
    text, got = run(name, model, optimizer)
    assert text.tolist() == expected.tolist()
    assert got == losses
    assert differing(weights(overspill.close(model)), values) == []
