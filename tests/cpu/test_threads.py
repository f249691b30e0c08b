"""Threads may take turns with a prepared model, but not use it at once; streams come one behind the other."""

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill.errors import StateError
from overspill.runtime import hooks, turns
from tests import small
from tests.both import AWAY, HERE, adamw, everywhere, losses, prepare, train
from tests.cpu.test_recompute import Recomputing
from tests.reference import differing, weights

AT_ONCE = r"expected one thread at a time to use a prepared model, found another one in the middle of a forward"
TOKENS = torch.arange(10).view(2, 5)

USES: dict[str, Callable[[nn.Module, Any], object]] = {
    "forward": lambda model, optimizer: model(TOKENS),
    "part": lambda model, optimizer: model.blocks[3](torch.ones(2, small.WIDTH)),
    "read": lambda model, optimizer: model.blocks[2].up.weight.sum(),
    "state dict": lambda model, optimizer: model.state_dict(),
    "optimizer": lambda model, optimizer: optimizer.state_dict(),
    "step": lambda model, optimizer: optimizer.step(),
    "settle": lambda model, optimizer: overspill.settle(model),
}


class Waiting:
    """Holds whoever comes, in a forward hook or in a hook of backward, until it is let go."""

    def __init__(self) -> None:
        self.there, self.go = threading.Event(), threading.Event()

    def hook(self, *_: object) -> None:
        self.there.set()
        assert self.go.wait(60)


@pytest.mark.parametrize("place", [pytest.param(HERE, marks=pytest.mark.full), AWAY], ids=["here", "away"])
@pytest.mark.parametrize("during", ["forward", "backward"])
@pytest.mark.parametrize("use", USES)
def test_at_once_is_refused(use: str, during: str, place, tmp_path: Path) -> None:
    model, optimizer = prepare(place, tmp_path)
    train(model, optimizer, 1)
    wait = Waiting()
    if during == "forward":
        handle = model.blocks[1].up.register_forward_hook(wait.hook)
    else:
        handle = model.blocks[1].up.register_forward_hook(lambda m, args, out: out.register_hook(wait.hook) and None)
    with ThreadPoolExecutor(1) as other:
        training = other.submit(train, model, optimizer, 1)
        assert wait.there.wait(60)
        with pytest.raises(StateError, match=AT_ONCE):
            USES[use](model, optimizer)
        wait.go.set()
        training.result()
    handle.remove()
    train(model, optimizer, 1)
    plain = small.build()
    train(plain, adamw(plain), 3)
    assert differing(weights(model), weights(plain)) == []


@everywhere
def test_taking_turns(place, tmp_path: Path) -> None:
    """Each step in another thread; even forward in one and backward in another."""
    model, optimizer = prepare(place, tmp_path)
    plain = small.build()
    own = adamw(plain)

    def forward(model: nn.Module) -> Tensor:
        return model(TOKENS).square().mean()

    for _ in range(3):
        for trained, steps in ((plain, own), (model, optimizer)):
            with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
                one.submit(train, trained, steps, 1).result()
                loss = two.submit(forward, trained).result()
                one.submit(loss.backward).result()
                two.submit(steps.step).result()
                steps.zero_grad()
    assert differing(weights(model), weights(plain)) == []


