"""A run's checkpoints: RUN/checkpoints/step-000123, the newest of them, and which are removed.

`overspill.save` gives a folder its name when it is complete, so whatever bears such a name may be loaded.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overspill.errors import OptionError
from overspill.report.run import RunFolder

_NAME = re.compile(r"step-(\d{6,})")
_REMOVED = ".removed-"


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Those of one run."""

    folder: Path

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """In ascending order."""
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)

    def newest(self) -> Path:
        steps = self.steps()
        if not steps:
            raise OptionError(
                f"expected a checkpoint to resume from in {str(self.folder)!r}, found none; begin anew without "
                "--resume, or name another run with --run"
            )
        return self.path(steps[-1])

    def check_ahead(self, steps: int) -> None:
        """A run must not be shorter than what is done of it."""
        done = self.steps()[-1]
        if steps < done:
            raise OptionError(
                f"expected at least the {done} steps that are done in {str(self.folder)!r}, found a run of {steps}; "
                "give more --steps or --epochs"
            )

    def prune(self, keep: int) -> None:
        """Remove all but the newest. A name goes first, so that what is half removed is never taken for whole."""
        for step in self.steps()[:-keep]:
            path = self.path(step)
            path.rename(path.with_name(_REMOVED + path.name))
        for path in self.folder.glob(f"{_REMOVED}*"):
            shutil.rmtree(path)


def settings_of(run: RunFolder) -> dict[str, Any] | None:
    """What a run was told; None: its folder has no plan of a run."""
    try:
        found = run.read_plan()
    except (OSError, ValueError):
        return None
    settings = found.get("settings") if isinstance(found, dict) else None
    return settings if isinstance(settings, dict) else None


def newest_run(runs: Path) -> Path:
    """The run with --model that began or was resumed last."""
    found = [RunFolder(path) for path in runs.iterdir()] if runs.is_dir() else []
    found = [run for run in found if (settings_of(run) or {}).get("model")]
    if not found:
        raise OptionError(f"expected a run with --model in {str(runs)!r} to resume, found none; name it with --run")
    return max(found, key=lambda run: run.plan.stat().st_mtime_ns).path
