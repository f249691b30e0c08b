"""The files that a benchmark leaves: where they go, and what stands at the head of each."""

import importlib.util
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overspill.bench import chart, facts
from overspill.errors import OptionError

HOME = Path("benchmarks")
"""Where there is such a folder, results go to its own `results`; elsewhere to where runs go."""
RUNS = Path("runs")


def head(what: str, commit: str | None) -> dict[str, Any]:
    """Who measured what, when and with what.

    `commit`: said by the user, who may know better than git does of a copy.
    """
    return {
        "what": what,
        "date": facts.now(),
        "command": facts.command(),
        "machine": None,
        "versions": facts.versions(),
        "sources": {**facts.sources(), "told": commit},
        "environment": facts.environment(),
    }


def place(theme: str, machine: Mapping[str, Any], date: str) -> Path:
    """theme_machine_date.json, or the next free name like it."""
    folder = HOME / "results" if HOME.is_dir() else RUNS
    name = f"{theme}_{facts.slug(dict(machine))}_{date.partition('T')[0]}"
    names = itertools.chain([name], (f"{name}-{n}" for n in itertools.count(2)))
    return next(path for path in (folder / f"{each}.json" for each in names) if not path.exists())


PICTURES = (".png", ".svg", ".pdf", ".jpg")


class Files:
    """The JSON of one run, which is written again whenever more is known, and its picture."""

    def __init__(self, theme: str, out: Path | None, chart: Path | None, body: dict[str, Any]) -> None:
        self._theme, self._out, self._chart = theme, out, chart
        self.body = body
        if chart is not None:
            check_picture(chart)
        if out is not None and out.suffix == ".png":
            raise OptionError(
                f"expected --out to be a JSON file, found {str(out)!r}, which would be its picture; name it .json"
            )
        if out is not None:
            write(out, body)  # so that what cannot be written is known before anything is measured

    def write(self, **more: Any) -> None:
        self.body |= more
        if self._out is None:
            self._out = place(self._theme, self.body["machine"] or {}, self.body["date"])
        write(self._out, self.body)

    def draw(self) -> None:
        """Where nothing is said, beside the JSON, if that can be done here."""
        assert self._out is not None, "a picture is drawn of what was written"
        if self._chart is None and importlib.util.find_spec("matplotlib") is not None:
            self._chart = self._out.with_suffix(".png")
        if self._chart is not None:
            chart.draw(self.body, self._chart)

    def __str__(self) -> str:
        return f"written: {', '.join(str(path) for path in (self._out, self._chart) if path is not None)}"


def check_picture(path: Path, option: str = "--chart") -> None:
    """Known before anything is measured."""
    if path.suffix.lower() not in PICTURES or path.is_dir():
        found = "a folder" if path.is_dir() else repr(str(path))
        raise OptionError(f"expected {option} to be a file named {', '.join(PICTURES)}, found {found}; name one")


def write(path: Path, body: Mapping[str, Any]) -> None:
    """Whoever is killed here leaves the old file or the new one."""
    if path.is_dir():
        raise OptionError(f"expected a file that can be written, found the folder {str(path)!r}; give a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(json.dumps(body, indent=1) + "\n")
        partial.replace(path)
    except OSError as error:
        raise OptionError(
            f"expected a file that can be written, found {str(path)!r}: {error.strerror}; give another one"
        ) from error


def read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise OptionError(
            f"expected a result file of overspill bench, found {str(path)!r}: {error}; give one that it wrote"
        ) from error
    if not isinstance(found, dict):
        raise OptionError(f"expected a result file of overspill bench, found a list in {str(path)!r}; give another one")
    return found
