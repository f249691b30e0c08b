"""`overspill bench update`: AdamW on the host's cores, ours beside torch's."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from overspill.bench import host_updates, updating
from overspill.bench.updating import BARE, MEMORY, WHOLE, Case
from overspill.errors import OptionError
from overspill.kernels import cpu
from tests.commands import here

NATIVE = pytest.mark.skipif(cpu.library() is None, reason="no native library: there was no compiler at install")
COUNT = 100_003


@NATIVE
@pytest.mark.parametrize("kind", [BARE, WHOLE])
@pytest.mark.parametrize("engine", ["ours", "torch"])
def test_a_measurement(engine: str, kind: str) -> None:
    found = updating.measure(Case(engine=engine, kind=kind, count=COUNT, rounds=2))
    assert 0 < found["seconds"] <= found["slowest"] and found["per_second"] == COUNT / found["seconds"]
    assert found["cores"] == len(os.sched_getaffinity(0))


@NATIVE
def test_whole_is_an_update_of_the_weights() -> None:
    """What is timed moves bf16 weights as it moves fp32 ones."""
    how, moved = cpu.How.best(), []
    assert how is not None
    for kind in (BARE, WHOLE):
        on = updating.elements_of(Case(engine="ours", kind=kind, count=64))
        before = on.weight.float().clone()
        for step in range(1, 201):
            cpu.adam(on, updating.HYPERS, step, how)
        moved.append(float((before - on.weight.float()).mean()))
    assert moved[0] > 0 and moved[1] == pytest.approx(moved[0], rel=0.2), "but for bf16's own steps"


def rows() -> list[dict[str, Any]]:
    same = {"count": 10, "cores": 2, "ok": True, "reason": None, "seconds": 1.0}
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


@NATIVE
@pytest.mark.full
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = here("bench", "update", "--params", "1M", "--cores", "1", "--rounds", "1", "--out", "found.json")
    body = json.loads(Path("found.json").read_text())
    assert [row["kind"] for row in body["updates"]] == [MEMORY, BARE, BARE, WHOLE, WHOLE]
    assert all(row["ok"] for row in body["updates"]) and len(body["ratios"]) == 2 and "ours, whole" in told


def test_what_is_refused() -> None:
    with pytest.raises(OptionError, match="--engine to be one of ours"):
        here("bench", "update", "--engine", "numpy")
    with pytest.raises(OptionError, match="--cores from 1 to the"):
        here("bench", "update", "--cores", "10000")
