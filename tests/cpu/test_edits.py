"""Weights that are read or written between steps: the bits of plain PyTorch."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from tests.both import check, everywhere, prepare, train
from tests.reference import same_bits

STEPS = 5


def clip(model):
    return clip_grad_norm_(model.parameters(), 1.0)


# ---- weights that are read or written between steps


@everywhere
@pytest.mark.parametrize("read", [lambda p: p.data, lambda p: p.detach(), lambda p: p], ids=["data", "detach", "p"])
def test_a_moving_average_of_the_weights(read, place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        average = [torch.zeros_like(p) for p in model.parameters()]
        for _ in range(STEPS):
            train(model, optimizer, 1)
            with torch.no_grad():
                for mean, p in zip(average, model.parameters(), strict=True):
                    mean.lerp_(read(p), 0.1)
        return average

    check(loop, place, tmp_path)


@everywhere
def test_torchs_averaged_model(place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        averaged = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
        for _ in range(STEPS):
            train(model, optimizer, 1)
            averaged.update_parameters(model)
        return list(averaged.module.parameters())

    check(loop, place, tmp_path)


@torch.no_grad()
def copied(p):
    p.copy_(p * 0.5)


@torch.no_grad()
def clamped(p):
    p.clamp_(-0.1, 0.1)


WRITES = {
    "data.clamp_": lambda p: p.data.clamp_(-0.1, 0.1),
    "clamp_": clamped,
    "data =": lambda p: setattr(p, "data", p.data * 0.9),
    "copy_": copied,
    "detach().mul_": lambda p: p.detach().mul_(0.9),
    "init": nn.init.zeros_,
    "numpy": lambda p: p.detach().numpy().__imul__(0.9),
    "part of it": lambda p: p.data.view(-1)[:1].fill_(0.5),
}


@everywhere
@pytest.mark.parametrize("write", WRITES)
def test_weights_written_between_steps(write: str, place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        for _ in range(4):
            train(model, optimizer, 1)
            for p in model.blocks[1].parameters():
                WRITES[write](p)
        return train(model, optimizer, 1)

    check(loop, place, tmp_path)


@everywhere
def test_weights_initialised_anew(place, tmp_path: Path) -> None:
    def anew(module):
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    def loop(model, optimizer):
        torch.manual_seed(3)
        model.apply(anew)
        train(model, optimizer)
        model.apply(anew)
        return train(model, optimizer)

    check(loop, place, tmp_path)


@everywhere
def test_tied_weights_stay_one_object(place, tmp_path: Path) -> None:
    model, optimizer = prepare(place, tmp_path)
    before = list(model.parameters())
    train(model, optimizer)
    assert model.head.weight is model.embedding.weight
    assert [id(p) for p in before] == [id(p) for p in model.parameters()]
    assert same_bits(model.head.weight.detach().clone(), model.embedding.weight.detach().clone())
