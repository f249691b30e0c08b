"""torch.compile of a model, of its blocks, of a loss, of a whole step: before prepare and after."""

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import overspill
from tests.both import same
from tests.layers import Stack
from tests.reference import differing, weights
from tests.side import WIDTH, Side, spilled, squared

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What one test compiled is nothing to the next."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Tied(Stack):
    """Its last layer is a function of the first one's weight, which is closed at that time."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(super().forward(x)), self.last.weight.t()) @ self.first.weight


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1))


SIDE = Side(lambda: Tied(block, 2))


def of_model(model: nn.Module, backend: str) -> nn.Module:
    model.compile(backend=backend)
    return model


def of_wrapped(model: nn.Module, backend: str) -> Any:
    return torch.compile(model, backend=backend)


def of_blocks(model: nn.Module, backend: str) -> nn.Module:
    for each in model.blocks:
        each.compile(backend=backend)
    return model


WAYS: dict[str, Callable[[nn.Module, str], Any]] = {"model": of_model, "wrapped": of_wrapped, "blocks": of_blocks}


def plain(way: str, backend: str) -> tuple[list[Any], dict[str, Tensor]]:
    model, optimizer = SIDE.made()
    found = SIDE.train(WAYS[way](model, backend), optimizer)
    torch._dynamo.reset()
    return found, weights(model)


FEW = [("compile", "here", "blocks", "eager"), ("prepare", "host", "model", "eager")]
MORE = product(("compile", "prepare"), ("here", "host"), WAYS, ("eager", "aot_eager"))


@pytest.mark.parametrize(
    "first,how,way,backend", [*FEW, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE if case not in FEW)]
)
def test_compiled_models(first: str, how: str, way: str, backend: str, tmp_path: Path) -> None:
    expected, after = plain(way, backend)
    model, optimizer = SIDE.made()
    compiled = WAYS[way](model, backend) if first == "compile" else None
    model, optimizer = spilled(model, optimizer, how, tmp_path)
    compiled = compiled if compiled is not None else WAYS[way](model, backend)
    assert same(SIDE.train(compiled, optimizer), expected)
    assert differing(weights(model), after) == []
    overspill.close(model)
    compiled(torch.randn(5, WIDTH)).sum().backward()


@pytest.mark.parametrize("how", [pytest.param("here", marks=pytest.mark.full), "host"])
def test_a_wrapper_that_is_prepared(how: str, tmp_path: Path) -> None:
    """The module that torch.compile returns, instead of the one that it was given."""
    expected, after = plain("wrapped", "eager")
    model, optimizer = SIDE.made()
    model, optimizer = spilled(torch.compile(model, backend="eager"), optimizer, how, tmp_path)
    assert same(SIDE.train(model, optimizer), expected)
    assert differing({k.removeprefix("_orig_mod."): v for k, v in weights(model).items()}, after) == []


@pytest.mark.parametrize("how", [pytest.param("here", marks=pytest.mark.full), "host"])
def test_a_compiled_step(how: str, tmp_path: Path) -> None:
    """Ours runs the optimizer as it is; torch would compile that too, which gives other bits."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, compiled: bool) -> list[Tensor]:
        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step = torch.compile(step, backend="eager") if compiled else step
        torch.manual_seed(1)
        return [step(torch.randn(5, WIDTH)) for _ in range(4)]

    model, optimizer = SIDE.made()
    expected = run(model, optimizer, False)
    prepared, optimizer = spilled(*SIDE.made(), how, tmp_path)
    assert same(run(prepared, optimizer, True), expected)
    assert differing(weights(prepared), weights(model)) == []


@pytest.mark.parametrize("how", [pytest.param("here", marks=pytest.mark.full), "host"])
def test_a_compiled_loss(how: str, tmp_path: Path) -> None:
    loss = torch.compile(squared, backend="eager")
    side = Side(SIDE.build, loss)
    expected = side.train(*side.made())
    torch._dynamo.reset()
    assert same(side.train(*spilled(*side.made(), how, tmp_path)), expected)


@pytest.mark.full
@pytest.mark.parametrize("way", ["model", "blocks"])
def test_inductor(way: str, tmp_path: Path) -> None:
    """Our hooks cut the graph into other pieces than plain torch compiles, and what is fused is rounded otherwise."""
    side = Side(lambda: Tied(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)), 2))
    model, optimizer = side.made()
    expected = side.train(WAYS[way](model, "inductor"), optimizer)
    torch._dynamo.reset()
    prepared, optimizer = spilled(*side.made(), "host", tmp_path)
    found = side.train(WAYS[way](prepared, "inductor"), optimizer)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    for name, value in weights(model).items():
        torch.testing.assert_close(weights(prepared)[name], value, rtol=1e-4, atol=1e-5)
