"""The public functions: what they say is what happens, and what they give back is the user's."""

import gc
import json
import re
import tracemalloc
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.errors import OptionError
from overspill.trace import Recorder
from tests import small
from tests.both import AWAY, HERE, adamw, everywhere, grads, losses, prepare, same, train
from tests.reference import differing, same_bits, weights

BUDGETS = {"gpu": "64MiB", "host": "64MiB"}


def plain_run(steps: int = 3):
    model = small.build()
    optimizer = adamw(model)
    train(model, optimizer, steps)
    return model, optimizer


# ---- plan


@everywhere
def test_a_plan_is_what_prepare_does(place, tmp_path: Path) -> None:
    model = small.build()
    optimizer = adamw(model)
    keywords = {**BUDGETS, "nvme": {tmp_path: "1GiB"}, "place": place}
    planned = overspill.plan(model, optimizer, **keywords)
    assert {type(p) for p in model.parameters()} == {nn.Parameter} and list(tmp_path.iterdir()) == []
    model, optimizer = overspill.prepare(model, optimizer, **keywords)
    assert optimizer.report()["plan"] == planned
    assert {p.of(role) for p in planned.placements for role in place} == set(place.values())


def test_a_plan_allocates_nothing(tmp_path: Path) -> None:
    """The model is as good as 40 GB large, and is planned for a machine that is not there."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(10_000, 10_000) for _ in range(100)))
    optimizer = adamw(model)
    tracemalloc.start()
    planned = overspill.plan(
        model, optimizer, machine={"device": 2**36, "host": 2**38}, nvme={tmp_path: "1TB"}, precision="fp32"
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert planned.model.parameters == 100 * (10_000**2 + 10_000)
    assert sum(planned.peaks.values()) > 4 * 4 * planned.model.parameters
    assert peak < 64 * 2**20
    assert planned.peak("device") <= planned.budget.device <= 2**36


def test_a_plan_prints_as_a_table_and_as_json(tmp_path: Path) -> None:
    model = small.build()
    planned = overspill.plan(model, adamw(model), **BUDGETS, nvme=tmp_path, place=AWAY)
    text = str(planned).splitlines()
    assert text[0].startswith(f"overspill: {planned.model.parameters:,} parameters in 6 units")
    assert [line.split() for line in text if line.startswith("what")] == [["what", "device", "host", "nvme"]]
    assert {"weight", "grad", "state", "peak", "budget"} <= {line.split()[0] for line in text if line}
    assert any("weights host, gradients host, states nvme" in line for line in text)
    body = json.loads(planned.to_json())
    assert body["peak"] == planned.peaks and body["parameters"] == planned.model.parameters
    assert sum(line["nbytes"] for line in body["lines"] if line["tier"] == "host") == planned.peak("host")
    assert [unit["home"] for unit in body["units"]] == [AWAY] * 6
    assert sum(unit["parameters"] for unit in body["units"]) == sum(p.numel() for p in model.parameters())


def test_a_plan_can_be_given_to_prepare(tmp_path: Path) -> None:
    model = small.build()
    keywords = {**BUDGETS, "nvme": {tmp_path: "1GiB"}, "precision": "fp32"}
    planned = overspill.plan(model, adamw(model), **keywords, place=AWAY)
    model, optimizer = overspill.prepare(model, adamw(model), **keywords, place=planned)
    assert optimizer.report()["plan"] == planned
    plain = small.build()
    assert train(model, optimizer) == train(plain, adamw(plain))


def test_a_plan_of_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    model = small.build()
    planned = overspill.plan(model, adamw(model), **BUDGETS)
    for other, steps in ((small.build(blocks=3), adamw), (model, lambda m: torch.optim.SGD(m.parameters()))):
        with pytest.raises(OptionError, match=r"expected place= to be a plan of this model .*, found another"):
            overspill.prepare(other, steps(other), **BUDGETS, place=planned)


def test_a_plan_for_more_ranks_than_there_are() -> None:
    model = small.build()
    alone, shared = (overspill.plan(model, adamw(model), world=n, zero=3, precision="fp32") for n in (1, 4))
    for role in ("weight", "grad", "state"):
        one, four = (sum(plan.bytes_of(tier, role) for tier in ("device", "host")) for plan in (alone, shared))
        assert one / 4 <= four < one / 2, role
    assert "rank 0 of 4 at ZeRO stage 3" in str(shared)
    for world in (0, -1, 2.0, "2", True):
        with pytest.raises(OptionError, match="expected world= as the number of processes, from 1, found"):
            overspill.plan(model, adamw(model), world=world, precision="fp32")


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_stage_divides_nothing_for_one_process(zero: int) -> None:
    model = small.build()
    model, optimizer = overspill.prepare(model, adamw(model), zero=zero, precision="fp32")
    small.loss_of(model, next(small.batches())).backward()
    optimizer.step()
    assert optimizer.report()["ranks"]["size"] == 1
    overspill.close(model)


# ---- what prepare gives back


@everywhere
def test_the_objects_are_the_users(place, tmp_path: Path) -> None:
    model = small.build()
    own = adamw(model)
    params, groups = list(model.parameters()), own.param_groups
    prepared, optimizer = overspill.prepare(model, own, place=place, nvme=tmp_path, precision="fp32")
    assert prepared is model and optimizer.param_groups is groups and optimizer.defaults is own.defaults
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert all(isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad for p in params)
    assert str(small.build()) == str(model)
    assert model.no_sync().__enter__() is None


def test_the_defaults_look_at_the_machine() -> None:
    plain, model = small.build(), small.build()
    model, optimizer = overspill.prepare(model, adamw(model), precision="fp32")
    assert train(model, optimizer) == train(plain, adamw(plain))
    assert optimizer.report()["plan"].budget.device > 0


# ---- report and trace


@everywhere
def test_report(place, tmp_path: Path) -> None:
    model, optimizer = prepare(place, tmp_path)
    assert optimizer.report()["steps"] == 0
    train(model, optimizer, 2)
    first = optimizer.report()
    train(model, optimizer, 1)
    report = optimizer.report()
    planned = report["plan"]
    assert (first["steps"], report["steps"]) == (2, 3)
    assert report["peak"] == planned.peaks
    assert report["bytes"][place["state"]]["state"] == planned.bytes_of(place["state"], "state") > 0
    assert report["seconds"] > 0 and sum(report["op_seconds"].values()) <= report["seconds"]
    assert report["moved"] == pytest.approx({lane: n for lane, n in planned.moved.items() if n}, rel=0.05)
    assert bool(report["moved"]) == (place == AWAY)


def test_every_key_of_a_report_is_explained(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/report.md").read_text()
    first_cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    explained = [key for cell in first_cells for key in re.findall(r"`(\w+)`", cell)]
    model, optimizer = prepare(AWAY, tmp_path)
    before = optimizer.report()
    train(model, optimizer, 1)
    assert before.keys() == optimizer.report().keys()
    assert sorted(explained) == sorted([*before, "sent"]), "over ranks there is `sent`"


def test_trace_has_one_track_per_lane(tmp_path: Path) -> None:
    model, optimizer = prepare(AWAY, tmp_path)
    train(model, optimizer, 1)
    with overspill.trace(model, tmp_path / "trace.json"):
        train(model, optimizer, 2)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    spans = [e for e in events if e["ph"] == "X"]
    assert sorted(names.values()) == ["compute", "down", "model", "read", "up", "write"]
    calls = [e["name"] for e in sorted(spans, key=lambda e: e["ts"]) if names[e["tid"]] == "model"]
    assert {"blocks.0", "backward of blocks.0", "outside of units"} <= set(calls)
    assert calls.index("blocks.0") < calls.index("blocks.1") < calls.index("backward of blocks.1")
    assert {e["tid"] for e in spans} == set(names)
    assert {"fetch", "update", "grad_store", "state_fetch"} <= {e["name"] for e in spans}
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in spans)
    for track in names:
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == track)
        # One begins where another ends, and their sum is rounded: times are microseconds since the machine started.
        assert all(end <= begin + 1e-3 for (_, end), (begin, _) in pairwise(mine)), "one at a time"


def test_a_trace_ends_with_its_context(tmp_path: Path) -> None:
    model, optimizer = prepare(AWAY, tmp_path)
    with pytest.raises(ZeroDivisionError), overspill.trace(model, tmp_path / "first.json"):
        train(model, optimizer, 1)
        raise ZeroDivisionError
    train(model, optimizer, 2)
    with overspill.trace(model, tmp_path / "second.json"):
        pass
    read = [json.loads((tmp_path / name).read_text())["traceEvents"] for name in ("first.json", "second.json")]
    assert len(read[0]) > 50 and [e for e in read[1] if e["ph"] == "X" and e["name"] == "update"] == []


# ---- one parameter


@everywhere
def test_gradient_and_state_of_one_parameter(place, tmp_path: Path) -> None:
    plain, own = plain_run(2)
    model, optimizer = prepare(place, tmp_path)
    p = model.blocks[1].up.weight
    assert overspill.grad(p) is None and overspill.state(p) == {}
    train(model, optimizer, 2)
    for m in (plain, model):
        for loss in losses(m, 1):
            loss.backward()
    assert same([overspill.grad(p) for p in model.parameters()], grads(plain))
    assert type(overspill.grad(p)) is torch.Tensor
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        state = overspill.state(mine)
        assert state.keys() == own.state[theirs].keys()
        assert all(same_bits(state[k], own.state[theirs][k]) for k in state)
    overspill.grad(p).zero_()
    overspill.state(p)["exp_avg"].zero_()
    optimizer.step(), own.step()
    assert differing(weights(model), weights(plain)) == [], "copies are handed out"


@everywhere
def test_settle_brings_everything_home(place, tmp_path: Path) -> None:
    model, optimizer = prepare(place, tmp_path)
    train(model, optimizer)
    engine = overspill.api._engine(model)
    assert engine.executor.state.pending
    overspill.settle(model)
    state = engine.executor.state
    assert not (state.pending or state.changed or state.ready or state.leaving)
    assert differing(weights(model), weights(plain_run()[0])) == []


# ---- close


@everywhere
def test_close_gives_a_plain_model_and_the_users_optimizer(place, tmp_path: Path) -> None:
    plain, steps = plain_run(3)
    expected = train(plain, steps)
    model = small.build()
    own = adamw(model)
    before = {*dir(model), *vars(own)}
    prepared, optimizer = overspill.prepare(model, own, place=place, nvme=tmp_path, precision="fp32")
    train(prepared, optimizer)
    assert overspill.close(prepared) is model
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
    assert {*dir(model), *vars(own)} - {"_opt_called"} == before
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert train(model, own) == expected
    assert differing(weights(model), weights(plain)) == []
    assert same([sorted(own.state[p].items()) for p in model.parameters()], [
        sorted(steps.state[p].items()) for p in plain.parameters()
    ])  # fmt: skip


@everywhere
def test_a_closed_model_stays_as_it_is(place, tmp_path: Path) -> None:
    """So it may be closed in a `finally`, whoever still has its optimizer."""
    model, optimizer = prepare(place, tmp_path)
    train(model, optimizer)
    overspill.close(model)
    before = weights(model)
    assert overspill.close(model) is model
    del optimizer
    gc.collect()
    assert overspill.close(model) is model
    assert differing(weights(model), before) == []
    train(*overspill.prepare(model, adamw(model), place=place, nvme=tmp_path, precision="fp32"))
    assert {type(p) for p in overspill.close(model).parameters()} == {nn.Parameter}


@everywhere
def test_close_in_the_middle_of_a_step(place, tmp_path: Path) -> None:
    """Gradients that have not been stepped with are plain ones afterwards."""
    plain, steps = plain_run(2)
    model = small.build()
    own = adamw(model)
    model, optimizer = overspill.prepare(model, own, place=place, nvme=tmp_path, precision="fp32")
    train(model, optimizer, 2)
    for m in (plain, model):
        for loss in losses(m, 2):
            loss.backward()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5)
        m.last.bias.grad = None
    overspill.close(model)
    assert same(grads(model), grads(plain))
    assert {type(p.grad) for p in model.parameters()} == {torch.Tensor, type(None)}
    own.step(), steps.step()
    assert train(model, own) == train(plain, steps)


@everywhere
def test_a_graph_from_before_close_is_good_afterwards(place, tmp_path: Path) -> None:
    plain, model = small.build(), small.build()
    model, _ = overspill.prepare(model, adamw(model), place=place, nvme=tmp_path, precision="fp32")
    for m in (plain, model):
        loss = next(losses(m, 1))
        if m is model:
            overspill.close(model)
        loss.backward()
    assert same(grads(model), grads(plain))


def test_a_graph_from_before_close_is_not_scaled_afterwards(tmp_path: Path) -> None:
    plain, model = small.build().half(), small.build().half()
    expected = next(losses(plain, 1))
    model, _ = overspill.prepare(model, adamw(model), place=AWAY, nvme=tmp_path, precision="fp16")
    loss = next(losses(model, 1))
    overspill.close(model)
    expected.backward(), loss.backward()
    assert same(grads(model), grads(plain))


@everywhere
def test_prepared_closed_and_prepared_again(place, tmp_path: Path) -> None:
    plain, steps = plain_run(3)
    model = small.build()
    own = adamw(model)
    for _ in range(3):
        model, optimizer = overspill.prepare(model, own, place=place, nvme=tmp_path, precision="fp32")
        train(model, optimizer, 1)
        overspill.close(model)
    assert differing(weights(model), weights(plain)) == []
    assert train(model, own) == train(plain, steps)


def test_several_models_at_once(tmp_path: Path) -> None:
    places = [HERE, AWAY, {"weight": "nvme", "grad": "nvme", "state": "nvme"}]
    pairs = [prepare(place, tmp_path, lambda s=s: small.build(seed=s)) for s, place in enumerate(places)]
    for _ in range(3):
        for model, optimizer in pairs:
            train(model, optimizer, 1)
    overspill.close(pairs[1][0])
    for seed, (model, _) in enumerate(pairs):
        plain = small.build(seed=seed)
        train(plain, adamw(plain))
        assert differing(weights(model), weights(plain)) == []


# ---- what is left behind


def test_nothing_is_left_on_disk_after_close(tmp_path: Path) -> None:
    model, optimizer = prepare(AWAY, tmp_path)
    train(model, optimizer)
    overspill.close(model)
    assert list(tmp_path.iterdir()) == []


@everywhere
def test_nothing_is_left_when_the_model_is_dropped(place, tmp_path: Path) -> None:
    model, optimizer = prepare(place, tmp_path)
    train(model, optimizer)
    watched = [weakref.ref(x) for x in (model, optimizer, overspill.api._engine(model), model.last.weight)]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in watched] == [None] * 4
    assert list(tmp_path.iterdir()) == []


def test_the_model_alone_keeps_everything(tmp_path: Path) -> None:
    model = small.build()
    own = adamw(model)
    model, optimizer = overspill.prepare(model, own, place=AWAY, nvme=tmp_path, precision="fp32")
    train(model, optimizer)
    del optimizer
    gc.collect()
    overspill.close(model)
    plain, steps = plain_run()
    assert train(model, own) == train(plain, steps)


def test_stamps_are_those_of_the_models_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whichever is the current one: times between events of two devices cannot be told."""
    found: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...
        def synchronize(self) -> None: ...
        def record(self, stream: Any = None) -> None:
            found.append(stream)

        def elapsed_time(self, other: Any) -> float:
            return 1.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)
    recorder, device = Recorder(), torch.device("cuda", 1)
    recorder.start(device)
    with recorder.span("compute", "open", {}):
        recorder.mark("a block")
    recorder.stop()
    recorder.write(tmp_path / "trace.json")
    assert len(found) == 5 and set(found) == {device}
