"""What was measured of this machine, kept in the user's cache folder: `overspill probe` writes it, plans read it."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DISK = ("disk_read", "disk_write")
"""The rates of one folder; the others are of the machine."""
_ENTRY = frozenset({"date", "rates", "disks"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What was measured, per second; None: not measured, or not there."""

    up: float | None = None
    """Bytes from pinned host memory to the GPU, alone."""
    down: float | None = None
    """Bytes from the GPU to pinned host memory, alone."""
    both: float | None = None
    """Bytes in both directions at once, together."""
    dram: float | None = None
    """Bytes that a copy within host memory by all cores reads and writes, together."""
    in_place: float | None = None
    """Bytes that all cores read and write of three arrays in place, as an update does with master and moments."""
    disk_read: float | None = None
    """Bytes read from the disk, past the page cache."""
    disk_write: float | None = None
    """Bytes written to the disk, past the page cache."""
    matmul: float | None = None
    """Floating-point operations of a bf16 matrix product."""
    update: float | None = None
    """Elements that an AdamW update of overspill passes over, where everything is on the device."""
    cores: float | None = None
    """Elements that such an update passes over where everything is in host memory, by all cores; of exact states."""
    cores_bf16: float | None = None
    """The same, of states in bf16."""
    cores_compact: float | None = None
    """The same, of compact states."""


def by_format(rates: Rates) -> dict[str, float | None]:
    """What the cores update, by the format of states."""
    return {"exact": rates.cores, "bf16": rates.cores_bf16, "compact": rates.cores_compact}


def cache() -> Path:
    """The file in which rates are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "overspill" / "machine.json"


def machine_key() -> str:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{platform.node()} | {gpu}"


def cached() -> dict[str, Any]:
    """By machine. A file that cannot be read is as good as none: everything in it can be measured again."""
    try:
        found = json.loads(cache().read_text())
    except (OSError, ValueError):
        return {}
    entries = found.items() if isinstance(found, dict) else ()
    return {key: entry for key, entry in entries if _is_whole(entry)}


def _is_whole(entry: Any) -> bool:
    if not isinstance(entry, dict) or not entry.keys() >= _ENTRY:
        return False
    disks = entry["disks"]
    return (
        isinstance(entry["rates"], dict)
        and isinstance(disks, dict)
        and all(isinstance(d, dict) for d in disks.values())
    )


def rates_of(found: Mapping[str, float | None]) -> Rates:
    """What another version measured beside them is left out, and what is no number."""
    known = {name: found.get(name) for name in Rates.__dataclass_fields__}
    return Rates(**{name: value for name, value in known.items() if isinstance(value, int | float)})


def known_rates(folders: Sequence[str] = ()) -> Rates | None:
    """Of this machine, and of these folders on its disks, of which the slowest counts; None: nobody measured them."""
    entry = cached().get(machine_key())
    if entry is None:
        return None
    disks = [rates_of(entry["disks"].get(folder, {})) for folder in folders]
    slowest: dict[str, float | None] = {}
    for name in DISK:
        rates = [getattr(disk, name) for disk in disks]
        slowest[name] = min(rates) if rates and None not in rates else None
    return rates_of({**entry["rates"], **slowest})
