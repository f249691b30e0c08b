"""update="eager": gradients are let go in the backward pass, as soon as their updates are done."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import overspill
from overspill.errors import StateError
from overspill.plan import solver
from overspill.program import Kind
from overspill.runtime import parts, rooms
from overspill.runtime.engine import Engine
from overspill.runtime.handle import gradient_of
from tests import small
from tests.both import adamw
from tests.cpu.test_ahead import HOMES, check, of_length
from tests.reference import weights

BLOCKS, STEPS = 12, 3


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the gradients of two units: one that is made and one that waits."""
    monkeypatch.setattr(solver, "CONSUMED", 1 << 40)


PLACES = {**HOMES, "weights": {"weight": "host", "state": "host"}}


@pytest.fixture(params=[True, False], ids=["ahead", "on demand"])
def paged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(parts, "PAGED", {"cpu"} if request.param else set())
    monkeypatch.setattr(rooms, "PIECES", {"cpu"} if request.param else set())
    return bool(request.param)


def prepared(place: str | None, nvme: Path, **keywords: Any) -> tuple[Any, Any]:
    model = small.build(blocks=BLOCKS)
    keywords = {"update": "eager", "gpu": "64MiB", "host": "64MiB", "nvme": nvme, **keywords}
    return overspill.prepare(model, adamw(model), place=PLACES[place] if place else None, **keywords)


