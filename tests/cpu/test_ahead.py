"""Updates ahead of their use, by a thread of their own, and begun in backward: the bits stay those of a plain loop."""

import dataclasses
import functools
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill import replanning
from overspill.errors import BudgetError, ModelError, OptionError, StateError
from overspill.plan import solver
from overspill.program import Kind
from overspill.runtime import parts, rooms
from overspill.runtime.measures import Measures
from tests import small
from tests.both import adamw, losses, passes_of
from tests.places import PLACES, peaks_in_force, smallest_budget
from tests.reference import differing, weights

STEPS = 6
places = pytest.mark.parametrize("place", ["device", "host", "nvme", "states"])
HOMES = {
    **PLACES,
    "states": {"weight": "device", "grad": "device", "state": "host"},
    "offload": {"weight": "device", "grad": "host", "state": "host"},
}


@pytest.fixture(params=[True, False], ids=["ahead", "on demand"])
def paged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether pages are updated ahead of their use, and gradients lie in one piece, as on a GPU."""
    monkeypatch.setattr(parts, "PAGED", {"cpu"} if request.param else set())
    monkeypatch.setattr(rooms, "PIECES", {"cpu"} if request.param else set())
    return request.param


def prepare(place: str, nvme: Path, **keywords: Any) -> tuple[nn.Module, Any]:
    model = small.build()
    keywords = {"precision": "bf16", "gpu": "64MiB", "host": "64MiB", **keywords}
    return overspill.prepare(model, adamw(model), place=HOMES[place], nvme=nvme, **keywords)


def loop(model: nn.Module, optimizer: Any, passes: int = 1, clip: float = 0.0) -> list[float]:
    found = []
    for step in range(STEPS):
        *_, last = passes_of(model, passes)
        if clip:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        found.append(last)
    return found


def trained(place: str, nvme: Path, delays: dict[Kind, float] | None = None, **keywords: Any) -> tuple[Any, Any]:
    passes, clip = keywords.pop("passes", 1), keywords.pop("clip", 0.0)
    model, optimizer = prepare(place, nvme, micro_batches=passes, **keywords)
    overspill.api._engine(model).executor.lanes.delays |= delays or {}
    found = loop(model, optimizer, passes, clip)
    return found, weights(overspill.close(model))


def check(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    assert one[0] == other[0]
    assert not differing(one[1], other[1])


@places
def test_pages_ahead_of_their_use_change_no_bit(place: str, paged: bool, tmp_path: Path) -> None:
    # Clipping acts on every step; "device" on demand is what tests/cpu/test_precision.py holds against the plain loop.
    check(trained(place, tmp_path, clip=0.5), trained("device", tmp_path, clip=0.5))


@places
@pytest.mark.parametrize("passes", [1, 3])
def test_eager_is_lazy(place: str, passes: int, paged: bool, tmp_path: Path) -> None:
    eager = trained(place, tmp_path, update="eager", passes=passes)
    check(eager, trained("device", tmp_path, passes=passes))


def test_eager_in_fp32_is_the_plain_loop(paged: bool, tmp_path: Path) -> None:
    model = small.build()
    expected = loop(model, adamw(model)), weights(model)
    check(trained("states", tmp_path, update="eager", precision="fp32"), expected)


@pytest.mark.parametrize("kind", [Kind.STATE_FETCH, Kind.UPDATE, Kind.STATE_STORE, Kind.DUE, Kind.UPDATED])
@pytest.mark.parametrize("update", ["lazy", "eager"])
def test_delays_change_no_bit(kind: Kind, update: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(parts, "PAGED", {"cpu"})
    check(trained("states", tmp_path, {kind: 0.002}, update=update), trained("states", tmp_path, update=update))


def test_nothing_is_left_of_the_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(parts, "PAGED", {"cpu"})
    model, optimizer = prepare("states", tmp_path)
    thread = overspill.api._engine(model).executor.pager._thread
    assert thread.is_alive()
    loop(model, optimizer)
    del model, optimizer
    for _ in range(100):
        # While it hands a page out it refers to the model.
        gc.collect()
        thread.join(0.1)
        if not thread.is_alive():
            break
    assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_ahead_is_heard_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(parts, "PAGED", {"cpu"})
    model, optimizer = prepare("states", tmp_path)
    update = overspill.api._engine(model).parts.made.update
    monkeypatch.setattr(update, "run", lambda *args: 1 / 0)
    with pytest.raises((StateError, ZeroDivisionError), match=r"ZeroDivisionError|division by zero"):
        loop(model, optimizer)


# ---- another plan, when activations are known


ROLES = ("weight", "grad", "state")


def on_device(plan: Any) -> int:
    return sum(p.of(role) == "device" for p in plan.placements for role in ROLES)


BLOCKS = 8
ROOMS = (4, 8, 20, 40)
"""Bytes per parameter: with the first weights move in, with the last nothing but states."""


def crowded(room: int, monkeypatch: pytest.MonkeyPatch, **keywords: Any) -> tuple[Any, Any]:
    """A model in so many bytes per parameter more than it needs, whose activations take next to nothing."""
    monkeypatch.setattr(Measures, "sees_activations", True)
    monkeypatch.setattr(Measures, "_peak", lambda self: self._planned.owned + 2**10)
    monkeypatch.setattr(replanning, "MARGIN", 0)
    # So that nothing that is longer seems to fit.
    monkeypatch.setattr(replanning.Replanner, "_fits", lambda self, size, power=2: self._held.plan is self._first)
    monkeypatch.setattr(solver, "PAGE", (1024, 1024))
    model = small.build(blocks=BLOCKS)
    smallest = smallest_budget(model, adamw(model), {"gpu": 1, "host": "64MiB", **keywords})
    gpu = smallest + sum(room * p.numel() for p in model.parameters())
    return overspill.prepare(model, adamw(model), gpu=gpu, host="64MiB", **keywords)


def of_length(model: Any, length: int, seed: int) -> torch.Tensor:
    tokens = torch.randint(0, small.VOCABULARY, (3, length), generator=torch.Generator().manual_seed(seed))
    return small.loss_of(model, {"tokens": tokens, "labels": tokens})


Loop = Callable[[Any, Any, list[int]], list[float]]


def of_lengths(model: Any, optimizer: Any, plans: list[int], steps: Sequence[Sequence[int]]) -> list[float]:
    """Steps with inputs of these lengths, one after the other."""
    found = []
    for number, step in enumerate(steps):
        for part, length in enumerate(step):
            loss = of_length(model, length, 10 * number + part)
            plans.append(on_device(optimizer.report()["plan"]))
            loss.backward()
            found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
    return found


late_sums = functools.partial(of_lengths, steps=[[5] * (1 + step // 6) for step in range(12)])
"""One backward pass a step, then two, which nobody planned."""


def pairs(model: Any, optimizer: Any, plans: list[int]) -> list[float]:
    """Two calls before a backward pass, the second one longer than any before."""
    found = []
    for step in range(12):
        first = of_length(model, 4, step)
        loss = first + of_length(model, 5 + step // 4, step)
        plans.append(on_device(optimizer.report()["plan"]))
        loss.backward()
        found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def zeroed_late(model: Any, optimizer: Any, plans: list[int]) -> list[float]:
    """Gradients are zeroed after the forward pass, and older ones are looked at again."""
    found, kept = [], []
    for step in range(10):
        loss = of_length(model, 5, step)
        plans.append(on_device(optimizer.report()["plan"]))
        optimizer.zero_grad()
        loss.backward()
        kept.append(next(model.parameters()).grad)
        optimizer.step()
        found += [loss.item(), *(float(old.sum()) for old in kept)]
    return found


def evaluated(model: Any, optimizer: Any, plans: list[int]) -> list[float]:
    """Longer inputs than any before, but only to look at what the model gives."""
    found = []
    for step in range(14):
        if step in (6, 7, 11):
            model.eval()
            with torch.inference_mode() if step == 6 else torch.no_grad():
                found.append(of_length(model, 9, step).item())
            plans.append(on_device(optimizer.report()["plan"]))
            model.train()
        found += of_lengths(model, optimizer, plans, [[4]])
    return found


LOOPS: dict[str, Loop] = {
    "lengths": functools.partial(of_lengths, steps=[[4 + 2 * (step // 6)] for step in range(18)]),
    "micro-batches": functools.partial(of_lengths, steps=[[4 + 2 * (s // 6), 5 + 2 * (s // 6)] for s in range(18)]),
    "pairs": pairs,
    "evaluated": evaluated,
    "zeroed late": zeroed_late,
}


@pytest.mark.parametrize("way", LOOPS)
@pytest.mark.parametrize("room", [pytest.param(room, marks=() if room == 8 else pytest.mark.full) for room in ROOMS])
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.full)])
def test_another_plan_changes_no_bit(
    precision: str, way: str, room: int, paged: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What there is room for moves in, what there is none for out again."""
    keywords = {"precision": precision, "micro_batches": 2 if way == "micro-batches" else 1}
    model = small.build(blocks=BLOCKS)
    model, optimizer = overspill.prepare(model, adamw(model), place=HOMES["device"], **keywords)
    expected = LOOPS[way](model, optimizer, []), weights(overspill.close(model))
    model, optimizer = crowded(room, monkeypatch, **keywords)
    engine = overspill.api._engine(model)
    if room >= 8:
        # With less there is one slot only.
        assert (engine.executor.pager is not None) == (paged and precision == "bf16"), "what is tested here"
    before, plans = optimizer.report()["plan"], list[int]()
    found = LOOPS[way](model, optimizer, plans)
    assert max(plans) > on_device(before), "nothing moved in"
    if way in ("lengths", "pairs", "evaluated") and room >= 20:
        assert any(b < a for a, b in itertools.pairwise(plans)), "nothing moved out"
    assert optimizer.report()["plan"].peak("device") <= before.budget.device
    check((found, weights(overspill.close(model))), expected)


