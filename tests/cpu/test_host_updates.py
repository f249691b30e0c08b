"""`overspill bench update`: AdamW on the host's cores, ours beside torch's."""

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from overspill import cgroups
from overspill.bench import host_updates, process, results, updating
from overspill.bench.updating import BARE, MEMORY, WHOLE, Case
from overspill.errors import OptionError
from overspill.kernels import cpu
from tests.commands import here

NATIVE = pytest.mark.skipif(cpu.library() is None, reason="no native library: there was no compiler at install")
COUNT = 100_003


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about speed."""
    monkeypatch.setattr(updating, "REST", 0.0)


@NATIVE
def test_measurements() -> None:
    case = Case(counts=(COUNT, 64), engines=("ours", "torch"), rounds=3)
    found = updating.measure(case)
    kinds = [("torch", MEMORY), ("ours", BARE), ("torch", BARE), ("ours", WHOLE), ("torch", WHOLE)]
    assert [(row["engine"], row["kind"], row["count"]) for row in found] == [
        (*pair, count) for count in case.counts for pair in kinds
    ]
    for row in found:
        assert row["ok"] and 0 < row["fastest"] <= row["seconds"] <= row["slowest"]
        assert row["per_second"] == row["count"] / row["seconds"]
        assert row["cores"] == cgroups.cores() and row["rounds"] == 3


@NATIVE
def test_what_does_not_fit_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours needs least."""
    monkeypatch.setattr(updating, "host_available", lambda: 16 * COUNT)
    found = updating.measure(Case(counts=(COUNT,), engines=("ours", "torch"), rounds=1))
    assert [(row["engine"], row["kind"]) for row in found if row["ok"]] == [("ours", WHOLE)]
    assert all("of host memory, found" in row["reason"] for row in found if not row["ok"]) and len(found) == 5


@NATIVE
def test_what_is_not_there_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam", None)
    found = updating.measure(Case(counts=(64,), engines=("deepspeed", "ours"), rounds=1))
    assert [row["ok"] for row in found] == [True, False, True, False, True]
    assert "expected deepspeed to be installed" in found[1]["reason"]


@NATIVE
def test_a_peer_that_breaks_breaks_only_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(kind: str, on: updating.Arrays) -> NoReturn:
        raise AssertionError

    monkeypatch.setitem(updating._UPDATES, "deepspeed", broken)
    found = updating.measure(Case(counts=(64,), engines=("deepspeed", "ours"), rounds=1))
    assert [row["ok"] for row in found] == [True, False, True, False, True] and found[1]["reason"] == "AssertionError"
    monkeypatch.setitem(updating._UPDATES, "ours", broken)
    with pytest.raises(AssertionError):
        updating.measure(Case(counts=(64,), engines=("ours",), rounds=1))


