"""fp16: whether a step is skipped is known to the device only, and the host hears of it at the next one."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.kernels import executors
from overspill.kernels.elements import Elements
from overspill.kernels.numbers import NUMBERS
from overspill.runtime import parts, rooms, scaling, steps
from tests import small
from tests.both import adamw
from tests.places import PLACES
from tests.reference import differing, weights

SIZES = [1e30, 1, 1, 1e30, 1e30, 1, 300, 1, 1, 1e30, 1, 1]
"""Of losses: the first step is skipped, too, and two in a row."""
HOMES = {**PLACES, "states": {"weight": "device", "grad": "device", "state": "host"}}


class Loss(nn.Module):
    """Its output is a loss, of a size that is told; every third call leaves out a block."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small.build()

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, size: float, skip: int | None) -> torch.Tensor:
        logits = self.net(tokens, skip).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) * size


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.full)], ids=["ahead", "on demand"])
def later(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Says whether the host hears later, as on a GPU."""
    monkeypatch.setattr(parts, "PAGED", {"cpu"} if request.param else set())
    monkeypatch.setattr(rooms, "PIECES", {"cpu"} if request.param else set())
    monkeypatch.setattr("overspill.runtime.scaling.INTERVAL", 2)
    yield lambda on: monkeypatch.setattr(steps, "HEARS_LATER", {"cpu"} if on else set())


def prepare(place: str, nvme: Path, **keywords: Any) -> tuple[nn.Module, Any]:
    model, make = Loss(), keywords.pop("optimizer", adamw)
    keywords = {"precision": "fp16", "gpu": "64MiB", "host": "64MiB", **keywords}
    return overspill.prepare(model, make(model), place=HOMES[place], nvme=nvme, **keywords)


def trained(place: str, nvme: Path, look: int | None = None, clip: float = 1.0, **keywords: Any) -> tuple[Any, ...]:
    """Losses, what a look in the middle saw, weights, states, and what became of the scale."""
    model, optimizer = prepare(place, nvme, **keywords)
    losses, seen = [], {}
    for step, (batch, size) in enumerate(zip(small.batches(), SIZES, strict=False)):
        loss = model(**batch, size=size, skip=1 if step % 3 == 2 else None)
        loss.backward()
        if clip:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        if step == look:
            seen = weights(model) | _flat(optimizer.state_dict()["state"])
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        losses.append(float(loss.detach()))
    found = optimizer.report()
    return (losses, found["loss_scale"], found["skipped"]), seen, weights(model), _flat(optimizer.state_dict()["state"])


LOOKS: dict[str, Callable[[nn.Module, Any], object]] = {
    "report": lambda model, optimizer: optimizer.report(),
    "state dict": lambda model, optimizer: optimizer.state_dict(),
    "weights": lambda model, optimizer: model.state_dict(),
    "settle": lambda model, optimizer: overspill.settle(model),
    "evaluation": lambda model, optimizer: _evaluated(model),
    "nothing": lambda model, optimizer: None,
}


def _evaluated(model: nn.Module) -> None:
    with torch.no_grad():
        model(**next(small.batches()), size=1.0, skip=None)


def _flat(states: dict[int, dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {f"{i}.{k}": v for i, state in states.items() for k, v in state.items()}


def check(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert one[0] == other[0]
    for a, b in zip(one[1:], other[1:], strict=True):
        assert a.keys() == b.keys() and not differing(a, b)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)


WAYS: dict[str, dict[str, Any]] = {
    "lazy": {},
    "not clipped": {"clip": 0.0},
    "delayed": {"update": "delayed", "delay_after": 2},
    "compact": {"states": "compact"},
    "momentum": {"optimizer": momentum},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "place", [*(pytest.param(each, marks=pytest.mark.full) for each in ("device", "host")), "states"]
)
def test_hearing_later_changes_no_bit(way: str, place: str, later: Callable[[bool], None], tmp_path: Path) -> None:
    later(False)
    expected = trained("device", tmp_path, **WAYS[way])
    assert expected[0][2] >= 4
    later(True)
    check(trained(place, tmp_path, **WAYS[way]), expected)


@pytest.mark.parametrize("look", [0, *(pytest.param(step, marks=pytest.mark.full) for step in (1, 3)), 4])
@pytest.mark.parametrize("way", ["lazy", "delayed"])
def test_whoever_looks_sees_what_was_skipped(
    way: str, look: int, later: Callable[[bool], None], tmp_path: Path
) -> None:
    later(False)
    expected = trained("states", tmp_path, look, **WAYS[way])
    later(True)
    check(trained("states", tmp_path, look, **WAYS[way]), expected)


def test_the_host_does_not_wait(later: Callable[[bool], None], tmp_path: Path) -> None:
    later(True)
    model, optimizer = prepare("states", tmp_path)
    scale, batch = overspill.api._engine(model).parts.scale, next(small.batches())
    heard = []
    for size in SIZES[:3]:
        model(**batch, size=size, skip=None).backward()
        optimizer.step()
        optimizer.zero_grad()
        heard.append(scale._last)
    assert [verdict.skipped for verdict in heard] == [True, False, None]
    assert optimizer.report()["skipped"] == 1 and heard[-1].skipped is False


def test_a_checkpoint_behind_a_skipped_step(later: Callable[[bool], None], tmp_path: Path) -> None:
    later(True)
    model, optimizer = prepare("host", tmp_path)
    batch = next(small.batches())
    for size in (1e-3, 1e30):
        model(**batch, size=size, skip=None).backward()
        optimizer.step()
        optimizer.zero_grad()
    overspill.save(tmp_path / "saved", model, optimizer)
    again, resumed = prepare("states", tmp_path)
    overspill.load(tmp_path / "saved", again, resumed)
    assert resumed.report()["skipped"] == 1 and resumed.report()["loss_scale"] == 32768.0
    for m, o in ((model, optimizer), (again, resumed)):
        m(**batch, size=1e-3, skip=None).backward()
        o.step()
    assert not differing(weights(again), weights(model))
    assert float(resumed.state_dict()["state"][0]["step"]) == 2


def fused(rule: Any, device: torch.device, format: str) -> executors.Executor:
    """As a kernel on a GPU: it is told all numbers, and only then sees that there is nothing to do."""
    plain = executors.executor_for(rule, device, format)

    def run(on: Elements, hypers: Any, step: int) -> None:
        NUMBERS[rule.name](hypers, step, on.fields)
        gradient = on.gradient.float().clone()
        for factor in on.factors:
            gradient.mul_(factor)
        if on.skip is None or not on.skip:
            plain.run(dataclasses.replace(on, gradient=gradient, factors=()), hypers, step)

    return executors.Executor(run, fused=True)


@pytest.mark.parametrize("way", ["lazy", "delayed"])
@pytest.mark.parametrize("look", LOOKS)
def test_a_first_step_that_is_skipped(
    look: str, way: str, later: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And another one in a row, whoever looks in between: by kernels that know the step's number and nothing else."""
    monkeypatch.setattr("overspill.runtime.kernel_update.executor_for", fused)

    def trained() -> tuple[Any, ...]:
        told = {**WAYS[way], "delay_after": 0} if way == "delayed" else {}
        model, optimizer = prepare("states", tmp_path, **told)
        for batch, size in zip(small.batches(), SIZES[3:8], strict=False):
            model(**batch, size=size, skip=None).backward()
            optimizer.step()
            LOOKS[look](model, optimizer)
            optimizer.zero_grad()
        found = optimizer.report()
        states = _flat(optimizer.state_dict()["state"])
        return (found["loss_scale"], found["skipped"]), states, weights(overspill.close(model))

    later(False)
    expected = trained()
    assert expected[0][1] >= 2
    later(True)
    check(trained(), expected)


def gradients() -> dict[str, torch.Tensor]:
    x = torch.randn(5, 7).half()
    return {
        "fp16": x.t(),
        "bf16": x.bfloat16().t(),
        "fp32": x.float(),
        "fp64": x.double(),
        "expanded": x[0].expand(3, 7),
    }


@pytest.mark.parametrize("kind", gradients())
def test_gradients_are_scaled_with_one_rounding(kind: str) -> None:
    gradient = gradients()[kind]
    for number in (2.0**16, 2.0**-16, 1.0, 3.0):
        exactly = gradient.double() * number
        expected = exactly.to(gradient.dtype) if gradient.dtype.itemsize > 2 else exactly.float().to(gradient.dtype)
        assert torch.equal(scaling._times(gradient, torch.tensor(number)), expected)
    again = gradient.clone().requires_grad_()
    (found,) = torch.autograd.grad(scaling._times(again, torch.tensor(2.0)).sum(), again)
    assert torch.equal(found, torch.full_like(found, 2.0))


def test_jacobians_and_graphs_of_gradients(later: Callable[[bool], None], tmp_path: Path) -> None:
    """Many gradients at once, which torch batches; and one that is used again when the scale has moved."""
    later(True)

    class Row(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.layer(x))

    plain, model, x = Row(), Row(), torch.randn(4)
    model, optimizer = overspill.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp16")
    # Gradients of one, which the first scale is too large for.
    overspill.api._engine(model).parts.scale.load({"value": 128.0, "good_steps": 0, "skipped": 0})
    expected = torch.autograd.functional.jacobian(plain, x)
    found = torch.autograd.functional.jacobian(model, x, vectorize=True)
    assert torch.allclose(found, expected, rtol=0.01, atol=0.01)
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(model(x).float().square().sum(), x, create_graph=True)
    model(x.detach()).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
        first.square().sum().backward()
    # Of weights that were updated, as in plain torch; not of the scale.
    assert "[]" not in str(error.value)
