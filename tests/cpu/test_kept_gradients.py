"""Gradients in host memory that are looked at, dropped late, or still held: the same as on the device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill.runtime import parts, rooms
from tests import small
from tests.both import adamw
from tests.cpu.test_ahead import check
from tests.reference import weights

DEVICE = {"weight": "device", "grad": "device", "state": "device"}
HOST = {"weight": "device", "grad": "host", "state": "host"}
WIDTH = 64
"""So that the parts of a page are longer than what their places are rounded up to."""


@pytest.fixture(params=[True, False], ids=["ahead", "on demand"], autouse=True)
def paged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PAGED", {"cpu"} if request.param else set())
    monkeypatch.setattr(rooms, "PIECES", {"cpu"} if request.param else set())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
        self.two = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return torch.tanh(x @ self.one if both else x) @ self.two


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        for block in self.blocks:
            x = block(x, both)
        return x.square().mean()


def prepared(model: nn.Module, place: dict[str, str], **keywords: Any) -> tuple[Any, Any]:
    keywords = {"precision": "bf16", "gpu": "64MiB", "host": "64MiB", **keywords}
    return overspill.prepare(model, adamw(model), place=place, **keywords)


def written(p: Tensor) -> None:
    p.grad.view(-1)[0] = 0.5  # type: ignore[union-attr]


def read(p: Tensor) -> None:
    p.grad[0].sum().item()  # type: ignore[index]


@pytest.mark.parametrize("look", [written, read])
def test_views_between_backward_and_step(look: Callable[[Tensor], None]) -> None:
    def trained(place: dict[str, str]) -> tuple[Any, Any]:
        model, optimizer = prepared(Experts(), place)
        torch.manual_seed(1)
        for _ in range(3):
            model(torch.randn(4, WIDTH)).backward()
            look(model.blocks[1].one)
            optimizer.step()
            optimizer.zero_grad()
        return [], weights(overspill.close(model))

    check(trained(HOST), trained(DEVICE))


def test_zeros_of_what_was_not_used() -> None:
    def trained(place: dict[str, str]) -> tuple[Any, Any]:
        model, optimizer = prepared(Experts(), place)
        torch.manual_seed(1)
        for step in range(3):
            model(torch.randn(4, WIDTH), step != 1).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return [], weights(overspill.close(model))

    check(trained(HOST), trained(DEVICE))


def back(model: Any, step: int) -> None:
    torch.manual_seed(step)
    model(torch.randint(0, small.VOCABULARY, (2, 5))).float().square().mean().backward()


def never(model: Any, optimizer: Any, step: int) -> None:
    back(model, step)
    optimizer.step()


def some(model: Any, optimizer: Any, step: int) -> None:
    never(model, optimizer, step)
    for p in list(model.parameters())[::2]:
        p.grad = None


def seldom(model: Any, optimizer: Any, step: int) -> None:
    never(model, optimizer, step)
    if step % 3 == 2:
        optimizer.zero_grad(set_to_none=step % 2 == 0)


def evaluated(model: Any, optimizer: Any, step: int) -> None:
    never(model, optimizer, step)
    with torch.no_grad():
        model(torch.zeros(1, 3, dtype=torch.long))


@pytest.mark.parametrize("turn", [never, some, seldom, evaluated])
def test_delayed_updates_of_what_is_not_dropped(turn: Callable[[Any, Any, int], None]) -> None:
    def trained(place: dict[str, str]) -> tuple[Any, Any]:
        model, optimizer = prepared(small.build(), place, update="delayed", delay_after=1, micro_batches=2)
        norms = []
        for step in range(6):
            turn(model, optimizer, step)
            norms.append([None if p.grad is None else p.grad.norm().item() for p in model.parameters()])
        return norms, weights(overspill.close(model))

    check(trained(HOST), trained(DEVICE))


@pytest.mark.parametrize("update", ["lazy", "delayed"])
def test_old_gradients_that_are_still_held(update: str) -> None:
    model, optimizer = prepared(small.build(), HOST, update=update, delay_after=0)
    back(model, 0)
    optimizer.step()
    old = [p.grad for p in model.parameters()]
    then = [g.clone() for g in old]
    optimizer.zero_grad()
    for step in range(1, 5):
        back(model, step)
        optimizer.step()
        optimizer.zero_grad()
        assert all(map(torch.equal, old, then)), step
