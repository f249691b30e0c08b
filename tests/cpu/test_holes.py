"""Uses that nothing else in the tests makes, each of which once went wrong."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import overspill
from overspill.errors import BudgetError, ModelError, StateError, TierError
from overspill.tiers import NvmeTier
from tests import small
from tests.both import AWAY, HERE, adamw, check, everywhere, losses, prepare, train
from tests.places import prepare_tight
from tests.reference import differing, same_bits, weights

HOST = dict.fromkeys(("weight", "grad", "state"), "host")


class Positions(nn.Module):
    """Hands out a view of its own weight."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.table = nn.Parameter(torch.randn(9, 8))

    def forward(self, length: int) -> torch.Tensor:
        return {"slice": lambda: self.table[:length], "transpose": lambda: self.table.t().t()[:length]}[self.how]()


class Learned(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.positions = nn.ModuleList([Positions(how)])
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.positions[0](x.shape[0])
        for block in self.blocks:
            x = torch.tanh(block(x)) * table
        return x + table


class Handed(nn.Module):
    """A block that computes with a weight of its caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.own(x) @ weight)


class Caller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Handed() for _ in range(4))
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.weight)
        return x


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    for _ in range(4):
        model(torch.randn(5, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.randn(5, 8))
    return weights(model)


@pytest.mark.parametrize("build", [lambda: Learned("slice"), lambda: Learned("transpose"), Caller])
def test_weights_that_are_used_outside_of_their_own_unit(build, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = build()
    expected = trained(plain, adamw(plain))
    torch.manual_seed(0)
    model = build()
    assert differing(trained(*prepare_tight(model, adamw(model), HOST, tmp_path)), expected) == []


@everywhere
def test_inference_mode_as_the_first_use_after_a_step(place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        seen = []
        for _ in range(3):
            train(model, optimizer, 1)
            with torch.inference_mode():
                seen.append(model(next(small.batches())["tokens"]).clone())
        return seen

    check(loop, place, tmp_path)


@everywhere
def test_changes_of_many_gradients_at_once(place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        for loss in losses(model, 3):
            loss.backward()
            gradients = [p.grad for p in model.parameters()]
            torch._foreach_add_(gradients, 0.25)
            torch._foreach_lerp_(gradients, [torch.ones_like(g) for g in gradients], 0.125)
            torch._foreach_addcmul_(gradients, gradients, gradients, value=0.5)
            optimizer.step()
            optimizer.zero_grad()

    check(loop, place, tmp_path)


@everywhere
def test_data_of_a_gradient(place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        for loss in losses(model, 3):
            loss.backward()
            for p in model.parameters():
                p.grad.data = p.grad.data.sign()
            optimizer.step()
            optimizer.zero_grad()

    check(loop, place, tmp_path)


@everywhere
def test_a_step_with_all_weights_open(place, tmp_path: Path) -> None:
    plain = small.build()
    train(plain, adamw(plain), 2)
    model, optimizer = prepare(place, tmp_path)
    with overspill.full(model):
        train(model, optimizer, 2)
        assert same_bits(model.blocks[2].up.weight.detach(), plain.blocks[2].up.weight.detach())


@everywhere
def test_a_state_dict_that_broke_off(place, tmp_path: Path) -> None:
    model, optimizer = prepare(place, tmp_path)

    def fail(*_):
        raise RuntimeError("no")

    handle = model.blocks[1].register_state_dict_post_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        model.state_dict()
    handle.remove()
    train(model, optimizer, 2)
    plain = small.build()
    train(plain, adamw(plain), 2)
    assert same_bits(model.blocks[0].up.weight.detach(), plain.blocks[0].up.weight.detach())


def test_storage_that_fails_while_weights_move_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = []
    real = NvmeTier.store

    def store(self, slot, src):
        stored.append(slot)
        if len(stored) == 4:
            raise TierError("expected to write, found a broken disk; change it")
        real(self, slot, src)

    monkeypatch.setattr(NvmeTier, "store", store)
    model = small.build()
    own = adamw(model)
    with pytest.raises(TierError, match="broken disk"):
        overspill.prepare(
            model, own, place=dict.fromkeys(("weight", "grad", "state"), "nvme"), nvme=tmp_path, precision="fp32"
        )
    assert list(tmp_path.iterdir()) == []
    plain = small.build()
    assert train(model, own) == train(plain, adamw(plain))


def test_more_weights_at_once_than_the_budget_has_room_for(tmp_path: Path) -> None:
    model = small.build(blocks=64)
    optimizer = adamw(model)
    place = {"weight": "host", "grad": "host", "state": "host"}
    least = overspill.plan(model, optimizer, place=place, gpu="64MiB", precision="fp32")
    needed = least.peak("device") - least.bytes_of("device", "activations") + least.model.units[1].weight_bytes
    model, optimizer = overspill.prepare(model, optimizer, place=place, gpu=needed, precision="fp32")
    average = [torch.zeros_like(p) for p in model.parameters()]
    with pytest.raises(BudgetError, match=r"needs .* of weights there at once.* fewer parameters at a time"):
        torch._foreach_lerp_(average, list(model.parameters()), 0.1)
    for mean, p in zip(average, model.parameters(), strict=True):
        mean.lerp_(p.detach(), 0.1)
    train(model, optimizer, 1)


def test_a_plan_beyond_the_budgets_given() -> None:
    model = small.build()
    made = overspill.plan(model, adamw(model), gpu="64MiB", place=HOST, precision="fp32")
    for budget in ({"gpu": 4096}, {"host": 4096}):
        with pytest.raises(BudgetError, match="expected a plan within"):
            overspill.prepare(model, adamw(model), place=made, precision="fp32", **budget)


@pytest.mark.parametrize("place", [HERE, AWAY])
def test_an_optimizer_that_counts_on_itself(place, tmp_path: Path) -> None:
    class Counting(torch.optim.SGD):
        count = 0

        def step(self, closure=None):
            self.count += 1
            return super().step(closure)

    model = small.build()
    keywords = {"place": place, "nvme": tmp_path, "separable": True}
    model, optimizer = overspill.prepare(model, Counting(model.parameters(), lr=0.1), **keywords)
    with pytest.raises(ModelError, match=r"self\.count"):
        train(model, optimizer, 2)


def test_a_forked_child_is_refused(tmp_path: Path) -> None:
    model, optimizer = prepare(AWAY, tmp_path)
    train(model, optimizer, 1)
    child = os.fork()
    if child == 0:
        try:
            model.blocks[0].up.weight.sum()
        except StateError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_forwards_without_steps_are_forgotten(tmp_path: Path) -> None:
    model, _ = prepare(AWAY, tmp_path)
    with torch.no_grad():
        for _ in range(500):
            model(torch.zeros(1, 2, dtype=torch.long))
    assert len(overspill.api._engine(model).executor.state.seen["train"]) <= 4096


@everywhere
def test_buffers_come_back_where_they_were(place, tmp_path: Path) -> None:
    model, _ = prepare(place, tmp_path)
    assert overspill.close(model).shift.device.type == "cpu"
