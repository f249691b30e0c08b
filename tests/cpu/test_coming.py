"""Gradients of a unit wait for each other: nobody but the host's clock notices."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import overspill
from overspill.runtime import coming, norms, parts, rooms, updates
from overspill.runtime.coming import Coming
from overspill.runtime.handle import gradient_of
from tests import small
from tests.both import adamw
from tests.cpu.test_ahead import HOMES, check, loop, of_length
from tests.reference import weights

Hook = Callable[[Tensor], None]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PAGED", {"cpu"})
    monkeypatch.setattr(rooms, "PIECES", {"cpu"})


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many gradients were taken at a time."""
    found: list[int] = []
    take = Coming.take

    def counted(self: Coming) -> None:
        if self._found:
            found.append(len(self._found))
        take(self)

    monkeypatch.setattr(Coming, "take", counted)
    return found


def prepared(model: nn.Module | None = None, **keywords: Any) -> tuple[Any, Any]:
    model = small.build() if model is None else model
    keywords = {"precision": "bf16", "gpu": "64MiB", "host": "64MiB", "place": HOMES["states"], **keywords}
    return overspill.prepare(model, adamw(model), **keywords)


def both(trained: Callable[[], tuple[Any, Any]], waited: list[int]) -> None:
    """The same bits as where every gradient is looked after when it comes."""
    found = trained()
    taken = [*waited]
    waited.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rooms.Rooms, "has_room", lambda *given: False)
        check(found, trained())
    assert not waited
    waited += taken


def steps(model: Any, optimizer: Any, count: int = 3, clip: float = 0.0) -> list[float]:
    found = []
    for step in range(count):
        loss = of_length(model, 5, step)
        loss.backward()
        if clip:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("share", [1, 1 << 40], ids=["together", "one by one"])
def test_the_same_bits(share: int, waited: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coming, "SHARE", share)

    def trained() -> tuple[Any, Any]:
        model, optimizer = prepared()
        found = steps(model, optimizer, 6, 0.5)
        return found, weights(overspill.close(model))

    both(trained, waited)
    assert sum(waited) == 6 * sum(1 for _ in small.build().parameters())
    assert max(waited) > 3 if share == 1 else max(waited) == 1


def test_none_waits_after_a_pass(waited: list[int]) -> None:
    """Where some of a unit got no gradient too."""
    model, _ = prepared()
    of_length(model, 5, 0).backward()
    assert all(gradient_of(p) is not None for p in model.parameters())
    model.zero_grad()
    p = model.blocks[1].up.weight
    torch.autograd.backward(of_length(model, 5, 0), inputs=[p])
    assert gradient_of(p) is not None and waited[-1] == 1


@pytest.mark.parametrize("update", ["lazy", "delayed"])
def test_several_passes_and_delayed_updates(update: str, waited: list[int]) -> None:
    passes = 1 if update == "delayed" else 2

    def trained() -> tuple[Any, Any]:
        # More passes than were planned: sums that are planned have no place among others, so nobody waits for it.
        model, optimizer = prepared(update=update)
        if update == "delayed":
            overspill.api._engine(model).early._after = 1
        found = loop(model, optimizer, passes, 0.5)
        return found, weights(overspill.close(model))

    both(trained, waited)
    assert waited


def scaled(p: Tensor) -> None:
    assert gradient_of(p) is not None, "as after the pass"
    p.grad.mul_(0.3)  # type: ignore[union-attr]


def dropped(p: Tensor) -> None:
    if p.dim() == 1:
        p.grad = None


def replaced(p: Tensor) -> None:
    p.grad = torch.full_like(p, 0.01)


@pytest.mark.parametrize("hook", [scaled, dropped, replaced])
def test_hooks_of_the_user_notice_nothing(hook: Hook, waited: list[int]) -> None:
    def trained() -> tuple[Any, Any]:
        model, optimizer = prepared()
        for p in model.blocks[1].parameters():
            p.register_post_accumulate_grad_hook(hook)
        found = steps(model, optimizer)
        return found, weights(overspill.close(model))

    both(trained, waited)
    assert waited


def test_what_is_held_stays_the_gradient(waited: list[int]) -> None:
    """A module's hook sees gradients while others wait: what it holds is what stands in `p.grad` afterwards."""
    model, _ = prepared()
    held: dict[str, Tensor | None] = {}

    def look(module: nn.Module, *grads: Any) -> None:
        held.update((name, p.grad) for name, p in module.named_parameters())

    model.blocks[1].register_full_backward_hook(look)
    x = torch.randint(0, small.VOCABULARY, (2, 5))
    model(x).square().mean().backward()
    kept = {name: g for name, g in held.items() if g is not None}
    for name, g in kept.items():
        assert g is model.blocks[1].get_parameter(name).grad
        g.mul_(0.0)
    assert kept and all(not model.blocks[1].get_parameter(name).grad.any() for name in kept)


