"""`overspill bench update`: AdamW on the host's cores, ours beside the peers, at several sizes."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overspill import cgroups
from overspill.bench import process, screen
from overspill.bench.jobs import Job
from overspill.bench.models import said
from overspill.bench.results import Files
from overspill.bench.rows import GB, aligned
from overspill.bench.updating import BARE, BYTES, MEMORY, OURS, WHOLE, Case
from overspill.errors import OptionError

PAPER = {10**9: 0.22, 2 * 10**9: 0.51, 4 * 10**9: 1.03, 8 * 10**9: 2.41, 10**10: 2.57}
"""Parameters -> seconds that ZeRO-Offload's own Adam took on 48 cores of its authors (two Xeon 8168; table 4)."""

BEYOND_CACHES = 100_000_000
"""Parameters from which on the arrays are so much larger than caches that the memory's own rate is that of memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    sizes: Sequence[int]
    engines: Sequence[str]
    cores: Sequence[int | None] = (None,)
    rounds: int = 5
    limit: float = 900.0

    def cases(self) -> Iterator[Case]:
        """One for every number of cores. The largest size comes last: it may be too large for the machine."""
        sizes = sorted(self.sizes)
        for cores in self.cores:
            yield Case(counts=sizes, engines=self.engines, cores=cores, rounds=self.rounds)


def run(asked: Run, files: Files) -> list[dict[str, Any]]:
    """All cases, one process after the other; the file is written after every one."""
    known: list[dict[str, Any]] = []
    cases = list(asked.cases())
    for number, case in enumerate(cases, start=1):
        label = f"updates on {case.cores or 'all'} cores"
        job = Job(kind="update", label=label, settings=dataclasses.asdict(case))
        with screen.working(label, f"{number}/{len(cases)}") as told:
            outcome = process.run(job, asked.limit, told)
        if outcome.result is None:
            raise OptionError(
                f"expected {label} to be measured, found that it ended: {outcome.reason}; mend that, and start again"
            )
        known += [*outcome.result["rows"], *missing(case, outcome)]
        files.body["machine"] = files.body["machine"] or outcome.machine
        files.write(updates=known, ratios=ratios(known), paper=beside_the_paper(known))
    return known


def missing(case: Case, outcome: process.Outcome) -> Iterator[dict[str, Any]]:
    """Rows of the sizes at which the worker ended, or which it did not come to."""
    found = outcome.result["rows"] if outcome.result else []
    for count in sorted(set(case.counts).difference(row["count"] for row in found)):
        for engine, kind in case.pairs():
            named = {"engine": engine, "kind": kind, "count": count, "cores": case.cores or cgroups.cores()}
            yield {**named, "ok": False, "reason": outcome.reason}


def ratios(known: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ours over the fastest of the others, and as a share of the memory's own rate; None: too few for one."""
    found = []
    for row in known:
        if row["engine"] != OURS or not row["ok"]:
            continue
        alike = [r for r in known if r["ok"] and (r["count"], r["cores"]) == (row["count"], row["cores"])]
        others = [r["per_second"] for r in alike if r["kind"] == row["kind"] and r["engine"] != OURS]
        memory = [r for r in alike if r["kind"] == MEMORY and row["count"] >= BEYOND_CACHES]
        rate = BYTES[MEMORY] * memory[0]["per_second"] if memory else None
        share = row["per_second"] * BYTES[BARE] / rate if rate and row["kind"] == BARE else None
        over = row["per_second"] / max(others) if others else None
        named = {name: row[name] for name in ("kind", "count", "cores")}
        found.append({**named, "over_the_fastest_other": over, "of_the_memory_rate": share})
    return found


def beside_the_paper(known: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Seconds of ours, bare and whole, where ZeRO-Offload's authors tell theirs; None: not measured."""
    ours = {(r["cores"], r["count"], r["kind"]): r["seconds"] for r in known if r["engine"] == OURS and r["ok"]}
    places = sorted({(cores, count) for cores, count, _ in ours if count in PAPER})
    return [
        {
            "count": count,
            "cores": cores,
            "paper": PAPER[count],
            **{k: ours.get((cores, count, k)) for k in (BARE, WHOLE)},
        }
        for cores, count in places
    ]


def summary(known: Sequence[Mapping[str, Any]]) -> str:
    lines = [["parameters", "what", "engine", "cores", "G/s", "ms", "GB/s at least"]]
    for row in known:
        if not row["ok"]:
            lines.append([said(row["count"]), f"{row['kind']}, {row['engine']}: {row['reason']}"])
            continue
        speed = f"{row['per_second'] * BYTES[row['kind']] / GB:.1f}" if row["kind"] in BYTES else "-"
        cells = [said(row["count"]), row["kind"], row["engine"], str(row["cores"])]
        lines.append([*cells, f"{row['per_second'] / GB:.2f}", f"{row['seconds'] * 1e3:.1f}", speed])
    told = [aligned(lines)]
    for ratio in ratios(known):
        over, share = ratio["over_the_fastest_other"], ratio["of_the_memory_rate"]
        parts = [f"ours, {ratio['kind']}, {said(ratio['count'])}, {ratio['cores']} cores:"]
        if ratio["count"] < BEYOND_CACHES:
            parts += [f"no ratios below {said(BEYOND_CACHES)}, where caches and threads that must wake up count most"]
        else:
            parts += [f"{over:.2f}x the fastest other"] if over else []
            parts += [f"{100 * share:.0f} % of the memory's own rate"] if share else []
        told.append(" ".join(parts))
    table = [["parameters", "cores", "bare, s", "whole, s", "ZeRO-Offload's on 48 cores, s"]]
    for row in beside_the_paper(known):
        cells = ["-" if row[k] is None else f"{row[k]:.3f}" for k in (BARE, WHOLE)]
        table.append([said(row["count"]), str(row["cores"]), *cells, f"{row['paper']:.2f}"])
    told += [f"\n{aligned(table)}"] if len(table) > 1 else []
    return "\n".join(told)
