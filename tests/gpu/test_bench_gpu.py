"""The benchmarks on a GPU, in small: peaks, the link, budgets taken from a peer, a search by running out of memory."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from overspill.cli import bench  # noqa: F401 - registers the commands
from overspill.cli.app import app

pytestmark = pytest.mark.gpu


def here(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def body_of(path: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(path.read_text())
    return body


def test_engines_side_by_side(tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    work = ["--params", "60M", "--seq", "128", "--micro-batch", "2", "--micro-batches", "2", "--steps", "3"]
    ours = ["--ours", "gpu=peak:torch,name=in its peak", "--ours", "gpu=2GB,place=state:host,name=spilled"]
    told = here("bench", "step", *work, "--peers", "compute,torch,fsdp2", *ours, "--out", str(out))
    body = body_of(out)
    engines = {row["name"]: row for row in body["engines"]}
    assert all(row["ok"] for row in engines.values()), told
    for row in engines.values():
        assert row["gpu_peak"]["reserved"] >= row["gpu_peak"]["allocated"] > 0
        assert row["step_seconds"] == pytest.approx(sum(row["steps_seconds"]) / 3, rel=0.2)
    assert engines["in its peak"]["settings"]["keywords"]["gpu"] == engines["torch"]["gpu_peak"]["allocated"]
    link = body["link"]["bytes_per_second"]
    assert max(link["up"], link["down"]) <= link["both"] * 1.05
    assert body["floors"]["spilled"]["moved_bytes"] > 0 and body["machine"]["gpu"]


def test_plain_torch_is_searched_by_trying(tmp_path: Path) -> None:
    out = tmp_path / "largest.json"
    work = ["--seq", "128", "--micro-batch", "1", "--from", "20M", "--ratio", "1.2", "--gpu", "2GB"]
    here("bench", "max-size", *work, "--engine", "torch,ours", "--size", "max", "--size", "2x", "--out", str(out))
    cases = body_of(out)["cases"]
    assert [(case["engine"], case["asked"]) for case in cases] == [("torch", "max"), ("ours", "max"), ("ours", "2x")]
    assert all(case["row"]["ok"] for case in cases), [case["reason"] for case in cases]
    assert "out of GPU memory" in cases[0]["next"]["refused"]
    assert cases[0]["row"]["gpu_peak"]["reserved"] <= 2e9
    assert cases[1]["row"]["parameters"] > cases[0]["row"]["parameters"]
