"""A run's folder: RUN/{plan.json, log.jsonl, trace.json, plot.png}."""

import dataclasses
import json
from collections.abc import Mapping
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
    """Bytes per lane."""
    bytes: Mapping[str, int]
    """The step's peak per tier; empty where nothing was measured. The host's is its arena, of fixed size."""


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

    def make(self) -> None:
        """A folder that holds no run yet."""
        if self.log.exists() or self.plan.exists():
            raise OptionError(f"expected --run to be a new folder, found a run in {str(self.path)!r}; give another one")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(
                f"expected --run to be a folder that can be made, found {str(self.path)!r}: {error.strerror}"
            ) from error

    def write_plan(self, plan: str, settings: Mapping[str, Any]) -> None:
        """The plan as JSON, and beside it what the run was told."""
        body = {"settings": dict(settings), **json.loads(plan)}
        self.plan.write_text(json.dumps(body, indent=2) + "\n")

    def append(self, record: Record) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(record)) + "\n")

    def read_plan(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.plan.read_text())
        return found

    def read_log(self) -> list[Record]:
        return [Record(**json.loads(line)) for line in self.log.read_text().splitlines()]


def held_plainly(plan: Mapping[str, Any]) -> int:
    """Bytes of weights, gradients and states together: what the same training would hold on one device."""
    return sum(sum(unit["bytes"].values()) for unit in plan["units"])
