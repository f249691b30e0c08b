"""`overspill bench max-size`: the largest model that an engine trains within budgets, and that the next is refused."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overspill.bench import configurations, process, rows, screen
from overspill.bench.configurations import Ours
from overspill.bench.jobs import Job, Training
from overspill.bench.models import said, sizes_of
from overspill.bench.peers import ENGINES
from overspill.bench.results import Files
from overspill.bench.rows import GB, Row, aligned
from overspill.bench.searching import grid
from overspill.cli.sizes import Sizes, parse_count
from overspill.config import Size
from overspill.errors import OptionError

MAX = "max"
TIMES = re.compile(r"(\d+(?:\.\d+)?)x")
MEASURE = "torch"
"""The engine whose largest size is the unit of 5x."""
ON_GPU = ("torch", "torch-bf16", "flashoptim")
"""Peers that keep everything on the GPU, so that a cap on it is all that they need."""
_CONFIRMATIONS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What is looked for."""

    training: Training
    """Without sizes."""
    engines: Sequence[str]
    sizes: Sequence[str]
    """"max", a number of parameters, or a multiple of what `torch` can do."""
    ours: Sequence[Ours]
    search: Mapping[str, float]
    cap: Size | None = None
    """What peers may have of the GPU."""
    build: str = "meta"
    limit: float = 600.0

    def check(self) -> None:
        if not self.engines:
            raise OptionError("expected --engine with at least one name, found none; name one")
        for name in self.engines:
            if name != "ours" and name not in ON_GPU:
                raise OptionError(
                    f"expected --engine as a list of ours, {', '.join(ON_GPU)}, found {name!r}; name some of those"
                )
        for size in self.sizes:
            if TIMES.fullmatch(size) and (self.engines[0] != MEASURE or "ours" not in self.engines):
                found = ",".join(self.engines)
                raise OptionError(
                    f"expected --engine {MEASURE},ours with --size {size}, found --engine {found}; name these two"
                )
            if size != MAX and not TIMES.fullmatch(size):
                parse_count(size)
        for ours in self.ours:
            if ours.budget_of is not None:
                raise OptionError("expected --ours with a gpu= of its own, found that of a peer; give a size")
        configurations.check(self.ours, [name for name in self.engines if name != "ours"])
        configurations.check_delay(self.ours, self.training.warmup)

    def asked_of(self, engine: str) -> Sequence[str]:
        """Those that an engine is asked for: multiples are for ours, and their unit must be found for them."""
        if engine == "ours":
            return self.sizes
        own = [size for size in self.sizes if not TIMES.fullmatch(size)]
        unit = [MAX] if engine == MEASURE and len(own) < len(self.sizes) and MAX not in own else []
        return [*unit, *own]


@dataclass(slots=True)
class Case:
    """One size of one engine, as it goes."""

    engine: str
    asked: str
    ours: Ours | None = None
    """Which configuration, if it is ours."""
    sizes: Sizes | None = None
    row: Row | None = None
    search: dict[str, Any] | None = None
    """How the size was found."""
    next: dict[str, Any] | None = None
    """The size that is refused."""
    reason: str | None = None
    """Why nothing was trained."""

    @property
    def label(self) -> str:
        return self.engine if self.ours is None else self.ours.label

    def to_dict(self) -> dict[str, Any]:
        found = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        return {"label": self.label, **found}


def run(asked: Run, files: Files) -> list[Case]:
    """All of it; the file is written after every case."""
    asked.check()
    cases: list[Case] = []
    files.body |= {
        "training": dataclasses.asdict(asked.training),
        "formula": rows.FORMULA,
        "search": dict(asked.search),
    }
    for engine in asked.engines:
        for ours in asked.ours if engine == "ours" else (None,):
            for size in asked.asked_of(engine):
                case = Case(engine, size, ours)
                cases.append(case)
                _Hunt(asked, files, case).run(_unit(cases))
                files.write(cases=[each.to_dict() for each in cases])
    return cases


