"""Runs the same code on a plain model and on a prepared one, and compares bits."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from tests import small
from tests.reference import differing, same_bits, weights

HERE = {"weight": "device", "grad": "device", "state": "device"}
AWAY = {"weight": "host", "grad": "host", "state": "nvme"}
everywhere = pytest.mark.parametrize("place", [HERE, AWAY], ids=["here", "away"])

Loop = Callable[[Any, Any], Any]
"""(model, optimizer) -> what else is to be compared: nothing, a value, or a list of values."""


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def prepare(place: dict[str, str], nvme: Path, build: Callable[[], nn.Module] = small.build, optimizer: Any = adamw):
    model = build()
    return overspill.prepare(model, optimizer(model), precision="fp32", place=place, nvme=nvme)


_streams: "weakref.WeakKeyDictionary[nn.Module, Any]" = weakref.WeakKeyDictionary()


def losses(model: nn.Module, steps: int, **call: Any):
    """The losses of the next `steps` batches, one at a time; the stream goes on where the last call stopped."""
    stream = _streams.setdefault(model, small.batches())
    for _ in range(steps):
        batch = next(stream)
        logits = model(batch["tokens"], **call)
        yield nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def passes_of(model: nn.Module, passes: int) -> Iterator[float]:
    """Backward passes of a step, all but the last inside `no_sync` where the model has that; their losses."""
    for i in range(passes):
        loss = next(iter(losses(model, 1))) / passes
        held = i + 1 < passes and hasattr(model, "no_sync")
        with model.no_sync() if held else contextlib.nullcontext():  # type: ignore[operator]
            loss.backward()
        yield loss.item()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, **call: Any) -> list[float]:
    """The usual loop."""
    found = []
    for loss in losses(model, steps, **call):
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def check(loop: Loop, place: dict[str, str], nvme: Path, build: Any = small.build, optimizer: Any = adamw) -> None:
    """`loop` gives the same bits on a plain model and on a prepared one."""
    model = build()
    expected = loop(model, optimizer(model)), weights(model)
    model, steps = prepare(place, nvme, build, optimizer)
    found = loop(model, steps), weights(model)
    agrees = same(found[0], expected[0])
    assert agrees, "what the loop gives back differs"
    assert differing(found[1], expected[1]) == []


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_bits(a.detach(), b.detach())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def grads(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]
