"""`overspill probe`: what the machine can do, measured once and kept in the user's cache folder."""

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overspill.bench import facts, process, rows, screen
from overspill.bench.jobs import Job
from overspill.errors import OptionError
from overspill.tiers.known import DISK, Rates, cache, cached, machine_key, rates_of
from overspill.tiers.rates import PAGE

LIMIT = 300.0
"""Seconds that measuring may take."""
UNITS = {
    "up": ("host to GPU, pinned", 1e9, "GB/s"),
    "down": ("GPU to host, pinned", 1e9, "GB/s"),
    "both": ("both ways together", 1e9, "GB/s"),
    "dram": ("host memory, copy: read + written", 1e9, "GB/s"),
    "in_place": ("host memory, three arrays in place: read + written", 1e9, "GB/s"),
    "disk_read": ("disk, read", 1e9, "GB/s"),
    "disk_write": ("disk, written", 1e9, "GB/s"),
    "matmul": ("bf16 matrix product", 1e12, "TFLOP/s"),
    "update": ("AdamW update on the device", 1e9, "G elements/s"),
    "cores": ("AdamW update on the host's cores", 1e9, "G elements/s"),
    "cores_bf16": ("the same, states in bf16", 1e9, "G elements/s"),
    "cores_compact": ("the same, compact states", 1e9, "G elements/s"),
}
"""How each rate is called, and shown."""


@dataclass(frozen=True, slots=True)
class Probed:
    """The rates of this machine."""

    rates: Rates
    date: str
    """When they were measured."""
    cached: bool
    reason: str | None = None
    """Why some are missing."""


def probe(nvme: Path | None, fresh: bool) -> Probed:
    """Those from the cache, or new ones, which are kept there if nothing went wrong."""
    key, disk = machine_key(), str(nvme.absolute()) if nvme else None
    known = cached()
    before = known.get(key, {"disks": {}})
    # One of an older version may have less.
    whole = before.get("rates", {}).keys() >= Rates.__dataclass_fields__.keys() - set(DISK)
    if whole and not fresh and (disk is None or disk in before["disks"]):
        return Probed(rates_of({**before["rates"], **before["disks"].get(disk, {})}), before["date"], cached=True)
    job = Job(kind="rates", label="probe", nvme=disk)
    with screen.working("probe") as told:
        outcome = process.run(job, LIMIT, told)
    found = Probed(rates_of(outcome.result or {}), facts.now(), cached=False, reason=outcome.reason)
    if found.reason is None:
        entry = {"date": found.date, "versions": facts.versions(), "machine": outcome.machine}
        measured = dataclasses.asdict(found.rates)
        there = {disk: {name: measured.pop(name) for name in DISK}} if disk else {}
        _keep({**known, key: {**entry, "rates": measured, "disks": {**before["disks"], **there}}})
    return found


def link(told: screen.Told) -> dict[str, Any]:
    """The link alone, measured now, as a result file has it; with the reason where it could not be."""
    outcome = process.run(Job(kind="link", label="link"), LIMIT, told)
    return {
        "bytes_per_second": outcome.result,
        "reason": outcome.reason,
        "page_bytes": PAGE,
        "machine": outcome.machine,
    }


def table(found: Rates) -> str:
    """A line per rate."""
    lines = [["what", "rate", "unit"]]
    for name, value in dataclasses.asdict(found).items():
        title, unit, word = UNITS[name]
        lines.append([title, "-" if value is None else f"{value / unit:,.2f}", word])
    return rows.aligned(lines)


def kept_in() -> Path:
    """The file with what was measured."""
    return cache()


def _keep(known: Mapping[str, Any]) -> None:
    """Whoever is killed here, or writes at the same time, leaves a whole file."""
    path = cache()
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(known, indent=1) + "\n")
        partial.replace(path)
    except OSError as error:
        raise OptionError(
            f"expected a cache folder that can be written, found {str(path.parent)!r}: {error.strerror}; set "
            "XDG_CACHE_HOME to another one"
        ) from error
