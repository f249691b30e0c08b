"""What a process and its children take of host memory, seen from outside.

Note [Two views of host memory]. `used` is how much more of the machine's memory is in use than before the worker
started (MemTotal - MemAvailable): it holds everything, also what the CUDA driver pins on its own account, which no
process shows as resident; and what others on the machine take meanwhile. `resident` is the sum over the worker's
process group: nobody else's, but without the driver's. Where nothing else runs the truth is about the larger one.

Note [Before set-up]: Python, torch, and CUDA's context take about 1 GB of host memory before anything is set up, and in
its first steps any engine, plain torch too, takes some 0.6 GB more for libraries that are not its own. The kernel and
CUDA's driver keep track of what is page-locked in 1 to 2.2 % of it: that is seen in `used` only. What a plan says is to
be compared with `grown`: resident memory beyond that of right before set-up, beside `grown` of plain torch.
"""

import contextlib
import time
from pathlib import Path

from overspill.specs import KiB

_PROC = Path("/proc")
_QUIET = 32 << 20
"""Bytes by which memory in use may change between two looks where nothing is being freed any more."""
_LOOK = 0.1
_PATIENCE = 3.0
_RESET_PEAK = "5"
_PGRP = 2
"""Place in /proc/PID/stat, counted behind the name, which may hold spaces."""
_GROUP_EVERY = 0.25
_AFTERWARDS = frozenset({"own", "trace", "profile", "end"})
"""Phases that are no training: what they take is not counted."""


def used_bytes() -> int:
    """Bytes of the machine's memory that are in use."""
    found = dict(line.split(":", 1) for line in (_PROC / "meminfo").read_text().splitlines())
    return (_kilobytes(found["MemTotal"]) - _kilobytes(found["MemAvailable"])) * KiB


def own_peak() -> int:
    """The most that was resident of this process since `forget_own_peak`; where the kernel keeps no such peak (as
    gVisor's does not), what is resident now."""
    status = _status("self")
    return status.get("VmHWM", status.get("VmRSS", 0))


def own_now() -> int:
    """What is resident of this process."""
    return _status("self").get("VmRSS", 0)


def forget_own_peak() -> None:
    """Where the kernel cannot, the peak stays that of the process's whole life."""
    with contextlib.suppress(OSError):
        (_PROC / "self/clear_refs").write_text(_RESET_PEAK)


def quiet_used_bytes() -> int:
    """The same once what an earlier process left has been freed."""
    before, since = used_bytes(), time.monotonic()
    while time.monotonic() - since < _PATIENCE:
        time.sleep(_LOOK)
        now = used_bytes()
        if abs(now - before) < _QUIET:
            return min(now, before)
        before = now
    return before


class Watch:
    """Peaks of one worker and its children, phase by phase. To be made before the worker is started."""

    def __init__(self) -> None:
        self._before = quiet_used_bytes()
        self._group_seen = 0.0
        self.used: dict[str, int] = {}
        self.resident: dict[str, int] = {}

    def look(self, group: int, phase: str) -> None:
        """To be called a few times a second; `group` is the worker, which leads its process group."""
        if phase in _AFTERWARDS:
            return
        self.used[phase] = max(self.used.get(phase, 0), used_bytes() - self._before)
        now = time.monotonic()
        if now - self._group_seen >= _GROUP_EVERY:
            self._group_seen = now
            self.resident[phase] = max(self.resident.get(phase, 0), resident_of_group(group))

    def to_dict(self) -> dict[str, object]:
        """Peaks in bytes: of all phases, and of each. See Note [Two views of host memory]."""
        return {
            "used": max(self.used.values(), default=0),
            "resident": max(self.resident.values(), default=0),
            "used_by_phase": self.used,
            "resident_by_phase": self.resident,
        }


def resident_of_group(group: int) -> int:
    """Bytes; memory that processes share counts for each of them."""
    found = 0
    for folder in _PROC.iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            rest = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(rest[_PGRP]) == group:
                found += _status(folder.name).get("VmRSS", 0)
        except OSError:
            continue  # it has ended meanwhile
    return found


def _status(process: str) -> dict[str, int]:
    """The sizes in it; a process that has ended but is not waited for has none."""
    lines = (_PROC / process / "status").read_text().splitlines()
    sizes = (line.split(":", 1) for line in lines if line.endswith(" kB"))
    return {name: _kilobytes(value) * KiB for name, value in sizes}


def _kilobytes(text: str) -> int:
    return int(text.split()[0])