@NATIVE
def test_a_size_that_ends_the_worker_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of the smaller sizes is written down."""
    said: list[list[int]] = []
    case = Case(counts=(64, 128), kinds=(WHOLE,), rounds=1)
    rows = updating.measure(case, known=lambda rows: said.append([row["count"] for row in rows]))
    assert said == [[64], [64, 128]]
    ended = process.Outcome({"rows": rows[:1]}, "killed by SIGKILL", {"cores": 2}, {}, 1.0, [])
    monkeypatch.setattr(process, "run", lambda *_: ended)
    files = results.Files("update", tmp_path / "found.json", None, {"machine": None})
    known = host_updates.run(host_updates.Run(sizes=(128, 64), engines=("ours",)), files)
    assert [(row["count"], row["kind"], row["ok"]) for row in known] == [
        (64, WHOLE, True),
        (128, MEMORY, False),
        (128, BARE, False),
        (128, WHOLE, False),
    ]
    assert known[-1]["reason"] == "killed by SIGKILL" and "killed by SIGKILL" in host_updates.summary(known)
    assert json.loads((tmp_path / "found.json").read_text())["updates"] == known


def arrays() -> dict[str, Tensor]:
    return {name: torch.full((64,), value, dtype=dtype) for name, (dtype, value) in updating.ARRAYS.items()}


@NATIVE
def test_whole_is_an_update_of_the_weights() -> None:
    """What is timed moves bf16 weights as it moves fp32 ones, and all engines do the same."""
    how, moved = cpu.How.best(), []
    assert how is not None
    for kind in (BARE, WHOLE):
        on = updating.elements_of(kind, arrays())
        before = on.weight.float().clone()
        for step in range(1, 201):
            cpu.RULES["adam"](on, updating.HYPERS, step, how)
        moved.append(float((before - on.weight.float()).mean()))
    assert moved[0] > 0 and moved[1] == pytest.approx(moved[0], rel=0.2), "but for bf16's own steps"
    for kind, name in ((BARE, "master"), (WHOLE, "weight")):
        own, others = arrays(), arrays()
        updating._ours(kind, own)()
        updating._torch(kind, others)()
        assert (own[name] != updating.ARRAYS[name][1]).all() or kind == WHOLE
        torch.testing.assert_close(own[name], others[name])
        torch.testing.assert_close(own["m"], others["m"])


def rows(count: int = 10**8) -> list[dict[str, Any]]:
    same = {"count": count, "cores": 2, "ok": True, "reason": None, "seconds": 1.0}
    return [
        {**same, "engine": "torch", "kind": MEMORY, "per_second": 28.0},
        {**same, "engine": "ours", "kind": BARE, "per_second": 21.6},
        {**same, "engine": "torch", "kind": BARE, "per_second": 10.8},
        {**same, "engine": "deepspeed", "kind": BARE, "ok": False, "reason": "it is not there"},
    ]


def test_ratios_and_the_table() -> None:
    (found,) = host_updates.ratios(rows())
    assert found["over_the_fastest_other"] == 2.0 and found["of_the_memory_rate"] == pytest.approx(0.9)
    told = host_updates.summary(rows())
    assert "2.00x the fastest other" in told and "90 % of the memory's own rate" in told and "it is not there" in told


def test_no_ratio_is_told_of_what_fits_the_caches() -> None:
    (found,) = host_updates.ratios(rows(5_000_000))
    assert found["over_the_fastest_other"] == 2.0 and found["of_the_memory_rate"] is None
    told = host_updates.summary(rows(5_000_000))
    assert "no ratios below 100.00M" in told and "fastest other" not in told and "% of" not in told
    told = host_updates.summary(rows(500_000_000))
    assert "2.00x the fastest other" in told and "no ratios" not in told


@NATIVE
@pytest.mark.full
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = here("bench", "update", "--params", "1M", "--cores", "1", "--rounds", "1", "--out", "found.json")
    body = json.loads(Path("found.json").read_text())
    assert [row["kind"] for row in body["updates"]] == [MEMORY, BARE, BARE, WHOLE, WHOLE]
    assert "1.00M" in told
    assert all(row["ok"] for row in body["updates"]) and len(body["ratios"]) == 2 and "ours, whole" in told


def test_what_is_refused() -> None:
    with pytest.raises(OptionError, match="--engine to be one of ours"):
        here("bench", "update", "--engine", "numpy")
    with pytest.raises(OptionError, match="--cores from 1 to the"):
        here("bench", "update", "--cores", "10000")


def test_the_paper_s_table_stands_beside_ours() -> None:
    alike = {"engine": "ours", "cores": 16, "ok": True, "per_second": 4e9}
    known = [
        {**alike, "kind": BARE, "count": 10**9, "seconds": 0.25},
        {**alike, "kind": WHOLE, "count": 10**9, "seconds": 0.125},
        {**alike, "kind": WHOLE, "count": 8 * 10**9, "seconds": 1.5},
        {**alike, "kind": BARE, "count": 8 * 10**9, "seconds": 0.0, "ok": False, "reason": "too large"},
        {**alike, "kind": BARE, "count": 5 * 10**8, "seconds": 0.1},
    ]
    assert host_updates.beside_the_paper(known) == [
        {"count": 10**9, "cores": 16, "paper": 0.22, BARE: 0.25, WHOLE: 0.125},
        {"count": 8 * 10**9, "cores": 16, "paper": 2.41, BARE: None, WHOLE: 1.5},
    ]
    told = host_updates.summary(known).splitlines()
    assert [line.split() for line in told[-2:]] == [
        ["1.00B", "16", "0.250", "0.125", "0.22"],
        ["8.00B", "16", "-", "1.500", "2.41"],
    ]
