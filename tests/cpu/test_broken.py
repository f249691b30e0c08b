"""A backward pass that broke off, where updates begin in it: nobody goes on with what that left; all ways out work."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import overspill
from overspill.errors import StateError, TierError
from overspill.runtime import parts, rooms
from tests import both, small
from tests.both import adamw
from tests.cpu.test_ahead import HOMES
from tests.reference import differing, weights

BETWEEN = (
    r"expected a whole model, found that a backward pass broke off after updates of '.*blocks\..* had begun, with "
    r"update='eager': the model is between two steps; load a checkpoint \(overspill.load\).*overspill.close\(model\)"
)
places = pytest.mark.parametrize("place", ["device", "host", "nvme", "states"])


@pytest.fixture(params=[True, False], ids=["ahead", "on demand"], autouse=True)
def paged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether pages are updated ahead of their use, as on a GPU."""
    monkeypatch.setattr(parts, "PAGED", {"cpu"} if request.param else set())
    monkeypatch.setattr(rooms, "PIECES", {"cpu"} if request.param else set())
    return bool(request.param)


def prepared(place: str, nvme: Path, model: Any = None, **keywords: Any) -> tuple[Any, Any]:
    model = small.build() if model is None else model
    keywords = {"update": "eager", "gpu": "64MiB", "host": "64MiB", "place": HOMES[place], "nvme": nvme, **keywords}
    return overspill.prepare(model, adamw(model), **keywords)


def loss_of(model: nn.Module, number: int) -> Tensor:
    tokens = torch.arange(number, number + 10).view(2, 5) % small.VOCABULARY
    return model(tokens).float().square().mean()


def train(model: nn.Module, optimizer: Any, *numbers: int) -> list[float]:
    found = []
    for number in numbers:
        loss = loss_of(model, number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def break_off(model: Any, at: nn.Parameter | None = None, number: int = 7) -> None:
    """In the middle of the backward pass, or where the gradient of some parameter is there."""
    loss = loss_of(model, number)
    hook = (model.blocks[1].up.weight if at is None else at).register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    hook.remove()


def load_both(model: Any, optimizer: Any, saved: tuple[Any, Any]) -> None:
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])


USES: dict[str, Callable[[Any, Any, Path], Any]] = {
    "step": lambda model, optimizer, path: optimizer.step(),
    "forward": lambda model, optimizer, path: loss_of(model, 1),
    "evaluation": lambda model, optimizer, path: torch.no_grad()(loss_of)(model, 1),
    "another pass": lambda model, optimizer, path: (optimizer.zero_grad(), loss_of(model, 1).backward()),
    "weights": lambda model, optimizer, path: model.blocks[3].up.weight.sum(),
    "weights that are old": lambda model, optimizer, path: model.embedding.weight.sum(),
    "state dict": lambda model, optimizer, path: model.state_dict(),
    "states": lambda model, optimizer, path: optimizer.state_dict(),
    "settle": lambda model, optimizer, path: overspill.settle(model),
    "full": lambda model, optimizer, path: overspill.full(model).__enter__(),
    "save": lambda model, optimizer, path: overspill.save(path / "saved", model, optimizer),
    "the model's state dict alone": lambda model, optimizer, path: (
        model.load_state_dict(small.build().state_dict()),
        loss_of(model, 1),
    ),
}


@pytest.mark.parametrize("use", USES)
def test_nobody_goes_on(use: str, tmp_path: Path) -> None:
    model, optimizer = prepared("states", tmp_path)
    train(model, optimizer, 1, 2)
    break_off(model)
    for _ in range(2):
        with pytest.raises(StateError, match=BETWEEN):
            USES[use](model, optimizer, tmp_path)
    overspill.close(model)


@places
@pytest.mark.parametrize("way", ["load", "load_state_dict"])
@pytest.mark.parametrize("dropped", [True, pytest.param(False, marks=pytest.mark.full)])
def test_what_is_loaded_is_whole_again(way: str, dropped: bool, place: str, tmp_path: Path) -> None:
    def run(broken: bool) -> tuple[list[float], dict[str, Tensor]]:
        model, optimizer = prepared(place, tmp_path)
        train(model, optimizer, 1, 2)
        overspill.save(tmp_path / "saved", model, optimizer)
        saved = model.state_dict(), optimizer.state_dict()
        if broken:
            train(model, optimizer, 5)
            break_off(model)
            if dropped:
                optimizer.zero_grad(set_to_none=False)
            if way == "load":
                overspill.load(tmp_path / "saved", model, optimizer)
            else:
                load_both(model, optimizer, saved)
        found = train(model, optimizer, 3, 4)
        return found, weights(overspill.close(model))

    found, expected = run(True), run(False)
    assert found[0] == expected[0]
    # A state dict has weights in their own dtype: what a master has beyond that is rounded away.
    assert way == "load_state_dict" or not differing(found[1], expected[1])


