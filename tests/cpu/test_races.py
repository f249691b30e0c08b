"""Every stream comes behind those that wrote what it reads, and used the memory that it is given (tests/races.py)."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill.kernels import cpu
from overspill.plan import solver
from overspill.runtime import handing
from overspill.runtime.cores import Cores
from overspill.runtime.lanes import Ticket
from overspill.runtime.rooms import bytes_in_rooms
from overspill.specs import Hands
from tests import small
from tests.both import adamw
from tests.cpu.test_ahead import of_length
from tests.races import Gpu, Stream, simulated, with_cores

ROLES = ("weight", "grad", "state")
PLACES = ("device device host", "host device host", "device host host", "host host host", "host host device")
UPDATES = ("lazy", "eager", "delayed")
STEPS = 3


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "PAGE", (512, 2048))


def prepared(model: nn.Module, homes: str, window: int | None = None, **keywords: Any) -> tuple[Any, Any]:
    keywords = {"precision": "bf16", "gpu": "64MiB", "host": "64MiB", **keywords}
    keywords |= {"delay_after": 1} if keywords.get("update") == "delayed" else {}
    place: Any = dict(zip(ROLES, homes.split(), strict=True))
    if window is not None:
        made = overspill.plan(model, adamw(model), place=place, **keywords)
        place = dataclasses.replace(made, limits=dataclasses.replace(made.limits, window=window))
    return overspill.prepare(model, adamw(model), place=place, **keywords)


def loop(model: Any, optimizer: Any, loss: Callable[[int], Tensor], passes: int = 1, clip: float = 0.0) -> None:
    for step in range(STEPS):
        for i in range(passes):
            with model.no_sync() if i + 1 < passes else contextlib.nullcontext():
                loss(passes * step + i).backward()
        if clip:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    overspill.close(model)


def check(gpu: Gpu) -> None:
    assert gpu.ops > 500, "nothing was watched"
    assert not gpu.found, "\n".join(dict.fromkeys(gpu.found))


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("homes", PLACES)
@pytest.mark.parametrize("window", [0, 8000])
def test_nobody_is_early(homes: str, update: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated(monkeypatch) as gpu:
        model, optimizer = prepared(small.build(), homes, window, update=update)
        loop(model, optimizer, lambda step: of_length(model, 5, step), clip=0.0 if update == "eager" else 0.5)
    check(gpu)


@pytest.mark.parametrize("homes", PLACES[:4:3])
@pytest.mark.parametrize("told", [{"precision": "fp16"}, {"micro_batches": 2}, {"states": "compact"}])
def test_nobody_is_early_in_other_settings(homes: str, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated(monkeypatch, seed=1) as gpu:
        model, optimizer = prepared(small.build(), homes, **told)
        loop(model, optimizer, lambda step: of_length(model, 5, step), told.get("micro_batches", 1), clip=0.5)
    check(gpu)


@pytest.fixture
def short_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the cores find something to do."""
    monkeypatch.setattr(solver, "DEPTHS", (2,))
    monkeypatch.setattr(solver, "MOST_SLOTS", 2)


