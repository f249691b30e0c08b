"""Every optimizer of torch that treats parameters one by one gives its own bits; the others are refused."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import overspill
from overspill.errors import ModelError, OptionError
from tests import small
from tests.both import HERE, adamw, check, everywhere, losses, prepare, train
from tests.reference import differing, same_bits, weights

Make = Callable[[nn.Module], optim.Optimizer]


def of(kind: type[optim.Optimizer], **keywords: Any) -> Make:
    return lambda model: kind(model.parameters(), **keywords)


ALL: dict[str, Make] = {
    "AdamW": of(optim.AdamW, lr=1e-2),
    "AdamW amsgrad": of(optim.AdamW, lr=1e-2, amsgrad=True),
    "AdamW maximize": of(optim.AdamW, lr=1e-2, maximize=True),
    "AdamW foreach": of(optim.AdamW, lr=1e-2, foreach=True),
    "AdamW one by one": of(optim.AdamW, lr=1e-2, foreach=False),
    "AdamW fused": of(optim.AdamW, lr=1e-2, fused=True),
    "Adam": of(optim.Adam, lr=1e-2, weight_decay=0.1),
    "SGD": of(optim.SGD, lr=1e-1),
    "SGD momentum": of(optim.SGD, lr=1e-1, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "SGD nesterov": of(optim.SGD, lr=1e-1, momentum=0.9, nesterov=True),
    "SGD foreach": of(optim.SGD, lr=1e-1, momentum=0.9, foreach=True, maximize=True),
    "SGD fused": of(optim.SGD, lr=1e-1, momentum=0.9, fused=True),
    "Adagrad": of(optim.Adagrad, lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adagrad fused": of(optim.Adagrad, lr=1e-2, fused=True),
    "RAdam": of(optim.RAdam, lr=1e-2, decoupled_weight_decay=True, weight_decay=0.1),
    "NAdam": of(optim.NAdam, lr=1e-2),
    "Adafactor": of(optim.Adafactor, lr=1e-2),
    "RMSprop": of(optim.RMSprop, lr=1e-2),
    "RMSprop centered": of(optim.RMSprop, lr=1e-2, momentum=0.5, centered=True),
    "Adadelta": of(optim.Adadelta),
    "Adamax": of(optim.Adamax, lr=1e-2),
    "ASGD": of(optim.ASGD, lr=1e-2, t0=2, lambd=1e-2),
    "Rprop": of(optim.Rprop, lr=1e-2),
}
FEW = ["AdamW", "AdamW amsgrad", "SGD", "SGD momentum", "Adagrad", "NAdam", "Adafactor", "Rprop"]


def states(model: nn.Module, optimizer: optim.Optimizer) -> list[Any]:
    return [sorted(optimizer.state[p].items()) if optimizer.state.get(p) else None for p in model.parameters()]


def loop(model: nn.Module, optimizer: optim.Optimizer) -> list[Any]:
    """Three usual steps, one that skips a unit, and the states at the end."""
    found: list[Any] = train(model, optimizer)
    found += train(model, optimizer, 1, skip=1)
    return [*found, states(model, optimizer)]


@everywhere
@pytest.mark.parametrize("name", ALL)
def test_every_optimizer_gives_its_own_bits(name: str, place, tmp_path: Path) -> None:
    check(loop, place, tmp_path, optimizer=ALL[name])


def matrices() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(i, j, bias=False) for i, j in ((7, 12), (12, 30), (30, 5))))


@everywhere
def test_muon(place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        for i in range(4):
            model(torch.full((3, 7), 0.2 * (i + 1))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return states(model, optimizer)

    check(loop, place, tmp_path, build=matrices, optimizer=of(optim.Muon, lr=1e-2))


# ---- optimizers of the user's own


class Signed(optim.Optimizer):
    """Separable: keeps one tensor per parameter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 0.1)
                    p.add_(mean.sign(), alpha=-group["lr"])