def loop(model: Any, optimizer: Any, to_none: bool = True) -> list[float]:
    found = []
    for step in range(STEPS):
        loss = of_length(model, 5, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        found.append(loss.item())
    return found


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The most bytes of gradients that there were, of those in `p.grad`, when one more came."""
    found, arrived = [0], Engine.arrived

    def counted(engine: Any, unit: int, param: int) -> None:
        arrived(engine, unit, param)
        held = [gradient_of(p) for unit in engine.units for p in unit.params]
        found[0] = max(found[0], sum(g.value.nbytes for g in held if g is not None and isinstance(g.value, Tensor)))

    monkeypatch.setattr(Engine, "arrived", counted)
    yield found


@pytest.mark.parametrize(
    ("place", "states", "to_none"),
    [("device", "exact", True), ("states", "exact", False), ("states", "compact", True), ("weights", "compact", False)],
)
def test_the_same_bits_in_less_memory(
    place: str, states: str, to_none: bool, paged: bool, most: list[int], tmp_path: Path
) -> None:
    model, optimizer = prepared(place, tmp_path, update="lazy", states=states)
    expected = loop(model, optimizer, to_none), weights(overspill.close(model))
    kept, most[0] = most[0], 0
    model, optimizer = prepared(place, tmp_path, states=states)
    plan = optimizer.report()["plan"]
    check((loop(model, optimizer, to_none), weights(overspill.close(model))), expected)
    planned = plan.bytes_of("device", "gradients before their update")
    # What is planned is aligned, which is most of it for a model this small; so not more than two units' own bytes.
    units = sorted(sum(p.nbytes for p in unit.params) for unit in plan.model.units)
    assert 0 < most[0] <= min(planned, sum(units[-2:])) and most[0] < kept and not plan.bytes_of("device", "grad")


@pytest.mark.parametrize("kind", [Kind.STATE_FETCH, Kind.UPDATE, Kind.STATE_STORE, Kind.DUE, Kind.UPDATED])
def test_delays_change_no_bit(kind: Kind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(parts, "PAGED", {"cpu"})
    found = []
    for delays in ({}, {kind: 0.002}):
        model, optimizer = prepared("states", tmp_path)
        overspill.api._engine(model).executor.lanes.delays |= delays
        found.append((loop(model, optimizer), weights(overspill.close(model))))
    check(found[0], found[1])


def test_what_is_gone_is_not_looked_at(paged: bool, tmp_path: Path) -> None:
    model, optimizer = prepared("states", tmp_path)
    of_length(model, 5, 0).backward()
    last = list(model.parameters())[-1]
    for look in (lambda: last.grad.norm(), lambda: last.grad.clone(), lambda: overspill.grad(last)):
        with pytest.raises(StateError, match=r"let go as soon as their update is done.*update='lazy'"):
            look()
    with pytest.raises(StateError, match="update='lazy'"):
        optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    with pytest.raises(StateError, match=r"another backward pass without zero_grad\(\)"):
        of_length(model, 5, 1).backward()


@pytest.mark.parametrize("place", ["device", "states", "weights"])
def test_a_part_of_the_model_is_not_used_before_the_step(place: str, paged: bool, tmp_path: Path) -> None:
    """Its weights are new already, wherever they live, and whether or not anything is left to do for it."""
    model, optimizer = prepared(place, tmp_path)
    x = torch.randn(2, 3, small.WIDTH, dtype=torch.bfloat16, requires_grad=True)
    again = checkpoint(model.blocks[5], x, use_reentrant=False)
    of_length(model, 5, 0).backward()
    for use in (
        lambda: model.blocks[BLOCKS - 1](x.detach()),
        lambda: torch.autograd.grad(again.float().square().sum(), x),
    ):
        with pytest.raises(StateError, match=r"call step\(\) first"):
            use()
    optimizer.step()
    model.blocks[BLOCKS - 1](x.detach())
    overspill.close(model)


@pytest.mark.parametrize("place", ["device", "states", "weights"])
def test_a_second_step_is_refused_and_nothing_is_lost(place: str, paged: bool, tmp_path: Path) -> None:
    model, optimizer = prepared(place, tmp_path)
    of_length(model, 5, 0).backward()
    optimizer.step()
    before = weights(model)
    with pytest.raises(StateError, match=r"another step\(\)"):
        optimizer.step()
    with pytest.raises(StateError, match="update='lazy'"):
        list(model.parameters())[-1].grad.mul_(0.5)
    optimizer.zero_grad()
    assert all(torch.equal(before[name], value) for name, value in weights(model).items())
    assert torch.tensor(loop(model, optimizer)).isfinite().all()
    overspill.close(model)


def test_gradients_that_wait_for_others_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A parameter without a gradient keeps those of its unit."""
    model = small.build(blocks=BLOCKS)
    for block in model.blocks:
        block.unused = nn.Parameter(torch.ones(3))
    model, optimizer = overspill.prepare(
        model, adamw(model), place=PLACES["states"], gpu="64MiB", host="64MiB", update="eager"
    )
    with caplog.at_level("WARNING", "overspill"):
        assert torch.tensor(loop(model, optimizer)).isfinite().all()
    assert caplog.text.count("wait for others of their units") == 1
    overspill.close(model)


def test_ranks_are_refused_by_plans_too() -> None:
    model = small.build()
    with pytest.raises(overspill.errors.OptionError, match="update='lazy' over several ranks, found 'eager'"):
        overspill.plan(model, adamw(model), world=2, update="eager")


def test_sums_over_several_passes_are_kept(tmp_path: Path) -> None:
    """Whoever says so has room for all of them."""
    model, optimizer = prepared("states", tmp_path, micro_batches=2)
    assert optimizer.report()["plan"].bytes_of("device", "grad") > 0
    overspill.close(model)
    model, optimizer = prepared("host", tmp_path)
    assert optimizer.report()["plan"].bytes_of("host", "grad") > 0, "as told"
    overspill.close(model)


def test_more_fits(tmp_path: Path) -> None:
    """What is spilled has no gradients in it."""
    model = small.build(blocks=BLOCKS)
    plans = [
        overspill.plan(model, adamw(model), gpu="256KiB", host="64MiB", update=update) for update in ("lazy", "eager")
    ]
    lazy, eager = (plan.peak("host") for plan in plans)
    kept = [sum(unit.grad_bytes for unit in plan.model.units) for plan in plans]
    assert kept[1] == 0 < lazy - eager <= kept[0]


def test_a_plan_is_for_one_kind_of_update(tmp_path: Path) -> None:
    model = small.build(blocks=BLOCKS)
    plan = overspill.plan(model, adamw(model), gpu="64MiB", host="64MiB", update="eager")
    with pytest.raises(overspill.errors.OptionError, match=r"a plan of this model.* update"):
        overspill.prepare(model, adamw(model), place=plan, gpu="64MiB", host="64MiB")
    model, optimizer = overspill.prepare(model, adamw(model), place=plan, gpu="64MiB", host="64MiB", update="eager")
    assert torch.tensor(loop(model, optimizer)).isfinite().all()
    overspill.close(model)
