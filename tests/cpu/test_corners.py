"""Parameters without elements, parameters without states, and weights of which somebody made NumPy arrays."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import overspill
from overspill.plan import solver
from overspill.program import Kind
from tests.both import check
from tests.places import prepare_tight
from tests.reference import differing, weights

WIDTH = 16
AWAY = [dict.fromkeys(("weight", "grad", "state"), tier) for tier in ("host", "nvme")]
away = pytest.mark.parametrize("place", AWAY, ids=["host", "nvme"])


class Corners(nn.Module):
    """The root has an empty parameter or a scalar; four blocks have more."""

    def __init__(self, root: torch.Tensor) -> None:
        super().__init__()
        self.root = nn.Parameter(root.clone())
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x * (1 + self.root.sum())


class Between(nn.Module):
    """A unit whose page has nothing to bring, beside two that have."""

    def __init__(self, middle: torch.Tensor) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Parameter(middle.clone())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stem(x) * (1 + self.middle.sum()))


def batch(seed: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, first: str = "") -> list[torch.Tensor]:
    """`first`: whose update is wanted before all others."""
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step).requires_grad_()).square().mean().backward()
        optimizer.step()
        if first:
            model.get_parameter(first).sum()
    states = optimizer.state_dict()["state"].values()
    return [value.clone() for state in states for value in state.values()]


def build(root: torch.Tensor, kind: type[nn.Module] = Corners) -> nn.Module:
    torch.manual_seed(0)
    return kind(root)


@away
@pytest.mark.parametrize("root", [torch.zeros(0, WIDTH), torch.zeros(0)], ids=["rows", "vector"])
def test_a_unit_whose_parameters_are_all_empty(root: torch.Tensor, place: dict[str, str], tmp_path: Path) -> None:
    def loop(model, optimizer):
        return [*train(model, optimizer), model.root.clone(), model.state_dict()["root"].clone()]

    check(loop, place, tmp_path, lambda: build(root))


@away
def test_a_unit_whose_parameters_are_all_empty_is_saved_and_loaded(place: dict[str, str], tmp_path: Path) -> None:
    def prepared():
        model = build(torch.zeros(0, WIDTH))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return overspill.prepare(model, optimizer, precision="fp32", place=place, nvme=tmp_path)

    model, optimizer = prepared()
    train(model, optimizer)
    overspill.save(tmp_path / "saved", model, optimizer)
    train(model, optimizer)
    again, other = prepared()
    overspill.load(tmp_path / "saved", again, other)
    train(again, other)
    assert differing(weights(again), weights(model)) == []


@away
@pytest.mark.parametrize("middle", [torch.ones(()), torch.zeros(0, WIDTH)], ids=["scalar", "empty"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_pages_that_bring_nothing(
    depth: int, middle: torch.Tensor, place: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gets a slot of the ring after them waits until the last one inside is stored."""
    monkeypatch.setattr(solver, "PAGE", (512, 2048))
    monkeypatch.setattr(solver, "DEPTHS", (depth,))

    def adagrad(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(model.parameters(), lr=1e-2)

    model = build(middle, Between)
    optimizer = adagrad(model)
    expected = train(model, optimizer, first="stem.weight"), weights(model)
    model = build(middle, Between)
    place = {"weight": "device", "grad": "device", "state": place["state"]}
    model, optimizer = overspill.prepare(model, adagrad(model), precision="fp32", place=place, nvme=tmp_path)
    overspill.api._engine(model).executor.lanes.delays[Kind.STATE_STORE] = 0.005
    found = train(model, optimizer, first="stem.weight"), weights(model)
    assert all(torch.equal(a, b) for a, b in zip(found[0], expected[0], strict=True))
    assert differing(found[1], expected[1]) == []


LOOKS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "nobody": lambda model, optimizer: None,
    "settle": lambda model, optimizer: overspill.settle(model),
    "states": lambda model, optimizer: optimizer.state_dict(),
}


@away
@pytest.mark.parametrize("look", LOOKS)
def test_weights_can_leave_after_arrays_were_made_of_them(look: str, place: dict[str, str], tmp_path: Path) -> None:
    """Between passes, when nobody holds views; and then within a graph, which does, and while others look."""

    def loop(
        model: nn.Module, optimizer: torch.optim.Optimizer, look: Callable[[nn.Module, torch.optim.Optimizer], object]
    ) -> list[torch.Tensor]:
        found = []
        for step in range(3):
            found += [torch.from_numpy(p.detach().numpy().copy()) for p in model[0].parameters()]
            loss = model(batch(step).requires_grad_()).square().mean()
            look(model, optimizer)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return found

    def tower() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    model = tower()
    expected = loop(model, adamw(model), LOOKS["nobody"]), weights(model)
    model = tower()
    model, optimizer = prepare_tight(model, adamw(model), place, tmp_path)
    found = loop(model, optimizer, LOOKS[look]), weights(model)
    assert all(torch.equal(a, b) for a, b in zip(found[0], expected[0], strict=True))
    assert differing(found[1], expected[1]) == []
