"""Frozen parameters: streamed, never written, and without gradient or state; alone in a unit or beside others."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill.program import Kind
from overspill.runtime import rooms
from tests.layers import Stack
from tests.reference import same_bits
from tests.side import WIDTH, Side, check, hows, spilled, squared, tight


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))


def frozen(*names: str, make: Callable[[], nn.Module] = linear) -> nn.Module:
    model = Stack(make, 4)
    for name in names:
        part = model.get_submodule(name) if not name.endswith(("weight", "bias")) else model.get_parameter(name)
        part.requires_grad_(False)
    return model


def all_but_last() -> nn.Module:
    model = frozen()
    model.requires_grad_(False)
    model.last.requires_grad_(True)
    return model


def given_all(model: nn.Module) -> torch.optim.Optimizer:
    """Frozen ones are in the optimizer too, as in most scripts."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def with_input_gradient(model: nn.Module, step: int) -> Tensor:
    """Backward goes through all frozen units."""
    x = torch.randn(5, WIDTH, requires_grad=True)
    loss = model(x).square().mean()
    (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
    return loss * (1 + slope.square().sum())


CASES: dict[str, Side] = {
    "one parameter": Side(lambda: frozen("blocks.1.0.weight", "first.bias")),
    "a middle unit": Side(lambda: frozen("blocks.1", "blocks.2")),
    "the first units": Side(lambda: frozen("first", "blocks.0", "blocks.1")),
    "in the optimizer": Side(lambda: frozen("blocks.1", "last.bias"), optimizer=given_all),
    "all but the last": Side(all_but_last),
    "with a gradient of the input": Side(all_but_last, with_input_gradient),
    "batch norm": Side(
        lambda: frozen("blocks", make=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    ),
}


@hows
@pytest.mark.parametrize("name", CASES)
def test_frozen_parts(name: str, how: str, tmp_path: Path) -> None:
    check(CASES[name], how, tmp_path)


def stored(model: nn.Module) -> list[str]:
    """Collects the units whose weights are written home from now on."""
    executor, found = overspill.api._engine(model).executor, []
    real = executor._handlers[Kind.STORE]

    def store(op):
        found.append(overspill.api._engine(model).units[op.unit].spec.name)
        return real(op)

    executor.handle({Kind.STORE: store})
    return found


def evaluated_and_saved(model: nn.Module, optimizer: torch.optim.Optimizer, side: Side) -> None:
    """Everything that reads weights and should not count as writing."""
    side.train(model, optimizer)
    model.eval()
    with torch.no_grad():
        squared(model, 0)
    model.train()
    model.state_dict()
    [p.sum().item() for p in model.parameters()]
    overspill.settle(model)
    side.train(model, optimizer)


@tight
def test_a_frozen_unit_is_never_written_home(how: str, tmp_path: Path) -> None:
    side = dataclasses.replace(CASES["a middle unit"], optimizer=given_all)
    model, optimizer = spilled(*side.made(), how, tmp_path)
    engine = overspill.api._engine(model)
    homes = {u.spec.name: u.home for u in engine.units}
    before = {name: _bytes_of(engine, name) for name in ("blocks.1", "blocks.2")}
    found = stored(model)
    evaluated_and_saved(model, optimizer, side)
    assert set(found) == set(homes) - {"blocks.1", "blocks.2"}
    assert all(same_bits(_bytes_of(engine, name), value) for name, value in before.items())
    sizes = {
        u.name: (u.role_bytes("grad"), u.role_bytes("state"), len(u.pages)) for u in engine.parts.layout.spec.units
    }
    assert sizes["blocks.1"] == sizes["blocks.2"] == (0, 0, 0)
    assert optimizer.state_dict()["state"].keys().isdisjoint({6, 7, 8, 9})


def _bytes_of(engine: overspill.runtime.engine.Engine, name: str) -> Tensor:
    """What lies in a unit's home."""
    unit = next(u for u in engine.units if u.spec.name == name)
    out = torch.empty(unit.nbytes, dtype=torch.uint8)
    engine.parts.tiers[unit.home.tier].load(unit.home, out)
    return out


@tight
def test_a_frozen_model_can_be_evaluated_but_not_stepped(how: str, tmp_path: Path) -> None:
    side = Side(all_but_last)
    plain, _ = side.made()
    model, _ = spilled(*side.made(), how, tmp_path)
    with torch.no_grad():
        torch.manual_seed(1)
        expected = squared(plain, 0)
        torch.manual_seed(1)
        assert torch.equal(squared(model, 0), expected)


@pytest.mark.parametrize("update", ["lazy", "eager", "delayed"])
@pytest.mark.parametrize("home", ["device", "host"])
def test_what_the_optimizer_does_not_have_adds_up(
    home: str, update: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As with torch alone; the plan has room for the sums, and what it means is said, once."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, of: Callable[[nn.Parameter], Tensor | None]) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        sums = torch.zeros(WIDTH, WIDTH)
        for _ in range(3):
            model(torch.randn(4, WIDTH, generator=generator)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found = of(model[0].weight)
            assert found is not None and not torch.equal(found, sums)
            sums = found
        return sums

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        return model, torch.optim.SGD(model[2].parameters(), lr=0.0)

    model, optimizer = overspill.prepare(
        *made(), gpu="64MiB", host="64MiB", place={"grad": home, "state": "host"}, update=update, delay_after=1
    )
    sums = run(model, optimizer, overspill.grad)
    plain = made()
    expected = run(*plain, lambda p: None if p.grad is None else p.grad.clone())
    assert sums.dtype == torch.float32
    assert torch.allclose(sums, expected, rtol=0.05, atol=0.01 * expected.abs().max().item())
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == [
        "4 trainable parameters (the first is '0.weight') are not in the optimizer: their gradients only add up; give "
        "them to the optimizer, or freeze them with requires_grad_(False)"
    ]
    overspill.close(model)


def norms_only(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.dim() == 1], lr=1e-2)


@pytest.mark.parametrize("home", ["device", "host"])
def test_a_unit_may_have_what_no_step_takes(home: str, tmp_path: Path) -> None:
    """Its update begins in the backward pass when all its gradients are there."""

    def run(update: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = frozen()
        place = {"weight": home, "grad": home, "state": "host"}
        keywords: Any = {"gpu": "64MiB", "host": "64MiB", "place": place, "delay_after": 1}
        model, optimizer = overspill.prepare(model, norms_only(model), update=update, **keywords)
        for seed in range(4):
            squared(model, seed).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in overspill.close(model).parameters()]

    lazy, eager, delayed = map(run, ("lazy", "eager", "delayed"))
    assert all(map(same_bits, eager, lazy))
    assert not all(map(same_bits, delayed, lazy)) and all(p.isfinite().all() for p in delayed)


def test_sums_that_no_step_takes_are_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have memory of their own, and no place in the piece that the others share."""
    monkeypatch.setattr(rooms, "PIECES", {"cpu"})
    model = frozen()
    model, optimizer = overspill.prepare(model, norms_only(model), gpu="64MiB", place={"state": "host"})
    engine = overspill.api._engine(model)
    program, loans = engine.executor.program, engine.parts.made.grads.rooms.loans
    stepped = sum(512 for p in optimizer.param_groups[0]["params"])
    assert rooms.bytes_in_rooms(program.model.units, program.placements) == stepped
    for seed in range(3):
        squared(model, seed).backward()
        assert loans._gradients == stepped
        optimizer.step()
        optimizer.zero_grad()
    overspill.close(model)