def test_what_is_reserved_for_one_plan_is_no_news_under_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch's allocator keeps it, where an earlier plan with less comes back."""
    model, optimizer = crowded(20, monkeypatch, precision="bf16")
    peaks, first = peaks_in_force(optimizer, monkeypatch), optimizer.report()["plan"]
    monkeypatch.setattr(Measures, "peaks", lambda self: {"device": max(peaks)})
    LOOPS["lengths"](model, optimizer, [])
    assert len(peaks) > 1 and optimizer.report()["plan"].peak("device") == peaks[-1]
    less = dataclasses.replace(first, lines=tuple(line for line in first.lines if line.what != "activations"))
    replanning.come_into_force(overspill.api._engine(model), less)
    of_lengths(model, optimizer, [], [[4]])
    assert peaks[-1] < max(peaks) and "was seen to hold" not in caplog.text
    monkeypatch.setattr(Measures, "peaks", lambda self: {"device": max(peaks) + 1})
    of_lengths(model, optimizer, [], [[4]])
    assert "was seen to hold" in caplog.text
    overspill.close(model)


@pytest.mark.parametrize("room", [8, 46])
def test_sums_that_were_not_planned_are_exact_or_refused(
    room: int, paged: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A plan that was improved gives room back for them. What that leaves too little for is told."""
    model = small.build(blocks=BLOCKS)
    model, optimizer = overspill.prepare(model, adamw(model), place=HOMES["device"], gpu="64MiB")
    expected = late_sums(model, optimizer, []), weights(overspill.close(model))
    model, optimizer = crowded(room, monkeypatch, precision="bf16")
    plans: list[int] = []
    try:
        found = late_sums(model, optimizer, plans)
    except BudgetError as error:
        assert "say micro_batches=2" in str(error) and room < 46
        return
    assert room >= 46 and on_device(optimizer.report()["plan"]) < max(plans), "states gave their room up"
    check((found, weights(overspill.close(model))), expected)


# ---- eager: what would differ from the plain loop is refused


def ready(tmp_path: Path) -> tuple[nn.Module, Any]:
    model, optimizer = prepare("states", tmp_path, update="eager")
    next(iter(losses(model, 1))).backward()
    return model, optimizer


def test_clipping_is_refused(tmp_path: Path) -> None:
    model, optimizer = ready(tmp_path)
    with pytest.raises(StateError, match=r"update='eager'.*clipping.*'lazy'"):
        optimizer.clip_grad_norm_(1e-3)
    with pytest.raises(StateError, match="update='eager'"):
        next(model.parameters()).grad.mul_(2)


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "scaled": lambda g: g.mul_(2),
    "added to": lambda g: g.add_(1),
    "zeroed": lambda g: g.zero_(),
    "replaced": lambda g: g.copy_(torch.ones(g.shape)),
    "written to": lambda g: g[...].fill_(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_gradients_are_refused_and_nothing_is_lost(change: str, paged: bool, tmp_path: Path) -> None:
    model, optimizer = prepare("host", tmp_path, update="eager")
    expected = trained("host", tmp_path, update="eager")
    found = []
    for _ in range(STEPS):
        found += passes_of(model, 1)
        for p in model.parameters():
            with pytest.raises(StateError, match=r"left alone.*update='eager'.*update='lazy'"):
                CHANGES[change](p.grad)  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()
    check((found, weights(overspill.close(model))), expected)


@pytest.mark.parametrize("why", ["hyperparameters", "a frozen parameter's gradient"])
def test_what_has_begun_belongs_to_the_step_after_one_that_is_refused(why: str, paged: bool, tmp_path: Path) -> None:
    def run(refused: bool) -> dict[str, torch.Tensor]:
        model: Any = small.build()
        model.last.requires_grad_(False)
        block = list(model.blocks[3].parameters())
        groups = [{"params": [p for p in model.parameters() if all(p is not q for q in block)]}, {"params": block}]
        optimizer: Any = torch.optim.AdamW(groups, lr=1e-2)
        keywords: Any = {"gpu": "64MiB", "host": "64MiB", "place": HOMES["host"], "nvme": tmp_path, "micro_batches": 2}
        model, optimizer = overspill.prepare(model, optimizer, update="eager", **keywords)
        for _ in range(3):
            # The step itself takes what the user's own gradient keeps from beginning earlier.
            model.blocks[3].scale.grad = torch.zeros_like(model.blocks[3].scale)
            list(passes_of(model, 1))
            if refused:
                optimizer.param_groups[1]["amsgrad"] = why == "hyperparameters"
                model.last.weight.grad = None if why == "hyperparameters" else torch.zeros(small.WIDTH)
                with pytest.raises(ModelError, match="expected"):
                    optimizer.step()
                optimizer.param_groups[1]["amsgrad"], model.last.weight.grad = False, None
            optimizer.step()
            optimizer.zero_grad()
        return weights(overspill.close(model))

    assert not differing(run(True), run(False))


def test_a_second_backward_is_refused(tmp_path: Path) -> None:
    model, _ = prepare("states", tmp_path, update="eager")
    first, second = next(iter(losses(model, 1))), next(iter(losses(model, 1)))
    first.backward()
    # torch itself sees that weights are newer than the graph that needs them.
    with pytest.raises(RuntimeError, match=r"no_sync|modified by an inplace operation"):
        second.backward()


USES = {
    "forward": lambda model, optimizer: next(iter(losses(model, 1))),
    "weights": lambda model, optimizer: next(model.parameters()).sum(),
    "state dict": lambda model, optimizer: model.state_dict(),
    "states": lambda model, optimizer: optimizer.state_dict(),
    "close": lambda model, optimizer: overspill.close(model),
}


@pytest.mark.parametrize("use", USES)
def test_a_use_between_backward_and_step_is_refused(use: str, paged: bool, tmp_path: Path) -> None:
    """It would see weights that are new already."""
    model, optimizer = ready(tmp_path)
    with pytest.raises(StateError, match=r"call step\(\) first.*no_sync.*'lazy'"):
        USES[use](model, optimizer)
    optimizer.step()
    USES[use](model, optimizer)


def test_another_learning_rate_at_the_step_is_refused(tmp_path: Path) -> None:
    _, optimizer = ready(tmp_path)
    rate = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 2 * rate
    with pytest.raises(StateError, match=r"group 0 changed between backward and step\(\).*'lazy'"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()


def test_views_see_a_step_when_it_is_taken(paged: bool, tmp_path: Path) -> None:
    """An update of weights that somebody looks at begins with the step."""
    model, optimizer = prepare("states", tmp_path, update="eager")
    view = model.blocks[0].up.weight.data
    before = view.clone()
    next(iter(losses(model, 1))).backward()
    assert torch.equal(view, before)
    optimizer.step()
    assert not torch.equal(view, before)


def test_weights_on_their_way_home_are_not_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The thread that brings them there has views of them, too. That is no reason to begin later."""
    monkeypatch.setattr(parts, "PAGED", set())
    model, optimizer = prepare("host", tmp_path, update="eager")
    unit = overspill.api._engine(model).units[-1]
    store, stored = unit.store, []

    def slowly(tier: Any) -> None:
        view = unit.flat[:]
        time.sleep(0.05)
        store(tier)
        stored.append(view.numel())

    monkeypatch.setattr(unit, "store", slowly)
    for _ in range(STEPS):
        list(passes_of(model, 1))
        for p in unit.params:
            with pytest.raises(StateError, match="left alone"):
                p.grad.mul_(2)  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    assert len(stored) >= STEPS - 1


def test_a_step_cannot_be_skipped(tmp_path: Path) -> None:
    """Its updates have begun."""
    _, optimizer = ready(tmp_path)
    with pytest.raises(StateError, match=r"call step\(\) first"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


def test_gradients_are_free_again_after_the_step(tmp_path: Path) -> None:
    model, optimizer = ready(tmp_path)
    optimizer.step()
    next(model.parameters()).grad.mul_(2)


def test_a_gradient_that_is_dropped_is_refused(tmp_path: Path) -> None:
    model, optimizer = ready(tmp_path)
    next(model.parameters()).grad = None
    with pytest.raises(StateError, match=r"left alone.*replaced"):
        optimizer.step()
    with pytest.raises(StateError, match=r"some of its weights updated and some not; prepare anew"):
        next(iter(losses(model, 1)))


def test_fp16_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="'lazy' with precision='fp16'"):
        prepare("states", tmp_path, update="eager", precision="fp16")


def test_a_step_without_gradients_is_refused(tmp_path: Path) -> None:
    _, optimizer = prepare("states", tmp_path, update="eager")
    with pytest.raises(StateError, match="found none"):
        optimizer.step()


def test_schedules_hold(tmp_path: Path) -> None:
    """A unit that begins early takes the learning rate of its own step."""
    found = []
    for update in ("lazy", "eager"):
        model, optimizer = prepare("states", tmp_path, update=update)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for loss in losses(model, STEPS):
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        found.append(([], weights(overspill.close(model))))
    check(*found)
