"""How long a step takes: what plans foretell, beside what was measured."""

import json
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.bench import rows
from overspill.errors import OptionError
from overspill.times import ONE_WAY, Pace, Passing, Times, behind, times_of
from overspill.trace import OwnTime
from tests import small

FILES = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("step*.json"))
RESULTS = [path for path in FILES if "compute" in {row["engine"] for row in json.loads(path.read_text())["engines"]}]
PACE = Pace(up=60.0, down=50.0, both=100.0, read=10.0, write=5.0)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_steps_took_as_long_as_is_foretold(path: Path) -> None:
    """The bounds are those of overspill/times.py, Note [Times]."""
    body = json.loads(path.read_text())
    found = rows.floors(body["engines"], body["link"]["bytes_per_second"])
    took = {row["name"]: row["step_seconds"] for row in body["engines"] if row["name"] in found}
    assert took, "there are steps of ours"
    for name, seconds in took.items():
        assert 0.93 <= seconds / found[name]["predicted_seconds"] <= 1.17, name


def test_there_are_files_to_compare_with() -> None:
    assert len(RESULTS) >= 5


def test_the_slowest_way_counts() -> None:
    assert times_of(PACE, Passing(60, 10), Passing()) == Times(1.0, 0.0, "the link")
    assert times_of(PACE, Passing(60, 50), Passing(30, 50)) == Times(1.1, 1.0, "the link")
    assert times_of(PACE, Passing(60, 50, 30, 10), Passing(30, 50, 30, 10)) == Times(5.0, 5.0, "the disk")


def test_what_is_not_known_is_not_foretold() -> None:
    assert times_of(Pace(), Passing(1, 0), Passing()) is None
    assert times_of(PACE._replace(write=None), Passing(0, 0, 1, 1), Passing()) is None
    assert times_of(Pace(), Passing(), Passing()) == Times(0.0, 0.0, "the link")


def test_a_step_is_what_computing_does_not_hide() -> None:
    lazy, eager = Times(1.2, 1.0, "the link"), Times(1.2, 0.0, "the link")
    assert [each.step(0.5, 1.0) for each in (lazy, eager)] == [2.0, 1.5]
    assert [each.step(0.1, 0.15) for each in (lazy, eager)] == [1.2, 1.2]
    assert lazy.step(1.5, 3.0) == 4.5


@pytest.mark.parametrize(
    ("times", "told"),
    [
        (
            Times(7.13, 6.33, "the link"),
            "at least 7.13 s for bytes over the link, 6.33 s of them beside the first forward pass; "
            "all other computing comes after these 6.33 s",
        ),
        (
            Times(0.0312, 0.0312, "the disk"),
            "at least 31.2 ms for bytes over the disk beside the first forward pass; "
            "all other computing comes after these 31.2 ms",
        ),
        (Times(7.13, 0.0, "the link"), "7.13 s for bytes over the link, or what computing takes if that is longer"),
        (Times(0.0, 0.0, "the link"), "what computing takes"),
    ],
)
def test_times_in_words(times: Times, told: str) -> None:
    assert str(times) == told


def planned(**keywords: Any) -> overspill.Plan:
    model = small.build()
    machine = {"device": 1 << 24, "host": 1 << 30, **keywords.pop("machine", {})}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return overspill.plan(model, optimizer, machine=machine, host="100MiB", **keywords)


def test_a_plan_says_what_passing_takes() -> None:
    rates, place = {"link": 1 << 20, "disk": 1 << 18}, {"state": "host"}
    lazy, eager = (planned(machine=rates, place=place, update=update) for update in ("lazy", "eager"))
    states = sum(unit.state_bytes for unit in lazy.model.units)
    assert lazy.moved["up"] == lazy.moved["down"] == states
    assert lazy.times is not None and eager.times is not None
    # Some of them are in the ring already.
    assert 1.0 <= lazy.times.first / (states / rates["link"]) < lazy.times.passing / (states / rates["link"]) <= 2.0
    assert lazy.times.passing == pytest.approx(2 * states / rates["link"]) == eager.times.passing
    assert eager.times.first == 0.0
    assert re.search(r"predicted step: at least .* s for bytes over the link, .* s of them beside the first", str(lazy))
    assert re.search(r"predicted step: .* s for bytes over the link, or what computing takes if that is", str(eager))
    assert json.loads(lazy.to_json())["seconds"]["passing"] == lazy.times.passing
    assert planned(machine=rates, place={}).times == Times(0.0, 0.0, "the link")


def test_a_disk_that_is_slower_than_the_link_counts(tmp_path: Path) -> None:
    place = {"state": "nvme"}
    made = planned(machine={"link": 1 << 20, "disk": 1 << 18}, place=place, nvme=tmp_path)
    states = sum(unit.state_bytes for unit in made.model.units)
    assert made.times is not None and made.times.by == "the disk"
    assert made.times.passing == pytest.approx(2 * states / (1 << 18))
    unknown = planned(machine={"link": 1 << 20}, place=place, nvme=tmp_path)
    assert unknown.times is None
    assert 'predicted step: not known: say how fast its disk is, with machine["disk"]' in str(unknown)


