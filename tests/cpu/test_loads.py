"""model.load_state_dict and optimizer.load_state_dict: what is wrong is refused as torch does it, or before anything
changes; nobody goes on with what a load left that broke off."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.errors import ModelError, StateError
from overspill.runtime.door import Closed
from tests import small
from tests.both import AWAY, adamw, everywhere, prepare, train
from tests.reference import differing, weights

MIXED = r"expected a whole model, found that .* broke off before its end: what .* load a whole checkpoint or state dict"
TOKENS = torch.arange(10).view(2, 5)
USES: dict[str, Callable[[Any, Any, Path], object]] = {
    "forward": lambda model, optimizer, path: model(TOKENS),
    "read": lambda model, optimizer, path: model.blocks[2].up.weight.sum(),
    "write": lambda model, optimizer, path: model.blocks[2].up.weight.data.zero_(),
    "state dict": lambda model, optimizer, path: model.state_dict(),
    "optimizer": lambda model, optimizer, path: optimizer.state_dict(),
    "settle": lambda model, optimizer, path: overspill.settle(model),
    "save": lambda model, optimizer, path: overspill.save(path / "saved", model, optimizer),
    "close": lambda model, optimizer, path: overspill.close(model),
}


class Broken(BaseException):
    """Not an Exception, like Ctrl-C."""


def breaks_off(model: Any, values: Mapping[str, Any], error: type[BaseException] = Broken) -> None:
    """Load into the model, until the third block."""

    def stop(*_: object) -> None:
        raise error

    handle = model.blocks[2].register_load_state_dict_pre_hook(stop)
    with pytest.raises(error):
        model.load_state_dict(values)
    handle.remove()


def others(model: Any) -> dict[str, torch.Tensor]:
    return {name: value + 1 for name, value in model.state_dict().items()}


@everywhere
@pytest.mark.parametrize("error", [Broken, RuntimeError, KeyboardInterrupt])
def test_nobody_goes_on_with_half_a_state_dict(error: type[BaseException], place: Any, tmp_path: Path) -> None:
    model, optimizer = prepare(place, tmp_path)
    train(model, optimizer, 2)
    before, values = weights(model), others(model)
    breaks_off(model, values, error)
    for name, use in USES.items():
        with pytest.raises(StateError, match=MIXED):
            use(model, optimizer, tmp_path)
            raise AssertionError(name)
    model.load_state_dict(values)
    assert differing(weights(model), values) == []
    model.load_state_dict(before)
    train(model, optimizer, 1)
    overspill.close(model)


@everywhere
def test_a_load_of_another_model_is_none_of_this_one(place: Any, tmp_path: Path) -> None:
    """It may read this one's parameters, which says nothing of loads that broke off, and is refused after one."""
    model, _ = prepare(place, tmp_path)
    values, other = others(model), small.build()

    def refuse(*_: object) -> None:
        raise ValueError("another version")

    handle = model.register_load_state_dict_pre_hook(refuse)
    with pytest.raises(ValueError, match="another version"):
        model.load_state_dict(values)
    handle.remove()
    other.load_state_dict(dict(model.named_parameters()), strict=False)
    assert differing(weights(model), weights(other)) == []
    breaks_off(model, values)
    with pytest.raises(RuntimeError, match="expected a whole model"):
        other.load_state_dict(dict(model.named_parameters()), strict=False)


