"""`overspill bench step`: the same steps by ours and by the peers, one process after the other."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from overspill.bench import probing, process, rows, screen
from overspill.bench.configurations import Ours
from overspill.bench.jobs import Job, Training
from overspill.bench.peers import ENGINES
from overspill.bench.results import Files
from overspill.bench.rows import Row


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What is compared."""

    training: Training
    peers: Sequence[str]
    ours: Sequence[Ours]
    build: str = "device"
    limit: float = 600.0
    """Seconds that every engine has."""
    trace: Path | None = None
    profile: Path | None = None


def run(asked: Run, files: Files) -> list[Row]:
    """All of it. The file is written after every engine, so that little is lost if this is ended."""
    known: list[Row] = []
    jobs = list(_jobs(asked))
    files.body |= {"training": dataclasses.asdict(asked.training), "formula": rows.FORMULA, "link": _link()}
    for done, (ours, job) in enumerate(jobs, start=1):
        peer = ours.budget_of if ours is not None else None
        peak = _peak_of(peer, known)
        if ours is not None and peak is not None:
            job = dataclasses.replace(job, keywords=ours.within(peak).keywords)
        if peer is not None and peak is None:
            known.append(_no_budget(job, peer))
        else:
            with screen.working(job.label, f"{done}/{len(jobs)}") as told:
                outcome = process.run(job, asked.limit, told)
            known.append(rows.row_of(job, ENGINES[job.engine], outcome))
            files.body["machine"] = files.body["machine"] or outcome.machine
        print(_line(known[-1]), flush=True)
        files.write(
            engines=known,
            ratios=rows.ratios(known, asked.peers),
            floors=rows.floors(known, (files.body["link"] or {}).get("bytes_per_second")),
            host_bytes_per_parameter_above_compute=rows.above_compute(known),
        )
    return known


def _link() -> dict[str, Any] | None:
    """What the link does in this very run; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    with screen.working("link") as told:
        return probing.link(told)


def summary(known: Sequence[Row], asked: Run, body: Mapping[str, Any]) -> str:
    """The tables, and what their columns mean."""
    tables = [rows.step_table(known), rows.ratio_table(known, asked.peers), rows.floor_table(body.get("floors", {}))]
    words = "GB = 10^9 bytes; B/param: used host bytes per parameter, and beyond those of computing alone"
    return "\n\n".join([*filter(None, tables), f"{rows.FORMULA}; {words}"])


def _jobs(asked: Run) -> Iterator[tuple[Ours | None, Job]]:
    """Peers first: a budget of ours may be what one of them took."""
    for name in asked.peers:
        yield None, Job(kind="train", label=name, engine=name, training=asked.training)
    for number, ours in enumerate(asked.ours):
        clip = asked.training.clip if ours.clip is None else ours.clip
        yield (
            ours,
            Job(
                kind="train",
                label=ours.label,
                training=dataclasses.replace(asked.training, clip=clip),
                keywords=ours.keywords,
                build=ours.build or asked.build,
                trace=_numbered(asked.trace, number),
                profile=_numbered(asked.profile, number),
            ),
        )


def _numbered(path: Path | None, number: int) -> str | None:
    """A file for each configuration: the name that was given, then name-2, name-3."""
    if path is None:
        return None
    name = path.name if number == 0 else f"{path.name.partition('.')[0]}-{number + 1}{''.join(path.suffixes)}"
    return str(path.with_name(name).absolute())


def _peak_of(peer: str | None, known: Sequence[Row]) -> int | None:
    """What a peer's tensors took at most: less than what it had reserved, so that nobody can say it was given more."""
    for row in known:
        if row["name"] == peer and row["ok"] and row["gpu_peak"]:
            return max(int(row["gpu"][phase]["allocated"]) for phase in ("warm-up", "steps"))
    return None


def _no_budget(job: Job, peer: str) -> Row:
    reason = f"expected the GPU peak of {peer} as a budget, found none; see its row"
    what = ENGINES[job.engine].what
    return {
        "name": job.label,
        "engine": job.engine,
        "what": what,
        "settings": job.to_dict(),
        "ok": False,
        "reason": reason,
    }


def _line(row: Row) -> str:
    if not row["ok"]:
        return f"{row['name']}: no figures: {row['reason']}"
    return f"{row['name']}: {row['step_seconds']:.4f} s a step, {row['tokens_per_second']:,.0f} tokens/s"
