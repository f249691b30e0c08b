"""The command line as tests call it: in this process, which has everything imported, or in one of its own."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from overspill.cli import (
    bench,  # noqa: F401 - registers the commands
    plan,  # noqa: F401 - registers the command
    probe,  # noqa: F401 - registers the command
    train,  # noqa: F401 - registers the command
)
from overspill.cli.app import app
from overspill.errors import OverspillError

ROOT = Path(__file__).resolve().parents[1]


def here(*arguments: str, code: int = 0) -> str:
    """What the command prints. An error for the user is raised."""
    done = CliRunner().invoke(app, list(arguments))
    if isinstance(done.exception, OverspillError):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.output


def apart(command: list[str], *arguments: str, cwd: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, *arguments], cwd=cwd, env=environment, stdout=pipe, stderr=pipe, text=True)


def log_of(run: Path) -> list[dict[str, Any]]:
    """The complete lines."""
    text = (run / "log.jsonl").read_text() if (run / "log.jsonl").exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def weights_of(run: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = load_file(run / "model" / "model.safetensors")
    return found