class Shared(nn.Module):
    """A layer that is used twice, the first time inside of a reentrant checkpoint, and has a part that is not used: so
    its gradients wait while another pass adds to them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layer = nn.Linear(8, 8)
        self.layer.register_parameter("unused", nn.Parameter(torch.ones(3)))
        self.other = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda x: torch.tanh(self.layer(self.other(x))), x, use_reentrant=True)
        return self.layer(x).square().mean()


def test_sums_are_as_wide_as_ever(waited: list[int]) -> None:
    def trained() -> tuple[Any, Any]:
        model, optimizer = prepared(Shared())
        found = []
        for step in range(3):
            torch.manual_seed(step)
            loss = model(torch.randn(4, 8, requires_grad=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found, weights(overspill.close(model))

    both(trained, waited)
    assert waited


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("again", ["backward", "step", "zero"])
def test_a_pass_that_fails_leaves_the_same(again: str, waited: list[int]) -> None:
    """Some gradients wait while a hook of the user raises."""

    def trained() -> tuple[Any, Any]:
        model, optimizer = prepared()

        def fail(gradient: Tensor) -> None:
            raise Interrupted

        handle = model.blocks[1].norm.bias.register_hook(fail)
        with pytest.raises(Interrupted):
            of_length(model, 5, 0).backward()
        handle.remove()
        if again == "zero":
            optimizer.zero_grad()
        if again != "step":
            of_length(model, 5, 1).backward()
        norm = optimizer.clip_grad_norm_(0.5).item()
        optimizer.step()
        optimizer.zero_grad()
        found = [norm, *steps(model, optimizer)]
        return found, weights(overspill.close(model))

    both(trained, waited)


class Recomputing(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4))
        self._reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self._reentrant)
        return x.square().mean()


@pytest.mark.parametrize("reentrant", [True, False])
def test_passes_inside_of_passes(reentrant: bool, waited: list[int]) -> None:
    def trained() -> tuple[Any, Any]:
        model, optimizer = prepared(Recomputing(reentrant))
        found = []
        for step in range(3):
            torch.manual_seed(step)
            loss = model(torch.randn(4, 8, requires_grad=True))
            loss.backward()
            assert all(gradient_of(p) is not None for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found, weights(overspill.close(model))

    both(trained, waited)
    assert max(waited) > 1


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_norms_together(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: those of all gradients with the first that is asked for, and the same bits."""

    def trained() -> tuple[Any, Any]:
        model, optimizer = prepared(precision=precision)
        found = []
        for step in range(3):
            of_length(model, 5, step).backward()
            found.append([p.grad.norm().item() for p in model.parameters()])
            found.append(optimizer.clip_grad_norm_(0.5).item())
            optimizer.step()
            optimizer.zero_grad()
        return found, weights(overspill.close(model))

    one_by_one, counts = trained(), []
    together = norms._norm_together

    def counted(executor: Any, generations: Any, order: float) -> None:
        counts.append(sum(order not in g.norms for g in generations))
        together(executor, generations, order)

    monkeypatch.setattr(norms, "TOGETHER", {"cpu"})
    monkeypatch.setattr(norms, "_norm_together", counted)
    check(trained(), one_by_one)
    assert max(counts) >= sum(1 for _ in small.build().parameters())


@pytest.mark.parametrize("place", ["plan", "states"])
def test_updates_in_a_pass_find_gradients_in_their_room(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager ones that keep their gradients: because there may be several passes, or the plan is one for lazy ones."""
    model, waiting, due, put = small.build(), list[Coming](), list[bool](), updates.Updates.put
    began = Coming.__init__

    def begin(self: Coming, *given: Any) -> None:
        began(self, *given)
        waiting.append(self)

    def puts(self: updates.Updates, unit: int, jobs: Any) -> None:
        taken = {id(due.generation) for job in jobs for due in job.due}
        due.append(any(id(g) in taken for each in waiting for g, _ in each._found))
        put(self, unit, jobs)

    monkeypatch.setattr(Coming, "__init__", begin)
    monkeypatch.setattr(updates.Updates, "put", puts)
    plan = overspill.plan(model, adamw(model), place=HOMES["states"], gpu="64MiB", host="64MiB", precision="bf16")
    told = {"place": plan} if place == "plan" else {"micro_batches": 2}
    steps(*prepared(model, update="eager", **told))
    assert waiting and due and not any(due)


def test_the_memory_of_gradients_is_asked_for_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has lent it gives it back while the others of the unit are made."""
    monkeypatch.setattr(coming, "SHARE", 1)
    model, _ = prepared()
    loans, counts = overspill.api._engine(model).parts.made.grads.rooms.loans, list[tuple[int, int]]()
    for i, unit in enumerate(overspill.api._engine(model).units):
        for p in unit.params:
            p.register_post_accumulate_grad_hook(lambda p, i=i: counts.append((i, loans._gradients + loans._wanted)))
    of_length(model, 5, 0).backward()
    firsts = dict(reversed(counts))
    lasts = dict(counts)
    assert firsts == lasts and len(set(lasts.values())) == len(lasts)
    assert not loans._wanted