def test_only_pages_of_a_thread_of_their_own_are_there_before_a_step(tmp_path: Path) -> None:
    rates: dict[str, Any] = {"machine": {"link": 1 << 20, "disk": 1 << 18}, "nvme": tmp_path}
    for said in ({"precision": "fp32", "place": {"state": "host"}}, {"place": {"state": "nvme"}}):
        made = planned(**rates, **said)
        assert made.times is not None and made.times.first == made.times.passing
    made = planned(**rates, place={"state": "host"})
    assert made.times is not None and made.times.first < made.times.passing


@pytest.mark.parametrize("place", [{"state": "host"}, {"state": "host", "grad": "host", "weight": "host"}], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bench_foretells_what_a_plan_does(place: dict[str, str], precision: str) -> None:
    keywords: dict[str, Any] = {"place": place, "precision": precision}
    made = planned(machine={"link": 1 << 20}, **keywords)
    lines = [(line.tier, line.what, line.nbytes) for line in made.lines]
    report: dict[str, Any] = {"plan": json.loads(made.to_json()), "moved": made.moved}
    report["bytes"] = {tier: {what: n for where, what, n in lines if where == tier} for tier in ("device", "host")}
    row: dict[str, Any] = {"name": "ours", "engine": "ours", "ok": True, "step_seconds": 1.0, "report": report}
    row["settings"] = {"training": {"recompute": True, "micro_batches": 1}, "keywords": keywords}
    compute = {"name": "compute", "engine": "compute", "ok": True, "step_seconds": 0.4}
    rates = {"both": float(1 << 20), **dict.fromkeys(("up", "down"), ONE_WAY * (1 << 20))}
    found = rows.floors([row, compute], rates)["ours"]
    assert made.times is not None
    # What an update holds for a moment is not told apart there.
    assert found["predicted_seconds"] == pytest.approx(made.times.step(0.1, 0.3), rel=0.05)
    for change in (
        lambda: report["bytes"].update(nvme={"state": 1}),
        lambda: report["plan"]["limits"].update(hands="split"),
    ):
        report["bytes"].pop("nvme", None)
        change()
        assert "predicted_seconds" not in rows.floors([row, compute], {"up": 1, "down": 1, "both": 1})["ours"]


def test_what_the_ring_holds_is_there() -> None:
    assert behind(Passing(40, 30, 20, 10), 10) == Passing(30, 30, 15, 10)
    assert behind(Passing(40, 30, 20, 10), 50) == Passing(0, 30, 0, 10)
    assert behind(Passing(), 1) == Passing()


def test_a_ring_that_is_longer_than_all_states_holds_no_more() -> None:
    """What weights take to come is counted, however many slots there are."""
    firsts = []
    for budget in ("16MiB", "32MiB"):
        place = {"weight": "host", "state": "host"}
        made = planned(machine={"device": 1 << 26, "link": 1 << 20}, place=place, gpu=budget)
        states = sum(line.nbytes for line in made.lines if (line.tier, line.what) == ("host", "state"))
        weights = sum(line.nbytes for line in made.lines if (line.tier, line.what) == ("host", "weight"))
        assert made.bytes_of("device", "updates passing") > states
        assert made.times is not None
        firsts.append(made.times.first)
        pace = Pace(ONE_WAY * (1 << 20), ONE_WAY * (1 << 20), 1 << 20)
        seconds = pace.seconds(Passing(weights, weights + states))
        assert seconds is not None and made.times.first == pytest.approx(seconds["the link"], rel=0.05)
    assert firsts[0] == firsts[1]


def test_a_plan_of_another_machine_has_the_times_of_this_one() -> None:
    model = small.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    machine = {"device": 1 << 24, "host": 1 << 30, "link": 1000}
    made = overspill.plan(model, optimizer, machine=machine, place={"state": "host"}, gpu="16MiB", host="100MiB")
    assert made.times is not None and made.times.passing > 1
    _, prepared = overspill.prepare(model, optimizer, place=made)
    assert prepared.report()["passing_seconds"] is None


@pytest.mark.parametrize("rate", ["50GB", -1, 0, True, float("nan"), float("inf")])
def test_rates_are_numbers(rate: Any) -> None:
    with pytest.raises(OptionError, match="expected machine= with 'link' as a number of bytes above zero, found"):
        planned(machine={"link": rate})


def test_without_a_link_nothing_is_foretold() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    made = overspill.plan(model, optimizer)
    assert made.times is None and "predicted" not in str(made)
    model, optimizer = overspill.prepare(model, optimizer)
    assert optimizer.report()["passing_seconds"] is None
    with pytest.raises(OptionError, match="'lnk'"):
        overspill.plan(
            nn.Linear(3, 3), torch.optim.AdamW(model.parameters()), machine={"device": 1, "host": 1, "lnk": 1}
        )


def test_what_a_plain_loop_does_too_is_not_our_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, mine = iter([1.0, 10.0, 14.0, 16.0, 20.0, 21.0]), threading.get_ident()

    def thread_time() -> float:
        # Threads of earlier tests may be there yet.
        return next(clock) if threading.get_ident() == mine else 0.0

    monkeypatch.setattr(sys.modules["overspill.trace"], "time", SimpleNamespace(thread_time=thread_time))
    monkeypatch.setattr(OwnTime, "total", 0.0)
    own = OwnTime()
    with own, own, own.plain():
        pass
    assert own.seconds == 16.0 - 1.0 - (14.0 - 10.0)
    with own.plain():
        pass
    assert own.seconds == 11.0, "not within a call of ours"
