"""update="delayed": exactly the rule of Note [One step later], as plain PyTorch says it, wherever the bytes live."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill.checkpoint.folder import open_folder
from overspill.errors import OptionError, StateError
from overspill.program import Kind
from overspill.runtime import parts, rooms
from tests import both, small
from tests.both import adamw, passes_of
from tests.cpu.test_ahead import BLOCKS, HOMES, LOOPS, crowded
from tests.reference import differing, weights

STEPS, AFTER, CLIP = 9, 3, 0.5
Look = Callable[[nn.Module, Any, int], None]


class Plain:
    """The rule in plain PyTorch."""

    def __init__(self, after: int) -> None:
        self.model = small.build()
        self.optimizer = adamw(self.model)
        self._after, self._steps = after, 0
        self._kept: tuple[float, list[Tensor | None]] | None = None

    def step(self) -> None:
        self._steps += 1
        now = (self.optimizer.param_groups[0]["lr"], [p.grad for p in self.model.parameters()])
        if self._steps <= self._after:
            self.optimizer.step()
            return
        self.flush()
        self._kept = now

    def flush(self) -> None:
        """What was kept is applied, with the learning rate of its own step."""
        if self._kept is None:
            return
        lr, gradients = self._kept
        self._kept = None
        own = [p.grad for p in self.model.parameters()]
        group = self.optimizer.param_groups[0]
        now, group["lr"] = group["lr"], lr
        for p, gradient in zip(self.model.parameters(), gradients, strict=True):
            p.grad = gradient
        self.optimizer.step()
        group["lr"] = now
        for p, gradient in zip(self.model.parameters(), own, strict=True):
            p.grad = gradient


def expected(after: int = AFTER, looks: tuple[int, ...] = (), passes: int = 1) -> tuple[list[float], Any]:
    plain = Plain(after)
    found = []
    for step in range(STEPS):
        total = sum(passes_of(plain.model, passes))
        torch.nn.utils.clip_grad_norm_(plain.model.parameters(), CLIP)
        plain.step()
        plain.optimizer.param_groups[0]["lr"] *= 0.9
        plain.optimizer.zero_grad()
        if step in looks:
            plain.flush()
        found.append(total)
    plain.flush()
    return found, weights(plain.model)


def prepared(place: str, nvme: Path, after: int = AFTER, **keywords: Any) -> tuple[nn.Module, Any]:
    model = small.build()
    keywords = {"precision": "fp32", "gpu": "64MiB", "host": "64MiB", "delay_after": after, **keywords}
    keywords.setdefault("update", "delayed")
    return overspill.prepare(model, adamw(model), place=HOMES[place], nvme=nvme, **keywords)


def trained(model: nn.Module, optimizer: Any, look: Look | None = None, passes: int = 1) -> tuple[list[float], Any]:
    found = []
    for step in range(STEPS):
        found.append(sum(passes_of(model, passes)))
        optimizer.clip_grad_norm_(CLIP)
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if look is not None:
            look(model, optimizer, step)
    return found, weights(overspill.close(model))


def check(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    assert one[0] == other[0]
    assert not differing(one[1], other[1])


@pytest.fixture(params=[True, False], ids=["ahead", "on demand"])
def paged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(parts, "PAGED", {"cpu"} if request.param else set())
    monkeypatch.setattr(rooms, "PIECES", {"cpu"} if request.param else set())
    return bool(request.param)


@pytest.mark.parametrize("place", ["device", "host", "nvme", "states"])
def test_it_is_the_rule(place: str, paged: bool, tmp_path: Path) -> None:
    check(trained(*prepared(place, tmp_path)), expected())


def test_it_is_another_rule_than_lazy() -> None:
    assert expected()[0] != expected(after=STEPS)[0]


@pytest.mark.parametrize("after", [0, 1, STEPS])
def test_the_first_steps_are_as_usual(after: int, tmp_path: Path) -> None:
    check(trained(*prepared("states", tmp_path, after)), expected(after))


@pytest.mark.parametrize("place", ["device", "host"])
def test_several_passes_before_a_step(place: str, paged: bool, tmp_path: Path) -> None:
    check(trained(*prepared(place, tmp_path, micro_batches=3), passes=3), expected(passes=3))


def evaluate(model: nn.Module, optimizer: Any) -> None:
    model.eval()
    with torch.no_grad():
        model(next(small.batches())["tokens"])
    model.train()


LOOKS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "evaluation": evaluate,
    "state_dict": lambda model, optimizer: model.state_dict(),
    "optimizer.state_dict": lambda model, optimizer: optimizer.state_dict(),
    "settle": lambda model, optimizer: overspill.settle(model),
}


@pytest.mark.parametrize("name", LOOKS)
@pytest.mark.parametrize("place", ["states", "host"])
def test_whoever_looks_sees_all_updates(name: str, place: str, paged: bool, tmp_path: Path) -> None:
    def look(model: nn.Module, optimizer: Any, step: int) -> None:
        if step in (2, 5):
            LOOKS[name](model, optimizer)

    check(trained(*prepared(place, tmp_path), look), expected(looks=(2, 5)))


def test_a_state_dict_is_that_of_all_steps(tmp_path: Path) -> None:
    model, optimizer = prepared("states", tmp_path)
    seen: dict[int, Any] = {}
    trained(model, optimizer, lambda m, o, step: seen.update({step: dict(m.state_dict())}) if step == 6 else None)
    plain = Plain(AFTER)
    for _ in range(7):
        sum(passes_of(plain.model, 1))
        torch.nn.utils.clip_grad_norm_(plain.model.parameters(), CLIP)
        plain.step()
        plain.optimizer.param_groups[0]["lr"] *= 0.9
        plain.optimizer.zero_grad()
    plain.flush()
    assert not differing(seen[6], dict(plain.model.state_dict()))


@pytest.mark.parametrize("after", [0, 3, 7])
def test_a_resumed_run_goes_on_as_the_one_that_saved(after: int, tmp_path: Path) -> None:
    """Whether the steps as usual are over or not."""

    def look(model: nn.Module, optimizer: Any, step: int) -> None:
        if step == 4:
            overspill.save(tmp_path / "saved", model, optimizer)

    expected_losses, final = trained(*prepared("states", tmp_path, after=after), look)
    model, optimizer = prepared("host", tmp_path, after=after)
    overspill.load(tmp_path / "saved", model, optimizer)
    stream = small.batches()
    for _ in range(5):
        next(stream)
    both._streams[model] = stream
    for step in range(5, STEPS):
        assert sum(passes_of(model, 1)) == expected_losses[step]
        optimizer.clip_grad_norm_(CLIP)
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.zero_grad()
    assert not differing(weights(overspill.close(model)), final)


@pytest.mark.parametrize("before", ["lazy", "eager"])
def test_steps_that_a_run_of_other_updates_took_are_not_taken_once_more(before: str, tmp_path: Path) -> None:
    def loop(model: nn.Module, optimizer: Any, steps: int) -> None:
        for _ in range(steps):
            sum(passes_of(model, 1))
            optimizer.step()
            optimizer.zero_grad()

    def next_run(update: str, last: nn.Module | None = None) -> tuple[nn.Module, Any]:
        model, optimizer = prepared("states", tmp_path, update=update)
        if last is not None:
            overspill.load(tmp_path / "saved", model, optimizer)
            both._streams[model] = both._streams[last]
        return model, optimizer

    plain = Plain(AFTER)
    for number in range(STEPS):
        sum(passes_of(plain.model, 1))
        plain.step()
        plain.optimizer.zero_grad()
        if number == 5:
            # As a checkpoint does.
            plain.flush()
    plain.flush()
    model = None
    for update, steps in ((before, AFTER), ("delayed", 3), (before, 0), ("delayed", STEPS - AFTER - 3)):
        model, optimizer = next_run(update, model)
        loop(model, optimizer, steps)
        overspill.save(tmp_path / "saved", model, optimizer)
    with open_folder(tmp_path / "saved") as saved:
        assert saved.body()["steps"] == STEPS
    assert model is not None and not differing(weights(overspill.close(model)), weights(plain.model))


@pytest.mark.parametrize("kind", [Kind.STATE_FETCH, Kind.UPDATE, Kind.STATE_STORE, Kind.DUE, Kind.UPDATED])
def test_delays_change_no_bit(kind: Kind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(parts, "PAGED", {"cpu"})
    model, optimizer = prepared("host", tmp_path)
    overspill.api._engine(model).executor.lanes.delays |= {kind: 0.002}
    check(trained(model, optimizer), expected())


def test_gradients_that_are_added_to_after_a_step(tmp_path: Path) -> None:
    """Nobody zeroes them: what was kept stays as it was."""

    def loop(model: nn.Module, step: Callable[[], None]) -> Any:
        for _ in range(5):
            sum(passes_of(model, 1))
            step()
        return model

    plain = Plain(1)

    def plain_step() -> None:
        for p in plain.model.parameters():
            p.grad = p.grad.clone() if p.grad is not None else None
        plain.step()
        for p in plain.model.parameters():
            p.grad = p.grad.clone() if p.grad is not None else None

    loop(plain.model, plain_step)
    plain.flush()
    model, optimizer = prepared("states", tmp_path, after=1, micro_batches=2)
    loop(model, optimizer.step)
    assert not differing(weights(overspill.close(model)), weights(plain.model))


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "copied": copy.deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("place", ["device", "host"])
def test_two_parameters_of_one_gradient(place: str, tmp_path: Path) -> None:
    """Both add to it, and each step takes it as it is then."""

    def loop(model: nn.Module, step: Callable[[], None]) -> None:
        for number in range(3):
            sum(passes_of(model, 1))
            if number == 0:
                model.get_parameter("blocks.1.up.bias").grad = model.get_parameter("blocks.0.up.bias").grad
            step()

    plain = Plain(0)

    def plain_step() -> None:
        held = [(p, p.grad) for p in plain.model.parameters()]
        for p, gradient in held:
            p.grad = None if gradient is None else gradient.clone()
        plain.step()
        for p, gradient in held:
            p.grad = gradient

    loop(plain.model, plain_step)
    plain.flush()
    model, optimizer = prepared(place, tmp_path, after=0, micro_batches=2)
    loop(model, optimizer.step)
    assert not differing(weights(overspill.close(model)), weights(plain.model))


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("place", ["device", "host"])
def test_a_copy_is_that_of_all_steps(how: str, place: str, tmp_path: Path) -> None:
    model, optimizer = prepared(place, tmp_path, after=0)
    sum(passes_of(model, 1))
    optimizer.step()
    optimizer.zero_grad()
    copied = weights(COPIES[how](model))
    assert not differing(copied, weights(model))


@pytest.mark.parametrize("place", ["device", "host"])
def test_what_is_loaded_is_not_updated_by_steps_before(place: str, tmp_path: Path) -> None:
    model, optimizer = prepared(place, tmp_path, after=0)
    loaded = {name: value + 1 for name, value in model.state_dict().items()}
    sum(passes_of(model, 1))
    optimizer.step()
    optimizer.zero_grad()
    model.load_state_dict(loaded)
    assert not differing(dict(model.state_dict()), loaded)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("place", ["device", "host"])
def test_zeros_that_are_kept_stay_zeros_whatever_is_added(
    place: str, precision: str, paged: bool, tmp_path: Path
) -> None:
    """A plain step by zeros changes nothing, so both rules are one."""

    def run(update: str) -> Any:
        model = small.build()
        keywords = {"precision": precision, "gpu": "64MiB", "host": "64MiB", "update": update, "delay_after": 0}
        steps = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = overspill.prepare(model, steps, place=HOMES[place], nvme=tmp_path, **keywords)
        sum(passes_of(model, 1))
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        found = sum(passes_of(model, 1)), overspill.grad(model.last.weight)
        optimizer.step()
        optimizer.zero_grad()
        return [*found, *weights(overspill.close(model)).values()]

    assert both.same(run("delayed"), run("lazy"))


@pytest.mark.parametrize("held", [False, True], ids=["nobody looks", "views are held"])
@pytest.mark.parametrize("place", ["device", "host", "states"])
def test_a_skipped_step_applies_the_one_before(place: str, held: bool, paged: bool, tmp_path: Path) -> None:
    """All of it, whatever had begun: who holds views of weights keeps their updates from beginning in a backward
    pass, and a layer that a loss does not depend on has none there."""

    def run(model: nn.Module, optimizer: Any, step: Callable[[], None], skip: Callable[[], None]) -> list[Any]:
        found: list[Any] = []
        views = [p.detach() for p in model.parameters()][::2] if held else []
        for number in range(STEPS):
            if number in (4, 6, 7):
                # A pass in which the step is skipped, of a part of the model.
                model(torch.arange(6).view(2, 3), skip=1).square().mean().backward()
                skip()
                found.append([view.clone() for view in views])
            found.append(sum(passes_of(model, 1)))
            step()
            optimizer.zero_grad()
        return found

    plain = Plain(AFTER)

    def skip() -> None:
        plain.flush()
        plain.optimizer.zero_grad()

    known = run(plain.model, plain.optimizer, plain.step, skip)
    plain.flush()
    model, optimizer = prepared(place, tmp_path)
    found = run(model, optimizer, optimizer.step, optimizer.zero_grad)
    assert both.same(found, known)
    assert not differing(weights(overspill.close(model)), weights(plain.model))


def test_room_for_two_gradients_is_planned() -> None:
    model = small.build()
    made = {
        update: overspill.plan(model, adamw(model), update=update, place=HOMES["host"], gpu="64MiB", host="64MiB")
        for update in ("lazy", "delayed")
    }
    assert made["delayed"].bytes_of("host", "grad") == 2 * made["lazy"].bytes_of("host", "grad")


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="delay_after= to be a whole number"):
        prepared("host", tmp_path, after=-1)
    model, optimizer = prepared("states", tmp_path, after=0)
    sum(passes_of(model, 1))
    optimizer.step()
    optimizer.zero_grad()
    sum(passes_of(model, 1))
    for look in (LOOKS["state_dict"], LOOKS["optimizer.state_dict"], LOOKS["settle"], LOOKS["evaluation"]):
        with pytest.raises(StateError, match="expected step\\(\\) before the model"):
            look(model, optimizer)


BREACHES: dict[str, Callable[[nn.Module, Any], Any]] = {
    **LOOKS,
    "forward": lambda model, optimizer: next(iter(both.losses(model, 1))),
    "weights": lambda model, optimizer: model.last.weight.norm(),
    "close": lambda model, optimizer: overspill.close(model),
}


@pytest.mark.parametrize("name", BREACHES)
@pytest.mark.parametrize("place", ["device", "host", "states"])
def test_what_will_be_refused_is_refused_in_the_first_step(name: str, place: str, tmp_path: Path) -> None:
    """Not after hours, in the step in which the first update is late."""
    model, optimizer = prepared(place, tmp_path, after=40)
    sum(passes_of(model, 1))
    for _ in range(2):
        with pytest.raises(StateError, match=r"expected step\(\) before .*from step 42 on; the same is refused before"):
            BREACHES[name](model, optimizer)
    optimizer.step()
    BREACHES[name](model, optimizer)


def test_a_second_pass_is_refused_in_the_first_step(tmp_path: Path) -> None:
    model, optimizer = prepared("states", tmp_path, after=40, micro_batches=2)
    one, other = both.losses(model, 2)
    one.backward()
    with pytest.raises(StateError, match=r"expected one backward pass before step\(\).*from step 42 on.*no_sync"):
        other.backward()
    optimizer.zero_grad()
    sum(passes_of(model, 2))
    optimizer.step()


def test_bf16_is_the_same_everywhere(paged: bool, tmp_path: Path) -> None:
    found = [trained(*prepared(place, tmp_path, precision="bf16")) for place in ("device", "host", "states")]
    check(found[1], found[0])
    check(found[2], found[0])


@pytest.mark.parametrize(
    "way", ["lengths", *(pytest.param(w, marks=pytest.mark.full) for w in ("zeroed late", "evaluated"))]
)
@pytest.mark.parametrize(
    "room", [pytest.param(room, marks=() if room == 8 else pytest.mark.full) for room in (4, 8, 12, 20, 40)]
)
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.full)])
def test_what_is_kept_stays_while_homes_change(
    precision: str, way: str, room: int, paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that a step keeps live in host memory, when there is room on the device for new ones."""
    keywords = {"precision": precision, "update": "delayed", "delay_after": 1}
    model = small.build(blocks=BLOCKS)
    model, optimizer = overspill.prepare(model, adamw(model), place=HOMES["device"], **keywords)
    plainly = LOOPS[way](model, optimizer, []), weights(overspill.close(model))
    model, optimizer = crowded(room, monkeypatch, **keywords)
    check((LOOPS[way](model, optimizer, []), weights(overspill.close(model))), plainly)
