"""`overspill train`, as a user runs it: exit codes, what it prints, what it leaves behind."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from overspill.cli import (
    built_in,
    train,  # noqa: F401 - registers the command
)
from overspill.cli.app import app
from overspill.cli.settings import resolve
from overspill.cli.verify import compare
from overspill.errors import OptionError
from overspill.report.run import RunFolder

TINY = ["--layers", "2", "--hidden", "64", "--heads", "2", "--seq", "32", "--batch", "2", "--steps", "6"]
SMALL_BUDGET = ["--gpu", "2MiB", "--host", "1MiB"]


def overspill_train(*options: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    # One thread: on tiny tensors more of them only wait for each other.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "overspill", "train", *options]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False)


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_a_run_is_exact_within_its_plan_and_leaves_its_folder(tmp_path: Path) -> None:
    nvme, run = tmp_path / "nvme", tmp_path / "run"
    nvme.mkdir()
    options = [*TINY, *SMALL_BUDGET, "--nvme", str(nvme), "--micro-batches", "2", "--verify", "--run", str(run)]
    options += ["--lr", "1e-3", "--warmup", "10"]
    done = overspill_train(*options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "verify: 112 of 112 tensors equal, bit for bit" in done.stdout
    assert "6 of 6 losses equal" in done.stdout
    assert done.stdout.index("weights host") < done.stdout.index("training 1/6") < done.stdout.index("plainly 1/6")
    assert list(nvme.iterdir()) == []
    assert sorted(p.name for p in run.iterdir()) == ["log.jsonl", "plan.json", "plot.png", "trace.json"]

    plan = json.loads((run / "plan.json").read_text())
    assert plan["settings"]["micro_batches"] == 2
    assert plan["peak"]["nvme"] > 0 and plan["peak"]["host"] > 0
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [1, 2, 3, 4, 5, 6]
    assert log[-1]["loss"] < log[0]["loss"]
    assert [line["lr"] for line in log] == pytest.approx([i * 1e-4 for i in range(1, 7)])
    assert all(line["grad_norm"] > 0 and line["tokens_per_second"] > 0 for line in log)
    assert all(0 < line["bytes"]["nvme"] <= plan["peak"]["nvme"] for line in log)
    assert sum(log[-1]["moved"].values()) > 0
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    width, height = png_size(run / "plot.png")
    assert 1000 <= width <= 3000 and 500 <= height <= 2000


def test_the_demo_spills_beside_its_runs_and_takes_other_sizes(tmp_path: Path) -> None:
    done = overspill_train("--demo", *TINY, *SMALL_BUDGET, "--no-recompute", "--clip", "0", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verify: 112 of 112 tensors equal, bit for bit" in done.stdout
    (run,) = (tmp_path / "runs").iterdir()
    assert sorted(p.name for p in run.iterdir()) == ["log.jsonl", "plan.json", "plot.png", "trace.json"]
    assert json.loads((run / "plan.json").read_text())["settings"]["nvme"] == ["runs/spill"]
    assert json.loads((run / "log.jsonl").read_text().splitlines()[0])["grad_norm"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hidden", "64", "--heads", "3"], "--heads that divides --hidden 64, found 3"),
        ([*TINY, "--gpu", "100KiB"], "expected a device budget of at least"),
        pytest.param(["--nvme", "missing"], "'missing'", marks=pytest.mark.full),
        (["--steps", "many"], "--steps"),
    ],
    ids=["heads", "budget", "nvme", "steps"],
)
def test_bad_options_are_told_in_a_paragraph(options: list[str], message: str, tmp_path: Path) -> None:
    done = overspill_train(*options, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("runs/*")), "a run that did not begin leaves no folder"


@pytest.mark.parametrize(
    "given",
    [{"layers": 0}, {"seq": 1}, {"steps": -1}, {"lr": 0.0}, {"lr": float("nan")}, {"clip": -1.0}, {"seed": -1}],
    ids=str,
)
def test_settings_out_of_range_are_refused(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(OptionError, match=f"expected --{name} "):
        resolve(given, demo=True)


def test_a_run_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("")
    with pytest.raises(OptionError, match="new folder"):
        RunFolder(tmp_path).make()


def test_what_differs_is_named_and_ends_in_exit_code_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours = {"a": torch.tensor([0.0]), "b": torch.tensor([float("nan")]), "c": torch.ones(2)}
    plain = {"a": torch.tensor([-0.0]), "b": torch.tensor([float("nan")]), "d": torch.ones(2)}
    verdict = compare(ours, plain, [1.0, 2.0], [1.0, 2.5])
    assert (verdict.differing, verdict.strayed) == (("a", "d", "c"), (2,))
    assert "verify: 1 of 4 tensors equal" in str(verdict) and "differs: a" in str(verdict)
    monkeypatch.setattr(built_in, "run", lambda settings, folder, ranks: verdict)
    assert CliRunner().invoke(app, ["train", "--run", str(tmp_path)]).exit_code == 1