@places
def test_it_is_closed_as_it_is(place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And whoever closes in a `finally` hears of what broke the pass off, of nothing else."""
    model, optimizer = prepared(place, tmp_path)
    train(model, optimizer, 1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss = loss_of(model, 2)
    model.blocks[1].up.weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        try:
            loss.backward()
        finally:
            overspill.close(model)
    assert caught.value.__context__ is None
    assert "between two steps: it is given back as it is" in caplog.text
    after = dict(model.named_parameters())
    assert all(type(p) is nn.Parameter for p in after.values())
    assert not torch.equal(after["blocks.3.up.weight"], before["blocks.3.up.weight"])
    assert torch.equal(after["blocks.0.up.weight"].to(torch.bfloat16), before["blocks.0.up.weight"].to(torch.bfloat16))


@pytest.mark.parametrize("to_none", [True, False])
@places
def test_a_pass_that_broke_off_before_any_update_began_is_dropped(place: str, to_none: bool, tmp_path: Path) -> None:
    """Some gradients of a unit had come. Of the next pass they count for nothing."""

    def run(broken: bool) -> tuple[list[float], dict[str, Tensor]]:
        model, optimizer = prepared(place, tmp_path)
        found = train(model, optimizer, 1, 2)
        if broken:
            break_off(model, model.last.bias)
            optimizer.zero_grad(set_to_none=to_none)
        found += train(model, optimizer, 3, 4)
        return found, weights(overspill.close(model))

    one, other = run(True), run(False)
    assert one[0] == other[0]
    assert not differing(one[1], other[1])


def test_a_pass_that_broke_off_before_it_began_leaves_the_step_to_be_taken(tmp_path: Path) -> None:
    """torch refuses it, before it has brought anything: weights that it needs are newer than its graph."""

    def run(broken: bool) -> dict[str, Tensor]:
        model, optimizer = prepared("states", tmp_path)
        first, second = loss_of(model, 1), loss_of(model, 2)
        first.backward()
        if broken:
            with pytest.raises(RuntimeError):
                second.backward()
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, 3)
        return weights(overspill.close(model))

    assert not differing(run(True), run(False))


class Checkpointed(small.Small):
    """Trains inside of re-entrant checkpoints only: each has a backward pass of its own, which ends before the outer
    one, in which no gradient comes."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False
        self.embedding.requires_grad_(False)
        self.last.requires_grad_(False)

    def forward(self, tokens: Tensor, skip: int | None = None) -> Tensor:
        x = (self.embedding(tokens) + self.shift).requires_grad_()
        for i, block in enumerate(self.blocks):
            x = checkpoint(lambda x, i=i, block=block: self._run(x, i, block), x, use_reentrant=True)
        return self.head(self.last(x))

    def _run(self, x: Tensor, number: int, block: nn.Module) -> Tensor:
        if self.fails and number == 1 and torch.is_grad_enabled():
            raise ZeroDivisionError
        return block(x)


@pytest.mark.parametrize("where", ["in the outer pass", "in the inner pass"])
def test_a_pass_that_has_others_inside(where: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = Checkpointed()
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    keywords: Any = {"place": HOMES["device"], "gpu": "64MiB", "host": "64MiB", "update": "eager"}
    model, optimizer = overspill.prepare(model, optimizer, **keywords)
    train(model, optimizer, 1, 2)
    overspill.save(tmp_path / "saved", model, optimizer)
    if where == "in the inner pass":
        break_off(model, model.blocks[1].down.weight)
    else:
        loss, model.fails = loss_of(model, 7), True
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        model.fails = False
    with pytest.raises(StateError, match=BETWEEN):
        loss_of(model, 3)
    overspill.load(tmp_path / "saved", model, optimizer)
    train(model, optimizer, 3, 4)
    overspill.close(model)


def test_a_load_that_fails_leaves_it_as_it_was(tmp_path: Path) -> None:
    model, optimizer = prepared("states", tmp_path)
    train(model, optimizer, 1)
    break_off(model)
    with pytest.raises(TierError, match="nowhere"):
        overspill.load(tmp_path / "nowhere", model, optimizer)
    with pytest.raises(StateError, match=BETWEEN):
        optimizer.step()
    overspill.close(model)


@pytest.mark.parametrize("after", [0, 5])
@places
def test_delayed_updates_are_applied(after: int, place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They belong to steps that were taken: a model whose pass broke off is closed and saved as if its step was
    skipped."""

    def run(broken: bool, last: str) -> list[Any]:
        model, optimizer = prepared(place, tmp_path, update="delayed", delay_after=after)
        found: list[Any] = train(model, optimizer, 1, 2)
        if broken:
            break_off(model)
        if last == "save":
            overspill.save(tmp_path / "saved", model, optimizer)
            optimizer.zero_grad()
            found += train(model, optimizer, 3, 4)
        return [*found, *weights(overspill.close(model)).values()]

    with caplog.at_level(logging.WARNING):
        for last in ("save", "close"):
            assert both.same(run(True, last), run(False, last))
    assert "between two steps" not in caplog.text