class Counting(Signed):
    """Counts its steps in the group: once per call, so unit by unit it would count too often."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1


class Subclass(optim.AdamW):
    """Whatever it changes, overspill does not know it."""


@everywhere
def test_an_optimizer_of_the_users_own(place, tmp_path: Path) -> None:
    plain = small.build()
    expected = train(plain, Signed(plain.parameters(), 1e-2))
    model = small.build()
    optimizer = Signed(model.parameters(), 1e-2)
    with pytest.raises(ModelError, match=r"found .*Signed; .*separable=True"):
        overspill.prepare(model, optimizer, place=place, nvme=tmp_path, precision="fp32")
    model, optimizer = overspill.prepare(model, optimizer, place=place, nvme=tmp_path, separable=True, precision="fp32")
    assert train(model, optimizer) == expected
    assert differing(weights(model), weights(plain)) == []


def test_a_subclass_of_a_known_optimizer_is_an_unknown_one() -> None:
    model = small.build()
    with pytest.raises(ModelError, match=r"Subclass; .*separable=True"):
        overspill.prepare(model, Subclass(model.parameters()), precision="fp32")


@everywhere
@pytest.mark.parametrize("known", [True, False], ids=["known key", "new key"])
def test_an_optimizer_that_counts_in_its_groups_is_refused_at_its_first_update(
    known: bool, place, tmp_path: Path
) -> None:
    model = small.build()
    optimizer = Counting(model.parameters(), 1e-2)
    if known:
        optimizer.param_groups[0]["steps"] = 0
    model, optimizer = overspill.prepare(model, optimizer, place=place, nvme=tmp_path, separable=True, precision="fp32")
    with pytest.raises(ModelError, match=r"Counting .* found 'steps' changed from .* unit by unit"):
        train(model, optimizer, 2)


@pytest.mark.parametrize(
    ("kind", "why"), [(optim.LBFGS, "couples all parameters"), (optim.SparseAdam, "needs sparse gradients")]
)
@pytest.mark.parametrize("separable", [None, True])
def test_optimizers_that_cannot_run_unit_by_unit_are_refused(
    kind: type[optim.Optimizer], why: str, separable: bool | None
) -> None:
    model = small.build()
    with pytest.raises(ModelError, match=f"found {kind.__name__}, which {why}; use "):
        overspill.prepare(model, kind(model.parameters()), separable=separable, precision="fp32")


# ---- state dicts


@everywhere
@pytest.mark.parametrize("name", FEW)
def test_from_a_plain_optimizer_and_back(name: str, place, tmp_path: Path) -> None:
    """3 plain steps, 3 prepared ones, 3 plain ones: as 9 plain ones."""
    make = ALL[name]
    whole = small.build()
    steps = make(whole)
    expected = train(whole, steps, 9)

    first = small.build()
    optimizer = make(first)
    found = train(first, optimizer, 3)
    second, prepared = prepare(place, tmp_path, optimizer=make)
    move(first, second), prepared.load_state_dict(optimizer.state_dict())
    found += train(second, prepared, 3)
    third = small.build()
    optimizer = make(third)
    move(second, third), optimizer.load_state_dict(prepared.state_dict())
    found += train(third, optimizer, 3)
    assert found == expected
    assert differing(weights(third), weights(whole)) == []
    assert same_states(optimizer.state_dict(), steps.state_dict())


def move(source: nn.Module, to: nn.Module) -> None:
    """Weights, and the place in the stream of batches."""
    to.load_state_dict(source.state_dict())
    for _ in range(3 if not hasattr(source, "seen") else 6):
        next(losses(to, 1))
    to.seen = True


def same_states(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_states(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same_states, a, b))
    return same_bits(a, b) if isinstance(a, torch.Tensor) else a == b


@everywhere
def test_a_state_dict_is_torchs_and_a_copy(place, tmp_path: Path) -> None:
    plain = small.build()
    steps = adamw(plain)
    train(plain, steps)
    model, optimizer = prepare(place, tmp_path)
    assert same_states(optimizer.state_dict(), adamw(small.build()).state_dict()), "before the first step"
    train(model, optimizer)
    taken = optimizer.state_dict()
    assert same_states(taken, steps.state_dict())
    train(model, optimizer)
    assert same_states(taken, steps.state_dict()), "later steps do not reach it"


@everywhere
def test_loading_keeps_the_groups_and_takes_their_values(place, tmp_path: Path) -> None:
    model, optimizer = prepare(place, tmp_path)
    train(model, optimizer)
    groups = optimizer.param_groups
    inner = [id(group) for group in groups]
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = torch.tensor(0.125)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups is groups and [id(group) for group in groups] == inner
    assert groups[0]["lr"] == 0.125
    train(model, optimizer, 1)
    scheduler.step()
    assert saved["param_groups"][0]["lr"] == 0.125, "what was loaded stays the user's"


@everywhere
def test_load_hooks_run(place, tmp_path: Path) -> None:
    ran = []

    def halved(optimizer, state_dict):
        ran.append("before")
        return {**state_dict, "param_groups": [{**g, "lr": 0.5} for g in state_dict["param_groups"]]}

    _, optimizer = prepare(place, tmp_path)
    optimizer.register_load_state_dict_pre_hook(halved)
    optimizer.register_load_state_dict_post_hook(lambda optimizer: ran.append("after"))
    optimizer.register_state_dict_post_hook(lambda optimizer, taken: {**taken, "note": 1})
    taken = optimizer.state_dict()
    optimizer.load_state_dict(taken)
    assert (ran, taken["note"], optimizer.param_groups[0]["lr"]) == (["before", "after"], 1, 0.5)


def test_loading_the_groups_of_another_optimizer(tmp_path: Path) -> None:
    model, optimizer = prepare(HERE, tmp_path)
    train(model, optimizer)
    before = optimizer.state_dict()
    saved = copy.deepcopy(before)
    saved["param_groups"][0]["params"].pop()
    with pytest.raises(ModelError, match=r"expected groups of \[27\] parameters, found \[26\] .*; build the optimizer"):
        optimizer.load_state_dict(saved)
    assert same_states(optimizer.state_dict(), before), "nothing was changed"


@everywhere
@pytest.mark.parametrize("name", FEW)
def test_states_that_exist_before_prepare(name: str, place, tmp_path: Path) -> None:
    """A run that was begun plainly goes on prepared."""

    def half_way(model, optimizer):
        found = train(model, optimizer, 3)
        return model, optimizer, found

    plain = small.build()
    plain, steps, _ = half_way(plain, ALL[name](plain))
    expected = train(plain, steps, 3)
    model = small.build()
    model, optimizer, _ = half_way(model, ALL[name](model))
    model, optimizer = overspill.prepare(model, optimizer, place=place, nvme=tmp_path, precision="fp32")
    assert train(model, optimizer, 3) == expected
    assert differing(weights(model), weights(plain)) == []
    assert same_states(optimizer.state_dict(), steps.state_dict())


@everywhere
def test_the_view_of_states(place, tmp_path: Path) -> None:
    model, optimizer = prepare(place, tmp_path)
    assert len(optimizer.state) == 0
    train(model, optimizer, 1, skip=1)
    held = set(map(id, model.parameters())) - set(map(id, model.blocks[1].parameters()))
    assert {id(p) for p in optimizer.state} == held
    assert optimizer.state[model.blocks[1].up.weight] == {}
    assert optimizer.state[model.last.bias].keys() == {"step", "exp_avg", "exp_avg_sq"}
    optimizer.state[model.last.bias]["exp_avg"].fill_(9.0)
    assert optimizer.state[model.last.bias]["exp_avg"].max() < 9.0, "copies are handed out"


@everywhere
def test_a_closure_is_refused(place, tmp_path: Path) -> None:
    _, optimizer = prepare(place, tmp_path)
    with pytest.raises(OptionError, match="without a closure, found one; evaluate the loss in the loop"):
        optimizer.step(lambda: 0.0)
