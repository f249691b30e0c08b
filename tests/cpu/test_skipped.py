"""fp16: whether a step is skipped is known to the device only, and the host hears of it at the next one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.runtime import parts, rooms, steps
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_are_scaled_with_one_rounding(dtype: torch.dtype) -> None:
    from overspill.runtime.scaling import _times

    gradient = torch.randn(5, 7).to(dtype).t()
    for number in (2.0**16, 2.0**-16, 1.0, 3.0):
        expected = (gradient.double() * number).float().to(dtype) if dtype != torch.float32 else gradient * number
        assert torch.equal(_times(gradient, torch.tensor(number)), expected)
        assert torch.equal(_times(gradient.expand(2, 7, 5), torch.tensor(number)), expected.expand(2, 7, 5))
    again = gradient.clone().requires_grad_()
    (found,) = torch.autograd.grad(_times(again, torch.tensor(2.0)).sum(), again)
    assert torch.equal(found, torch.full_like(found, 2.0))
