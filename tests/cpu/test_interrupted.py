"""Ctrl-C in a forward pass: torch tells no hook of it. What comes next finds the model as it was before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overspill
from tests import small
from tests.both import AWAY, HERE
from tests.reference import differing

precisions = pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
places = pytest.mark.parametrize("place", [HERE, AWAY], ids=["here", "away"])


def prepared(precision: str, place: dict[str, str], nvme: Path) -> tuple[Any, Any]:
    model = small.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return overspill.prepare(model, optimizer, precision=precision, place=place, nvme=nvme)


def interrupt(model: Any) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.blocks[1].up.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        small.loss_of(model, next(small.batches()))
    handle.remove()


def steps(model: nn.Module, optimizer: Any, count: int) -> None:
    stream = small.batches()
    for _ in range(count):
        small.loss_of(model, next(stream)).backward()
        optimizer.step()
        optimizer.zero_grad()


@precisions
@places
def test_gradients_are_as_large_as_ever(precision: str, place: dict[str, str], tmp_path: Path) -> None:
    found = []
    for interrupted in (False, True):
        model, optimizer = prepared(precision, place, tmp_path)
        if interrupted:
            interrupt(model)
        small.loss_of(model, next(small.batches())).backward()
        found.append(optimizer.clip_grad_norm_(1.0).item())
    assert found[0] == found[1] > 0.1


def state_dict(model: Any) -> dict[str, Tensor]:
    return model.state_dict()  # type: ignore[no-any-return]


def copies(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@precisions
@places
@pytest.mark.parametrize("read", [state_dict, copies])
def test_state_dicts_are_whole(
    read: Callable[[Any], dict[str, Tensor]], precision: str, place: dict[str, str], tmp_path: Path
) -> None:
    model, optimizer = prepared(precision, place, tmp_path)
    steps(model, optimizer, 2)
    expected = {name: value.clone() for name, value in read(model).items()}
    interrupt(model)
    found = read(model)
    assert differing(found, expected) == []
    steps(model, optimizer, 2)
    assert differing(found, expected) == [], "what was read does not change any more"


@precisions
@places
def test_state_dicts_are_loaded_whole(precision: str, place: dict[str, str], tmp_path: Path) -> None:
    model, optimizer = prepared(precision, place, tmp_path)
    steps(model, optimizer, 2)
    best = model.state_dict()
    steps(model, optimizer, 2)
    interrupt(model)
    model.load_state_dict(best)
    assert differing(model.state_dict(), best) == []


def test_state_dicts_inside_of_a_call_are_no_interruption(tmp_path: Path) -> None:
    model, optimizer = prepared("bf16", AWAY, tmp_path)
    expected, found = model.state_dict(), list[dict[str, Tensor]]()
    handle = model.blocks[1].register_forward_hook(lambda *_: found.append(model.state_dict()))
    steps(model, optimizer, 1)
    handle.remove()
    assert differing(found[0], expected) == []
