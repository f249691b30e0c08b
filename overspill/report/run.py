"""A run's folder: RUN/{plan.json, log.jsonl, trace.json, plot.png, checkpoints/}, and model/ for what it exports."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overspill.errors import OptionError

TIERS = ("device", "host", "nvme")
FIXED = "host"
"""The tier whose size is given by the plan and not measured."""


@dataclass(frozen=True, slots=True)
class Record:
    """One step: one line of log.jsonl."""

    step: int
    """Counted from 1."""
    loss: float
    lr: float
    grad_norm: float | None
    seconds: float
    tokens_per_second: float
    moved: Mapping[str, int]
    """Bytes per lane, of rank 0."""
    bytes: Mapping[str, int]
    """The step's peak per tier; empty where nothing was measured. The host's is its arena, of fixed size. Of several
    ranks the largest, because each has the plan's budgets."""
    validation: float | None = None
    """Loss on the validation data after the step, where somebody looked."""
    ranks: Sequence[Mapping[str, Any]] | None = None
    """Bytes and moved of every rank, and the elements that it sent to others; None for a single process."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Names the files, writes and reads them."""

    path: Path

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def log(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    @property
    def plot(self) -> Path:
        return self.path / "plot.png"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def made(self) -> "RunFolder":
        """Itself, once it is there."""
        self.make()
        return self

    def make(self) -> None:
        """A folder that holds no run yet."""
        if self.log.exists() or self.plan.exists():
            raise OptionError(
                f"expected --run to be a new folder, found a run in {str(self.path)!r}; give another one, or continue "
                "it with --resume"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(
                f"expected --run to be a folder that can be made, found {str(self.path)!r}: {error.strerror}; give "
                "another one"
            ) from error

    def write_plan(self, plan: str, settings: Mapping[str, Any], contents: Mapping[str, str] | None = None) -> None:
        """The plan as JSON, and beside it what the run was told, and digests of what it was given by path."""
        body = {"settings": dict(settings), "contents": dict(contents or {}), **json.loads(plan)}
        _replace(self.plan, json.dumps(body, indent=2) + "\n")

    def append(self, record: Record) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(record)) + "\n")

    def rewind(self, step: int) -> None:
        """Forget what the log says of later steps; a run that was killed may have left half a line."""
        lines = self.log.read_text().splitlines(keepends=True) if self.log.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        _replace(self.log, "".join(kept))

    def read_plan(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.plan.read_text())
        return found

    def read_log(self) -> list[Record]:
        return [Record(**json.loads(line)) for line in self.log.read_text().splitlines()]


def _replace(path: Path, text: str) -> None:
    """Whoever is killed here leaves the old file or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def held_plainly(plan: Mapping[str, Any]) -> int:
    """Bytes of weights, gradients and states together: what the same training would hold on one device."""
    return sum(sum(unit["bytes"].values()) for unit in plan["units"])
