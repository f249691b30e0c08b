"""`overspill bench quality`: whether a model learns as well, however its states are kept."""

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from overspill.bench import chart, process, screen
from overspill.bench.jobs import Job
from overspill.bench.learning import CASES, PLAIN, Lesson
from overspill.bench.results import Files
from overspill.bench.rows import aligned
from overspill.config import options
from overspill.errors import OptionError

WAYS: dict[str, Mapping[str, Any] | None] = {
    PLAIN: None,
    "exact": {"precision": "bf16"},
    "bf16": {"precision": "bf16", "states": "bf16"},
    "compact": {"precision": "bf16", "states": "compact"},
    "delayed": {"precision": "bf16", "update": "delayed"},
    "delayed-500": {"precision": "bf16", "update": "delayed", "delay_after": 500},
}
"""How states are kept, or when they change -> keywords of `overspill.prepare`; None: by torch alone."""
MEASURE = "exact"
"""What the others are compared with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    lesson: Lesson
    cases: Sequence[str] = tuple(CASES)
    ways: Sequence[str] = tuple(WAYS)
    at_once: int = 1
    """Processes side by side: they are small."""
    limit: float = 3600.0


def check_delay(asked: Run) -> None:
    """Refuse delayed updates that nobody would see: the first that is late is seen a step later, and a look at the
    validation loss sees all."""
    for way in asked.ways:
        chosen = options(WAYS[way] or {})
        least = chosen.delay_after + 2
        if chosen.update == "delayed" and asked.lesson.steps < least:
            raise OptionError(
                f"expected --steps from {least} with --states {way}, whose updates are delayed after step "
                f"{chosen.delay_after}, found {asked.lesson.steps}, in which none would be late; give more steps, or "
                f"leave {way} out of --states"
            )


def run(asked: Run, files: Files) -> list[dict[str, Any]]:
    """All cases by all ways; the file is written after every one."""
    known: list[dict[str, Any]] = []
    files.body |= {"lesson": dataclasses.asdict(asked.lesson), "cases": {case: CASES[case] for case in asked.cases}}
    jobs = [(case, way) for case in asked.cases for way in asked.ways]
    one_at_a_time, stop = threading.Lock(), threading.Event()

    def one(number: int, case: str, way: str, start: str | None) -> None:
        lesson = dataclasses.asdict(dataclasses.replace(asked.lesson, case=case, start=start))
        keywords = WAYS[way]
        job = Job(kind="learn", label=f"{case}, {way}", engine=way, keywords=keywords or {}, settings=lesson)
        with screen.working(job.label, f"{number}/{len(jobs)}") as told:
            outcome = process.run(job, asked.limit, told, stop)
        # Of all steps they would make most of the file.
        found = {k: v for k, v in (outcome.result or {}).items() if k != "losses"}
        if outcome.result is not None:
            found["training"] = chart.smooth(outcome.result["losses"])
        row = {"case": case, "way": way, "ok": outcome.result is not None, "reason": outcome.reason, **found}
        with one_at_a_time:
            known.append(row | {"seconds": outcome.seconds})
            files.body["machine"] = files.body["machine"] or outcome.machine
            files.write(curves=_sorted(known, jobs))

    with TemporaryDirectory() as folder, ThreadPoolExecutor(asked.at_once) as pool:
        start = _begin(asked, Path(folder)) if "fine-tune" in asked.cases else None
        try:
            for done in [pool.submit(one, number, *job, start) for number, job in enumerate(jobs, start=1)]:
                done.result()
        except BaseException:
            # Ctrl-C, above all, which only this thread hears of.
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return _sorted(known, jobs)


def _begin(asked: Run, folder: Path) -> str:
    """The file of what all fine-tunes begin with."""
    start = str(folder / "start.pt")
    lesson = dataclasses.replace(asked.lesson, case="fine-tune", start=start)
    job = Job(kind="begin", label="before the fine-tunes", engine=PLAIN, settings=dataclasses.asdict(lesson))
    with screen.working(job.label, "0") as told:
        outcome = process.run(job, asked.limit, told)
    if outcome.result is None:
        raise OptionError(
            f"expected a model for the fine-tunes to begin with, found that it ended: {outcome.reason}; mend that, and "
            "start again"
        )
    return start


def _sorted(known: Sequence[dict[str, Any]], jobs: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    return sorted(known, key=lambda row: jobs.index((row["case"], row["way"])))


def beside(curves: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> float | None:
    """By how much the last validation loss is above that of MEASURE, as a share of it; None: one of them is missing."""
    found = [r["final"] for r in curves if r["case"] == row["case"] and r["way"] == MEASURE and r["ok"]]
    return row["final"] / found[0] - 1 if found and row["ok"] else None


def summary(curves: Sequence[Mapping[str, Any]]) -> str:
    """A line per case and way."""
    lines = [["case", "states", "first", "last validation loss", f"beside {MEASURE}", "seconds"]]
    for row in curves:
        if not row["ok"]:
            lines.append([row["case"], f"{row['way']}: {row['reason']}"])
            continue
        share = beside(curves, row)
        cells = [row["case"], row["way"], f"{row['validation'][0][1]:.4f}", f"{row['final']:.4f}"]
        lines.append([*cells, "-" if share is None else f"{100 * share:+.2f} %", f"{row['seconds']:.0f}"])
    return aligned(lines)