def test_what_another_thread_recomputes_is_told_from_the_forward_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where autograd has a thread of its own, in which nodes have numbers of their own."""
    found: list[tuple[int, int]] = []
    real = hooks.claim

    def claim(units: Any, own: range, tensors: Any, listener: Any) -> int:
        found.append((real(units, own, tensors, listener), len(own)))
        return found[-1][0]

    def losses_of(model: nn.Module, optimizer: Any) -> list[float]:
        losses = []
        for _ in range(3):
            losses.append(model(TOKENS).square().mean())
            with ThreadPoolExecutor(1) as other:
                other.submit(losses[-1].backward).result()
            optimizer.step()
            optimizer.zero_grad()
        return [float(loss) for loss in losses]

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Recomputing(reentrant=False)

    plain = build()
    expected = losses_of(plain, adamw(plain))
    monkeypatch.setattr(hooks, "claim", claim)
    for _ in range(1000):
        torch.ones(1, requires_grad=True).exp()  # so that this thread's numbers are ahead
    model, optimizer = prepare(AWAY, tmp_path, build)
    assert losses_of(model, optimizer) == expected
    assert differing(weights(model), weights(plain)) == []
    assert found and all(claimed <= made for claimed, made in found)


def test_a_thread_that_failed_does_not_keep_its_turn(tmp_path: Path) -> None:
    model, optimizer = prepare(AWAY, tmp_path)

    def fail(*_: object) -> None:
        raise KeyError("no")

    handle = model.blocks[1].register_forward_hook(fail)
    with ThreadPoolExecutor(1) as other, pytest.raises(KeyError, match="no"):
        other.submit(train, model, optimizer, 1).result()
    handle.remove()
    plain = small.build()
    next(losses(plain, 1))  # the batch that was lost
    assert train(model, optimizer, 2) == train(plain, adamw(plain), 2)


def test_another_model_in_another_thread(tmp_path: Path) -> None:
    """Two prepared models, a thread each."""
    plain = small.build()
    train(plain, adamw(plain), 20)
    pairs = [prepare(AWAY, tmp_path) for _ in range(2)]
    with ThreadPoolExecutor(2) as both:
        for done in [both.submit(train, model, optimizer, 20) for model, optimizer in pairs]:
            done.result()
    for model, _ in pairs:
        assert differing(weights(model), weights(plain)) == []


def test_a_dropped_model_waits_for_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is dropped by the garbage collector, which may run inside of Python's own handling of threads."""
    model, optimizer = prepare(dict.fromkeys(("weight", "grad", "state"), "nvme"), tmp_path)
    train(model, optimizer, 1)
    overspill.settle(model)
    waited = []
    monkeypatch.setattr(threading.Thread, "join", lambda self, timeout=None: waited.append(self.name))
    del model, optimizer
    gc.collect()
    assert waited == []
    assert list(tmp_path.iterdir()) == []


# --- streams


class Lanes:
    """Stands in for a GPU's streams: which one is the current one, and who waits for whom."""

    def __init__(self) -> None:
        self.here = 0
        self.log: list[object] = []

    def current(self, device: torch.device) -> int:
        return self.here

    def follow(self, device: torch.device, stream: int, other: int) -> None:
        self.log.append((stream, other))

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        before, self.here = self.here, stream
        yield
        self.here = before


class Branch(nn.Module):
    """Uses a weight of its own on its caller's stream, after what it called on another one."""

    def __init__(self, lanes: Lanes) -> None:
        super().__init__()
        self.inner, self.weight, self.lanes = nn.Linear(8, 8), nn.Parameter(torch.eye(8)), lanes

    def forward(self, x: Tensor) -> Tensor:
        with self.lanes.on(1):
            x = self.inner(x)
        found = x @ self.weight
        self.lanes.log.append("used")
        return found


class Beside(nn.Module):
    """A branch, and beside it something on the other stream."""

    def __init__(self, lanes: Lanes, branch: nn.Module, tail: nn.Module) -> None:
        super().__init__()
        self.branch, self.tail, self.lanes = branch, tail, lanes

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.branch(x)
        with self.lanes.on(1):
            return found + self.tail(x)


@pytest.mark.parametrize("nested", [False, True], ids=["unit by unit", "in one unit"])
def test_whoever_comes_next_is_behind_all_of_a_call_that_ended(nested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may send weights away, or update them, that the call used on its own stream to its end."""
    lanes = Lanes()
    monkeypatch.setattr(turns, "streams", lanes)
    blocks = nn.ModuleList([Branch(lanes), nn.Linear(8, 8)])
    model: nn.Module = Beside(lanes, *blocks)
    model = nn.Sequential(model, nn.Linear(8, 8)) if nested else nn.ModuleDict({"blocks": blocks, "all": model})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = overspill.plan(model, optimizer)
    assert [unit.name for unit in plan.model.units] == (["0", "1"] if nested else ["blocks.0", "blocks.1"])
    model, _ = overspill.prepare(model, optimizer, place=dict.fromkeys(("weight", "grad", "state"), "host"))
    with torch.no_grad():
        (model if nested else model["all"])(torch.ones(2, 8))
    assert (1, 0) in lanes.log[lanes.log.index("used") :]
    overspill.close(model)
