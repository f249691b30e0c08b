"""Pages that the host's cores update while others pass through the ring: the same bits, and nobody is forgotten."""

import functools
import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.errors import StateError
from overspill.kernels import cpu, executors
from overspill.kernels.reference import ieee_root
from overspill.plan import sharing, solver
from overspill.plan.hands import Chosen
from overspill.program import Kind, Lane, Op
from overspill.runtime import cores, parts, rooms
from overspill.runtime.lanes import Lanes, Work
from overspill.specs import Hands, KiB
from tests.both import passes_of
from tests.cpu.test_ahead import check, loop, prepare, trained
from tests.reference import weights

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="no native library")


@pytest.fixture(params=["split", "host"])
def hands(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Hands:
    """Who updates. As on a GPU, with a short ring of small pages."""
    chosen: Hands = request.param
    monkeypatch.setattr(sharing, "choose", lambda speeds, sizes: Chosen(chosen, "as told"))
    monkeypatch.setattr(parts, "PAGED", {"cpu"})
    monkeypatch.setattr(rooms, "PIECES", {"cpu"})
    monkeypatch.setattr(parts, "CORES", {"cpu"})
    monkeypatch.setattr(solver, "PAGE", (512, 2 * KiB))
    monkeypatch.setattr(solver, "DEPTHS", (2,))
    monkeypatch.setattr(solver, "MOST_SLOTS", 2)
    # The root of the cores, and of a GPU.
    monkeypatch.setattr(executors, "torch_root", ieee_root)
    return chosen


places = pytest.mark.parametrize("place", ["states", "offload"])
"""With gradients on the device, and in host memory: of these more in test_cores_at_home.py."""


def with_cores(
    nvme: Path, delays: dict[Kind, float] | None = None, place: str = "states", **keywords: Any
) -> tuple[Any, Any, float]:
    """What was trained, and how much of it the cores updated."""
    passes, clip = keywords.pop("passes", 1), keywords.pop("clip", 0.5)
    model, optimizer = prepare(place, nvme, micro_batches=passes, **keywords)
    engine = overspill.api._engine(model)
    engine.executor.lanes.delays |= {Kind.STATE_FETCH: 0.001, **(delays or {})}
    found = loop(model, optimizer, passes, clip)
    overspill.settle(model)
    used: cores.Cores = engine.executor.pager.cores
    share = used.elements / sum(p.numel() for p in model.parameters()) / len(found)
    return found, weights(overspill.close(model)), share


@places
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("states", ["exact", "bf16", "compact"])
def test_the_same_bits_whoever_updates(states: str, passes: int, place: str, hands: Hands, tmp_path: Path) -> None:
    *found, share = with_cores(tmp_path, states=states, passes=passes, place=place)
    check(tuple(found), trained("device", tmp_path, clip=0.5, states=states, passes=passes))
    assert share > 0 and (hands == "host" or share < 1), "each of them had some"


@places
@pytest.mark.parametrize("update", ["eager", "delayed"])
def test_whenever_updates_begin(update: str, place: str, hands: Hands, tmp_path: Path) -> None:
    more: Any = {"update": update, "clip": 0.0} | ({"delay_after": 2, "clip": 0.5} if update == "delayed" else {})
    *found, share = with_cores(tmp_path, place=place, **more)
    check(tuple(found), trained("device", tmp_path, **more))
    assert share > 0


DELAYED = (Kind.PAGE_GRADS, Kind.UPDATE, Kind.STATE_STORE, Kind.DUE, Kind.UPDATED, Kind.GRAD_STORE)


@places
@pytest.mark.parametrize("kind", DELAYED)
def test_delays_change_no_bit(kind: Kind, place: str, hands: Hands, tmp_path: Path) -> None:
    *found, share = with_cores(tmp_path, {kind: 0.002}, place)
    check(tuple(found), trained("device", tmp_path, clip=0.5))
    assert share > 0


def test_near_the_gpu(hands: Hands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The thread that calls the library stays on the cores that are near, others do not."""
    there, near = os.sched_getaffinity(0), {min(os.sched_getaffinity(0))}
    monkeypatch.setattr(cores, "cores_near", lambda device, threads: near)
    ran, run = set(), cpu.How.run

    def noted(how: cpu.How, *args: Any) -> None:
        ran.add(frozenset(os.sched_getaffinity(0)))
        run(how, *args)

    monkeypatch.setattr(cpu.How, "run", noted)
    *found, share = with_cores(tmp_path)
    check(tuple(found), trained("device", tmp_path, clip=0.5))
    assert share > 0 and ran == {frozenset(near)} and os.sched_getaffinity(0) == there


def test_states_are_seen_as_they_are(hands: Hands, tmp_path: Path) -> None:
    """Also by who reads them while the cores have been at work, and edits weights in between."""
    found = []
    for place in ("device", "states"):
        model, optimizer = prepare(place, tmp_path, states="compact")
        loop(model, optimizer)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        loop(model, optimizer)
        state = optimizer.state_dict()["state"]
        found.append({f"{i}.{k}": v for i, each in state.items() for k, v in each.items()})
        overspill.close(model)
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_the_cores_is_heard_of(hands: Hands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, optimizer = prepare("states", tmp_path)
    engine = overspill.api._engine(model)
    engine.executor.lanes.delays |= {Kind.STATE_FETCH: 0.001}
    monkeypatch.setattr(engine.parts.made.update, "run_on_host", lambda *args: 1 / 0)
    with pytest.raises((StateError, ZeroDivisionError, RuntimeError), match=r"division by zero|ZeroDivision|cores"):
        loop(model, optimizer)


def test_the_plan_counts_what_they_take(hands: Hands, tmp_path: Path) -> None:
    model, optimizer = prepare("states", tmp_path)
    plan = optimizer.report()["plan"]
    assert plan.limits.hands == hands and "the host's cores" in str(plan) and "as told" in str(plan)
    assert plan.bytes_of("host", "updates on cores") >= 6 * 2 * KiB
    overspill.close(model)
    least = plan.peak("host") - plan.bytes_of("host", "updates on cores")
    model, optimizer = prepare("states", tmp_path, host=least)
    assert optimizer.report()["plan"].limits.hands == "streamed", "they go without where there is no room"
    overspill.close(model)


# ---- beside the rest


def test_a_trace_has_a_track_of_the_cores(hands: Hands, tmp_path: Path) -> None:
    model, optimizer = prepare("states", tmp_path)
    engine = overspill.api._engine(model)
    loop(model, optimizer)
    overspill.settle(model)
    used, before = engine.executor.pager.cores, engine.executor.pager.cores.elements
    with overspill.trace(model, tmp_path / "trace.json"):
        loop(model, optimizer)
        overspill.settle(model)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    found = [e for e in events if e["ph"] == "X" and names[e["tid"]] == "cores"]
    pages = [engine.units[e["args"]["unit"]].spec.pages[e["args"]["item"]] for e in found]
    assert {e["name"] for e in found} == {"update"} and all(e["dur"] > 0 for e in found)
    assert [e["args"]["bytes"] for e in found] == [page.state_bytes for page in pages]
    assert sum(part.numel for page in pages for part in page.parts) == used.elements - before > 0
    # Their gradients come down before, by another lane, and their weights go up behind it.
    down = Counter((e["args"]["unit"], e["args"]["item"]) for e in events if e["name"] == "page_grads")
    assert down == Counter((e["args"]["unit"], e["args"]["item"]) for e in found)
    overspill.close(model)


LONG = 60.0
"""Seconds after which nobody comes any more."""


class Held:
    """Holds the first page that the cores update, once this is on, until everything that is waited for was done beside
    it. Nobody else goes ahead of its begin: what is seen is of that time, however fast anybody is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *beside: str) -> None:
        self.on = False
        self.page: tuple[int, int] | None = None
        self.begun, self.done, self.over = (threading.Event() for _ in range(3))
        self._missing = set(beside)
        timed = Lanes.timed

        def held(lanes: Lanes, lane: Lane, op: Op, work: Work) -> None:
            self._before(op)
            timed(lanes, lane, op, work)
            if self.page is not None and op.lane in (Lane.DOWN, Lane.UPDATE) and (op.unit, op.item) != self.page:
                self.did(op.kind)

        def update(how: cpu.How, *given: Any) -> None:
            if self.page is not None and not self.begun.is_set():
                self.begun.set()
                assert self.done.wait(LONG), f"the cores were waited for: there was no {self._missing} beside them"
                run(how, *given)
                self.over.set()
                return
            run(how, *given)

        run = cpu.How.run
        monkeypatch.setattr(Lanes, "timed", held)
        monkeypatch.setattr(cpu.How, "run", update)

    def _before(self, op: Op) -> None:
        if self.page is not None and op.lane in (Lane.UP, Lane.DOWN, Lane.UPDATE):
            assert self.begun.wait(LONG), "the cores have a page and do not begin"
        elif self.on and op.kind == Kind.PAGE_GRADS:
            self.page = (op.unit, op.item)

    def did(self, what: str) -> None:
        """Something beside the cores, if they are at it."""
        if self.begun.is_set() and not self.done.is_set():
            self._missing.discard(what)
            if not self._missing:
                self.done.set()


def test_the_rest_goes_on_beside_the_cores(hands: Hands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A page that the cores have holds up neither others, which pass through the ring or come down to them, nor, where
    its unit is not needed yet, the forward pass."""
    beside = [Kind.PAGE_GRADS] if hands == "host" else [Kind.UPDATE, Kind.STATE_STORE, "forward"]
    held = Held(monkeypatch, *beside)
    model, optimizer = prepare("states", tmp_path)
    model.blocks[0].register_forward_hook(lambda *_: held.did("forward"))  # type: ignore[union-attr,index]
    found = []
    for step in range(6):
        found += passes_of(model, 1)
        optimizer.clip_grad_norm_(0.5)
        # Pages have something in them after a first update.
        held.on = step >= 1
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        assert not held.on or held.begun.wait(LONG), "the cores had no page"
    result = found, weights(overspill.close(model))
    assert held.over.is_set()
    check(result, trained("device", tmp_path, clip=0.5))


def test_the_backward_pass_goes_on_beside_the_cores(
    hands: Hands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where updates begin in it: the first block's pass begins when the cores have a page, and ends before them."""
    held, step = Held(monkeypatch, "backward"), 0
    model, optimizer = prepare("states", tmp_path, update="eager")
    first, last = model.blocks[0], model.blocks[-1]  # type: ignore[index]

    def begins(gradient: torch.Tensor) -> None:
        # Pages have something in them after a first update. Those of the step before are all done in the forward pass.
        held.on = step >= 1

    def comes(gradient: torch.Tensor) -> None:
        assert not held.on or held.begun.wait(LONG), "the cores had no page of the blocks behind it"

    def ends(gradient: torch.Tensor) -> None:
        held.did("backward")

    hooks = {(last, "output"): begins, (first, "output"): comes, (first, "input"): ends}
    for (block, end), hook in hooks.items():
        block.register_forward_hook(functools.partial(_on_gradient, hook, end))
    found = []
    for step in range(6):
        found += passes_of(model, 1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    result = found, weights(overspill.close(model))
    assert held.over.is_set(), "the cores had no page"
    check(result, trained("device", tmp_path, update="eager"))


def _on_gradient(
    hook: Callable[[torch.Tensor], None], end: str, module: nn.Module, given: tuple[torch.Tensor], out: torch.Tensor
) -> None:
    (out if end == "output" else given[0]).register_hook(hook)
