"""What was measured of this machine, kept in the user's cache folder: `overspill probe` writes it, plans read it."""

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from overspill.tiers.rates import Rates

_ENTRY = frozenset({"date", "rates", "disks"})


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
    return {key: entry for key, entry in entries if isinstance(entry, dict) and entry.keys() >= _ENTRY}


def rates_of(found: Mapping[str, float | None]) -> Rates:
    """What another version measured beside them is left out."""
    return Rates(**{name: value for name, value in found.items() if name in Rates.__dataclass_fields__})


def known_rates() -> Rates | None:
    """Of this machine; None: nobody measured them."""
    entry = cached().get(machine_key())
    return None if entry is None or not isinstance(entry["rates"], dict) else rates_of(entry["rates"])
