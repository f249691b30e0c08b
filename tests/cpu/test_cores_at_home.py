"""Pages that the host's cores update with gradients where these live: nobody changes them before they are read."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.kernels import cpu
from overspill.program import Kind
from overspill.runtime import cores as running
from overspill.runtime.kernel_update import KernelUpdate
from overspill.specs import Hands
from tests.both import passes_of
from tests.cpu.test_ahead import STEPS, check, prepare
from tests.cpu.test_ahead import loop as usual
from tests.cpu.test_cores import hands as hands
from tests.reference import weights

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="no native library")

Loop = Callable[[nn.Module, Any], list[float]]
places = pytest.mark.parametrize("place", ["offload", "host"])


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Addresses of the gradients that the cores read. They are slow, and look whether somebody writes there."""
    found: list[int] = []
    run = KernelUpdate.run_on_host

    def slow(update: KernelUpdate, page: Any, on: Any, *rest: Any) -> None:
        before = [part.gradient.clone() for part in on]
        found.extend(part.gradient.data_ptr() for part in on)
        time.sleep(0.002)
        run(update, page, on, *rest)
        assert all(torch.equal(part.gradient, was) for part, was in zip(on, before, strict=True)), "written over"

    monkeypatch.setattr(KernelUpdate, "run_on_host", slow)
    yield found


def trained(loop: Loop, place: str, nvme: Path, **keywords: Any) -> tuple[tuple[list[float], Any], int]:
    """What was trained, and how many gradients the cores had in staging memory."""
    model, optimizer = prepare(place, nvme, **keywords)
    engine = overspill.api._engine(model)
    engine.executor.lanes.delays |= {Kind.STATE_FETCH: 0.001}
    cores: running.Cores | None = engine.executor.pager.cores if engine.executor.pager is not None else None
    staged = []
    if cores is not None:
        stage = cores._staged

        def noted(shares: Any, kept: Any, room: Any) -> Any:
            staged.extend(of for of in kept if not of.at_home)
            return stage(shares, kept, room)

        cores._staged = noted  # type: ignore[method-assign]
    found = loop(model, optimizer)
    return (found, weights(overspill.close(model))), len(staged)


def never_zeroed(model: nn.Module, optimizer: Any) -> list[float]:
    """The next backward pass adds to the clipped gradients."""
    found = []
    for _ in range(STEPS):
        found += passes_of(model, 1)
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
    return found


def zeroed_in_place(model: nn.Module, optimizer: Any) -> list[float]:
    found = []
    for _ in range(STEPS):
        found += passes_of(model, 1)
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        for p in model.parameters():
            p.grad.mul_(3).zero_()
    return found


def looked_at_later(model: nn.Module, optimizer: Any) -> list[float]:
    """Older gradients are kept, and read when there are others."""
    found, kept = [], []
    for step in range(STEPS):
        found += passes_of(model, 1)
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        kept.append([p.grad for p in model.parameters()])
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return found + [float(g.sum()) for each in kept for g in each]


def given(model: nn.Module, optimizer: Any) -> list[float]:
    """The user's own tensors, and views of gradients."""
    found, first = [], next(model.parameters())
    for step in range(STEPS):
        found += passes_of(model, 1)
        if step % 2:
            first.grad = torch.full_like(first.grad, 0.25)
        else:
            first.grad.view(-1)[:2] = 0.5
        optimizer.step()
        optimizer.zero_grad()
    return found


def changed(model: nn.Module, optimizer: Any) -> list[float]:
    """By more than a factor, in every second step: the cores leave that to the device."""
    found = []
    for step in range(STEPS):
        found += passes_of(model, 1)
        if step % 2:
            torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    return found


def summed(model: nn.Module, optimizer: Any) -> list[float]:
    return usual(model, optimizer, passes=2, clip=0.5)


LOOPS: tuple[Loop, ...] = (never_zeroed, zeroed_in_place, looked_at_later, given, changed, summed)


@places
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_however_the_loop_is_written(loop: Loop, place: str, hands: Hands, read: list[int], tmp_path: Path) -> None:
    keywords = {"micro_batches": 2} if loop is summed else {}
    expected, _ = trained(loop, "device", tmp_path, **keywords)
    assert not read
    found, staged = trained(loop, place, tmp_path, **keywords)
    check(found, expected)
    assert len(read) > staged and (staged == 0 or loop is given), "only what views were taken of is on the device"


@places
def test_sums_that_nobody_planned(place: str, hands: Hands, read: list[int], tmp_path: Path) -> None:
    """They get homes of their own, in host memory too."""
    expected, _ = trained(summed, "device", tmp_path)
    found, staged = trained(summed, place, tmp_path)
    check(found, expected)
    assert read and not staged


@pytest.mark.parametrize("update", ["lazy", "eager", "delayed"])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("kind", [pytest.param(None, marks=pytest.mark.full), Kind.GRAD_STORE])
def test_whenever_updates_begin(
    kind: Kind | None, passes: int, update: str, hands: Hands, read: list[int], tmp_path: Path
) -> None:
    """Also where the next gradient comes while the cores read the one before: delayed updates have two homes."""
    more: Any = {"update": update, "micro_batches": passes} | ({"delay_after": 1} if update == "delayed" else {})

    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        if kind is not None:
            overspill.api._engine(model).executor.lanes.delays[kind] = 0.001
        return usual(model, optimizer, passes, 0.0 if update == "eager" else 0.5)

    expected, _ = trained(loop, "device", tmp_path, **more)
    found, staged = trained(loop, "offload", tmp_path, **more)
    check(found, expected)
    assert read and not staged


def test_gradients_pass_once(hands: Hands, tmp_path: Path) -> None:
    """On their way home. What else passes is what the plan says."""
    model, optimizer = prepare("offload", tmp_path)
    usual(model, optimizer)
    report = optimizer.report()
    planned, moved = report["plan"].moved, report["moved"]
    assert moved["up"] <= planned["up"] and moved["down"] <= planned["down"]
    if hands == "host":
        assert (moved["up"], moved["down"]) == (planned["up"], planned["down"])
        new, made = sum(p.nbytes for p in model.parameters()), sum(u.made_bytes for u in report["plan"].model.units)
        assert (moved["up"], moved["down"]) == (new, new + made)
    overspill.close(model)