class Normed(nn.Module):
    """Blocks with buffers, or without."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), norm(8)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_a_load_that_breaks_off_while_all_is_open(norm: Any, tmp_path: Path) -> None:
    """Its own error comes out, all is closed again, and what was written before counts."""
    model: Any = Normed(norm)
    model, _ = overspill.prepare(model, adamw(model), precision="fp32", place=AWAY, nvme=tmp_path)
    expected = {**others(model), "scale": torch.full((8,), 7.0)}

    def stop(*_: object) -> None:
        raise Broken

    handle = model.blocks[2].register_load_state_dict_pre_hook(stop)
    with pytest.raises(Broken), overspill.full(model), torch.no_grad():
        model.scale.fill_(7)
        model.blocks.load_state_dict(part(expected, "blocks."))
    handle.remove()
    assert all(isinstance(p, Closed) for p in model.parameters())
    with pytest.raises(StateError, match=MIXED):
        model(torch.randn(4, 8))
    model.blocks.load_state_dict(part(expected, "blocks."))
    overspill.close(model)
    assert differing(dict(model.state_dict()), expected) == []


def test_only_a_load_of_the_same_makes_it_whole(tmp_path: Path) -> None:
    model, optimizer = prepare(AWAY, tmp_path)
    values = others(model)
    overspill.save(tmp_path / "saved", model, optimizer)
    breaks_off(model, values)
    model.blocks[1].load_state_dict(part(values, "blocks.1."))
    model.load_state_dict(dict(list(values.items())[1:]), strict=False)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**values, "head.weight": torch.zeros(1)})
    optimizer.load_state_dict({"state": {}, "param_groups": copy.deepcopy(plain_groups(optimizer))})
    with pytest.raises(StateError, match=MIXED):
        model(TOKENS)
    overspill.load(tmp_path / "saved", model, optimizer)
    model(TOKENS)

    def stop(*_: object) -> None:
        raise Broken

    handle = model.blocks[1].up.register_load_state_dict_post_hook(stop)
    with pytest.raises(Broken):
        model.blocks[1].load_state_dict(part(values, "blocks.1."))
    handle.remove()
    with pytest.raises(StateError, match=MIXED):
        model(TOKENS)
    model.blocks[1].load_state_dict(part(values, "blocks.1."))
    model(TOKENS)


def part(values: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def plain_groups(optimizer: Any) -> list[dict[str, Any]]:
    numbers = iter(range(1000))
    return [{**group, "params": [next(numbers) for _ in group["params"]]} for group in optimizer.param_groups]


@everywhere
def test_what_broke_off_before_it_changed_anything_changes_nothing(place: Any, tmp_path: Path) -> None:
    model, optimizer = prepare(place, tmp_path)
    before = weights(model)

    def refuse(*_: object) -> None:
        raise ValueError("another version")

    handle = model.register_load_state_dict_pre_hook(refuse)
    with pytest.raises(ValueError, match="another version"):
        model.load_state_dict(before)
    handle.remove()
    train(model, optimizer, 1)


@everywhere
@pytest.mark.parametrize("strict", [True, False])
def test_what_does_not_fit_is_as_in_plain_torch(strict: bool, place: Any, tmp_path: Path) -> None:
    """The others are loaded, and the same is raised."""
    plain = small.build()
    model, optimizer = prepare(place, tmp_path)
    values = {name: value + 1 for name, value in plain.state_dict().items()}
    for wrong in (
        {**values, "blocks.1.up.weight": torch.zeros(3)},
        {**values, "new": torch.zeros(3)},
        dict(list(values.items())[1:]),
    ):
        said = []
        for each in (plain, model):
            try:
                said.append(str(each.load_state_dict(wrong, strict=strict)))
            except RuntimeError as error:
                said.append(str(error))
        assert said[0] == said[1]
        assert differing(weights(model), weights(plain)) == []
    train(model, optimizer, 1)


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "shape": lambda state: state.update(exp_avg=torch.zeros(3)),
    "key": lambda state: state.update(other=torch.zeros(3)),
}


@everywhere
@pytest.mark.parametrize("wrong", WRONG)
def test_states_that_do_not_fit_are_refused_before_anything_changes(wrong: str, place: Any, tmp_path: Path) -> None:
    model: Any = small.build()
    model, optimizer = overspill.prepare(model, adamw(model), precision="bf16", place=place, nvme=tmp_path)
    train(model, optimizer, 2)
    before = optimizer.state_dict()
    given = copy.deepcopy(before)
    for state in given["state"].values():
        state["exp_avg"] += 1
    given["param_groups"][0]["lr"] = 7.0
    WRONG[wrong](given["state"][max(given["state"])])
    with pytest.raises(ModelError, match="expected"):
        optimizer.load_state_dict(given)
    found = optimizer.state_dict()
    assert found["param_groups"] == before["param_groups"]
    for index, state in before["state"].items():
        assert all(torch.equal(value, found["state"][index][key]) for key, value in state.items())


@everywhere
def test_nobody_goes_on_with_half_of_the_states(place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = prepare(place, tmp_path)
    train(model, optimizer, 2)
    states, update = optimizer.state_dict(), optimizer.engine.parts.made.update
    write = update.write

    def stop(unit: int, values: Any) -> None:
        if unit == 3:
            raise Broken
        write(unit, values)

    monkeypatch.setattr(update, "write", stop)
    with pytest.raises(Broken):
        optimizer.load_state_dict(states)
    monkeypatch.undo()
    for use in USES.values():
        with pytest.raises(StateError, match=MIXED):
            use(model, optimizer, tmp_path)
    optimizer.load_state_dict(states)
    train(model, optimizer, 1)