@pytest.mark.skipif(cpu.library() is None, reason="no native library")
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("homes", PLACES[:4])
@pytest.mark.parametrize("hands", ["split", "host"])
@pytest.mark.parametrize("passes", [1, pytest.param(2, marks=pytest.mark.full)])
def test_the_cores_are_not_early(
    homes: str, update: str, hands: Hands, passes: int, short_ring: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody is early who comes behind them."""
    with simulated(monkeypatch, seed=passes) as gpu:
        updated = with_cores(monkeypatch, gpu, hands, 0.001)
        model, optimizer = prepared(small.build(), homes, update=update, micro_batches=passes)
        loop(model, optimizer, lambda step: of_length(model, 5, step), passes, 0.0 if update == "eager" else 0.5)
    assert updated
    check(gpu)


@pytest.mark.parametrize("update", UPDATES)
def test_lent_slots_are_free_when_they_are_used(update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handing, "SPARE", 0)
    monkeypatch.setattr(solver, "DEPTHS", (2,))
    monkeypatch.setattr(solver, "MOST_SLOTS", 2)
    with simulated(monkeypatch, seed=2) as gpu:
        model, optimizer = prepared(small.build(), PLACES[0], update=update)
        engine = overspill.api._engine(model)
        program = engine.executor.program
        engine.executor.program = dataclasses.replace(program, limits=dataclasses.replace(program.limits, lent=1 << 40))
        engine.parts.made.grads.rooms.loans.allow(bytes_in_rooms(program.model.units, program.placements), 1 << 40)
        loop(model, optimizer, lambda step: of_length(model, 5, step))
    check(gpu)


class Normed(nn.Module):
    """Norms are units of their own, and fp32: their pages have nothing before the first step, so nothing is fetched."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        return out


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("homes", PLACES[:4:3])
def test_states_are_made_in_memory_that_is_free(homes: str, update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated(monkeypatch) as gpu:
        model, optimizer = prepared(Normed(), homes, update=update)
        loop(model, optimizer, lambda step: model(torch.randn(6, 8)).square().mean())
    check(gpu)


class Switch(torch.autograd.Function):
    """What follows runs on another stream; each way it waits for this one, or does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to: Stream, waits: bool, waits_back: bool) -> Tensor:
        ctx.before, ctx.waits = to.gpu.current, waits_back
        to.gpu.go_on(to, waits)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.before.gpu.go_on(ctx.before, ctx.waits)
        return gradient, None, None, None


class Join(torch.autograd.Function):
    """Both ways this stream waits for another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Stream) -> Tensor:
        ctx.other = other
        other.gpu.follow(other.gpu.current.cuda_stream, other.cuda_stream)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.other.gpu.follow(ctx.other.gpu.current.cuda_stream, ctx.other.cuda_stream)
        return gradient, None


class Branches(nn.Module):
    """One layer of each block runs on a stream of its own, every second time the other one; now this stream uses a
    block first, now that."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.ModuleDict({name: nn.Linear(8, 8) for name in "ab"}) for _ in range(4))
        self._side = [Stream(gpu, "side")]
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        side, here, beside = self._side[0], *("ab" if self.calls % 2 else "ba")
        self.calls += 1
        for i, block in enumerate(self.blocks):
            late = i % 2 == 0
            one = None if late else block[here](torch.tanh(Join.apply(x, side)))
            other = Switch.apply(x, side, True, late)
            other = Switch.apply(block[beside](other), side.gpu.main, False, True)
            one = block[here](torch.tanh(x)) if one is None else one
            x = one + Join.apply(other, side)
        return x


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("homes", PLACES[:4])
@pytest.mark.parametrize("passes", [1, 2])
def test_memory_belongs_to_a_stream(homes: str, update: str, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches of the model: what one of them waited for is let go, and the memory is another one's."""
    with simulated(monkeypatch) as gpu:
        model, optimizer = prepared(Branches(gpu), homes, 0, update=update, micro_batches=passes)

        def loss(step: int) -> Tensor:
            # After a backward pass, torch's own engine lets the caller's stream come behind it.
            gpu.go_on(gpu.main)
            x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
            found: Tensor = model(x).float().sum()
            return found

        loop(model, optimizer, loss, passes)
    check(gpu)


def test_who_is_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ticket, "wait", lambda ticket, stream=None: ticket.wait_issued())
    with simulated(monkeypatch, slow=0.95) as gpu:
        model, optimizer = prepared(small.build(), PLACES[3], 0)
        loop(model, optimizer, lambda step: of_length(model, 5, step))
    assert any("on main does not come behind aten.copy_.default [MainThread] on lane up" in each for each in gpu.found)
    assert any("main has memory that lane down still needs" in each for each in gpu.found)


@pytest.mark.skipif(cpu.library() is None, reason="no native library")
def test_cores_that_are_early_are_found(short_ring: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated(monkeypatch, slow=0.95) as gpu:
        with_cores(monkeypatch, gpu, "host")
        run = Cores._run
        monkeypatch.setattr(Cores, "_run", lambda cores, task: run(cores, dataclasses.replace(task, arrived=None)))
        model, optimizer = prepared(small.build(), PLACES[2])
        loop(model, optimizer, lambda step: of_length(model, 5, step))
    assert any("on cores does not come behind aten.copy_.default [overspill-pager] on way down" in f for f in gpu.found)