class _Hunt:
    """The work on one case."""

    def __init__(self, asked: Run, files: Files, case: Case) -> None:
        self._asked, self._files, self._case = asked, files, case

    def run(self, unit: int | None) -> None:
        case, times = self._case, TIMES.fullmatch(self._case.asked)
        if case.asked == MAX:
            self._look_for()
        elif times and unit is None:
            case.reason = f"expected a size that {MEASURE} trains as the unit, found none; see its row"
        else:
            count = round(float(times[1]) * unit) if times and unit else parse_count(case.asked)
            case.sizes = sizes_of(count)
            case.row = self._train(case.sizes, case.ours.keywords if case.ours else {})
            case.reason = case.row["reason"]

    def _look_for(self) -> None:
        case, asked = self._case, self._asked
        kind = "plan" if case.engine == "ours" else "fit"
        outcome = self._work(self._job(kind, "search"), "search")
        case.search, case.reason = outcome.result, outcome.reason
        if outcome.result is None:
            return
        place = int(outcome.result["place"])
        if case.engine == "ours":
            case.sizes = grid(asked.search, place)
            case.row = self._train(case.sizes, outcome.result["keywords"])
            refused = grid(asked.search, place + 1).parameters
            case.next = {"parameters": refused, "refused": outcome.result["refusal"]}
        else:
            self._confirm(place)
        case.reason = case.row["reason"] if case.row else case.reason

    def _confirm(self, place: int) -> None:
        """In fresh processes, one per size: what was left of earlier attempts plays no part there."""
        case = self._case
        known: dict[int, Row] = {}

        def trained(each: int) -> bool:
            if each not in known:
                known[each] = self._train(grid(self._asked.search, each), {})
            return bool(known[each]["ok"])

        for _ in range(_CONFIRMATIONS):
            if place == 0 or trained(place):
                break
            place -= 1
        for _ in range(_CONFIRMATIONS):
            if not trained(place) or not trained(place + 1):
                break
            place += 1
        case.sizes, case.row = grid(self._asked.search, place), known[place]
        if place + 1 in known:
            refused = grid(self._asked.search, place + 1).parameters
            case.next = {"parameters": refused, "refused": known[place + 1]["reason"]}

    def _train(self, sizes: Sizes, keywords: Mapping[str, Any]) -> Row:
        title = said(sizes.parameters)
        job = self._job("train", title)
        training = dataclasses.replace(job.training, sizes=sizes)
        job = dataclasses.replace(job, training=training, keywords=keywords)
        return rows.row_of(job, ENGINES[job.engine], self._work(job, title))

    def _job(self, kind: str, title: str) -> Job:
        asked, ours, training = self._asked, self._case.ours, self._asked.training
        if ours is not None and ours.clip is not None:
            training = dataclasses.replace(training, clip=ours.clip)
        return Job(
            kind=kind,
            label=f"{self._case.label} {title}",
            engine=self._case.engine,
            training=training,
            keywords=ours.keywords if ours else {},
            build=(ours and ours.build) or asked.build,
            cap=None if ours else asked.cap,
            search=asked.search,
        )

    def _work(self, job: Job, title: str) -> process.Outcome:
        with screen.working(f"{self._case.label}, {self._case.asked}: {title}") as told:
            outcome = process.run(job, self._asked.limit, told)
        self._files.body["machine"] = self._files.body["machine"] or outcome.machine
        return outcome


def _unit(cases: Sequence[Case]) -> int | None:
    """Parameters of the largest that was trained by MEASURE."""
    for case in cases:
        if case.engine == MEASURE and case.row and case.row["ok"]:
            return int(case.row["parameters"])
    return None


def summary(cases: Sequence[Case]) -> str:
    """The table, and what was refused."""
    unit = _unit(cases)
    head = ["engine", "size", "parameters", f"x {MEASURE}", "step s", "tokens/s", "TFLOP/s", "GPU GB", "host GB"]
    lines = [[*head, "set-up s"]]
    for case in cases:
        lines.append(
            _cells(case, unit) if case.row and case.row["ok"] else [case.label, f"{case.asked}: {case.reason}"]
        )
    refused = [
        f"{case.label}: {said(case.next['parameters'])} is refused: {case.next['refused']}"
        for case in cases
        if case.next
    ]
    return "\n\n".join([aligned(lines), *refused, f"{rows.FORMULA}; GB = 10^9 bytes"])


def _cells(case: Case, unit: int | None) -> list[str]:
    row = case.row
    assert row is not None, "there are figures"
    cells = [case.label, case.asked, said(row["parameters"])]
    cells += [f"{row['parameters'] / unit:.2f}" if unit else "-", f"{row['step_seconds']:.3f}"]
    cells += [f"{row['tokens_per_second']:,.0f}", f"{row['model_tflops']:.1f}"]
    cells += [f"{row['gpu_peak']['reserved'] / GB:.2f}" if row["gpu_peak"] else "-", f"{row['host']['used'] / GB:.2f}"]
    return [*cells, f"{row['seconds']['set-up']:.1f}"]


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if isinstance(value, Sizes | Ours) else value
