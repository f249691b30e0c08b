"""`overspill bench quality`: a small GPT learns with states kept in every format, and a file says how well."""

import dataclasses
import json
import math
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from overspill.bench import chart, learning, process, quality, results
from overspill.bench.learning import CASES, Lesson
from overspill.bench.results import Files
from overspill.errors import OptionError
from tests.commands import apart, here

TINY = Lesson(steps=12, layers=1, hidden=32, heads=2, seq=32, batch=8, lr=1e-2, warmup=3, validated=2)
BUDGETS = {"gpu": "1GB", "host": "1GB"}


def learned(way: str, **changes: Any) -> dict[str, Any]:
    keywords = quality.WAYS[way]
    lesson = dataclasses.replace(TINY, **changes)
    return learning.learn(lesson, None if keywords is None else {**keywords, **BUDGETS}, lambda done, of: None)


@pytest.mark.parametrize("case", [c if c == "train" else pytest.param(c, marks=pytest.mark.full) for c in CASES])
def test_every_case_is_learned(case: str) -> None:
    found = {way: learned(way, case=case) for way in ("exact", "compact")}
    for row in found.values():
        assert len(row["losses"]) == TINY.steps and all(map(math.isfinite, row["losses"]))
        assert row["validation"][0][0] == 0 and row["validation"][-1] == (TINY.steps, row["final"])
        assert row["final"] < row["validation"][0][1] - 0.05
    first = [row["validation"][0][1] for row in found.values()]
    # But for masters that are nearer to the next weight once they have 24 bits.
    assert first[1] == pytest.approx(first[0], rel=1e-4), "all begin with the same values"
    assert found["exact"]["losses"] != found["compact"]["losses"]
    assert found["compact"]["final"] == pytest.approx(found["exact"]["final"], rel=0.02)


def test_the_same_again_and_close_to_torch_alone() -> None:
    exact, plain = learned("exact"), learned("plain")
    assert learned("exact") == exact
    assert plain["final"] == pytest.approx(exact["final"], rel=0.02)


@pytest.mark.full
def test_outliers_are_there() -> None:
    """They change what is learned, and only from the first on."""
    unclipped, rough = learned("exact", steps=24, clip=0.0), learned("exact", steps=24, case="outliers")
    assert unclipped["losses"][: learning.EVERY] == rough["losses"][: learning.EVERY]
    assert unclipped["losses"][learning.EVERY] != rough["losses"][learning.EVERY]


def row(case: str, way: str, final: float, ok: bool = True) -> dict[str, Any]:
    shown = {"losses": [4.0] * 70, "validation": [(0, 5.5), (70, final)], "final": final} if ok else {}
    return {"case": case, "way": way, "ok": ok, "reason": None if ok else "it failed", "seconds": 3.0, **shown}


def test_a_table_and_a_picture(tmp_path: Path) -> None:
    curves = [row("train", "exact", 2.0), row("train", "compact", 2.01), row("tiny", "exact", 0.0, ok=False)]
    told = quality.summary(curves)
    assert "+0.50 %" in told and "it failed" in told
    assert quality.beside(curves, curves[2]) is None
    body = {"lesson": dataclasses.asdict(TINY), "cases": {"train": "", "tiny": ""}, "curves": curves}
    chart.draw(body, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_has_what_its_picture_needs_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses of all steps would be a megabyte; early files have them, and are drawn as they were."""
    losses = [4.0 - 0.001 * step + 0.1 * math.sin(step) for step in range(1999)]
    validation = [(0, 4.1), (1999, 2.2)]

    found = {"losses": losses, "validation": validation, "final": 2.2}
    outcome = process.Outcome(found, None, {"cpu": "some"}, {}, 1.0, [])
    monkeypatch.setattr(process, "run", lambda *_: outcome)
    files = Files("quality", tmp_path / "found.json", None, results.head("quality", None))
    quality.run(quality.Run(lesson=TINY, cases=("train",), ways=("exact", "compact")), files)
    files.draw()
    body = json.loads((tmp_path / "found.json").read_text())
    assert all("losses" not in r and len(r["training"]) == 60 for r in body["curves"])
    early = [{k: v for k, v in r.items() if k != "training"} | {"losses": losses} for r in body["curves"]]
    chart.draw({**body, "curves": early}, tmp_path / "early.png")
    assert (tmp_path / "found.png").read_bytes() == (tmp_path / "early.png").read_bytes()


@pytest.mark.full
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ["--steps", "4", "--layers", "1", "--hidden", "32", "--heads", "2", "--seq", "32", "--batch", "2"]
    ways = ["--cases", "train,fine-tune", "--states", "exact,compact", "--at-once", "2"]
    told = here("bench", "quality", *sizes, *ways, "--out", "found.json")
    assert "compact" in told and "beside exact" in told
    body = json.loads(Path("found.json").read_text())
    assert [r["way"] for r in body["curves"]] == ["exact", "compact"] * 2 and all(r["ok"] for r in body["curves"])
    assert body["what"] == "overspill bench quality" and Path("found.png").exists()


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (["--cases", "nothing"], "--cases to be one of train"),
        (["--states", "fp8"], "--states to be one of plain"),
        (["--steps", "0"], "--steps from 1"),
        (["--hidden", "30", "--heads", "4"], "--heads that divide"),
        (["--states", "exact,delayed", "--steps", "30"], "--steps from 42 with --states delayed, .* found 30, "),
        (["--states", "delayed-500", "--steps", "501"], "--steps from 502 with --states delayed-500, .* found 501"),
        (["--steps", "300"], "--steps from 502 with --states delayed-500"),
    ],
)
def test_what_is_refused(told: list[str], why: str) -> None:
    with pytest.raises(OptionError, match=why):
        here("bench", "quality", *told)


def test_fewer_steps_are_refused_only_where_no_update_is_late() -> None:
    for steps, differs in ((41, False), (42, True)):
        asked = quality.Run(lesson=dataclasses.replace(TINY, steps=steps), ways=("exact", "delayed"))
        exact, late = learned("exact", steps=steps), learned("delayed", steps=steps)
        assert (exact["losses"] != late["losses"]) == differs
        if differs:
            quality.check_delay(asked)
        else:
            with pytest.raises(OptionError, match="--steps from 42"):
                quality.check_delay(asked)


@pytest.mark.full
def test_fine_tunes_begin_with_what_one_made_for_all(tmp_path: Path) -> None:
    alone = learned("exact", case="fine-tune", steps=6)
    start = str(tmp_path / "start.pt")
    learning.begin(dataclasses.replace(TINY, case="fine-tune", steps=6, start=start), lambda done, of: None)
    assert learned("exact", case="fine-tune", steps=6, start=start) == alone


def test_ctrl_c_ends_all_of_it(tmp_path: Path) -> None:
    """And leaves no worker."""
    asked = ["bench", "quality", "--steps", "100000", "--cases", "train", "--states", "exact,compact", "--at-once", "2"]
    found = apart([sys.executable, "-m", "overspill"], *asked, "--out", str(tmp_path / "found.json"), cwd=tmp_path)
    with found:
        try:
            assert found.stdout is not None
            while "learn, " not in found.stdout.readline():
                assert found.poll() is None
            workers = psutil.Process(found.pid).children(recursive=True)
            found.send_signal(signal.SIGINT)
            assert found.wait(60) != 0
        finally:
            found.kill()
    assert workers and not psutil.wait_procs(workers, 30)[1]
