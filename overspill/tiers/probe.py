"""Looks at the machine: how many bytes are free where. Importing it touches no device."""

import gc
import mmap
import os
import resource
from pathlib import Path

import torch

from overspill.cgroups import PROC as _PROC
from overspill.cgroups import ROOT as _CGROUPS
from overspill.cgroups import groups
from overspill.cgroups import read as _read
from overspill.errors import OptionError


def host_available() -> int:
    """Bytes of host memory that can be taken before the kernel or the cgroup would kill someone, or refuse us."""
    return max(0, min(_memory_available(_PROC), *_cgroup_headrooms(_PROC, _CGROUPS), *_own_headrooms(_PROC)))


def disk_free(path: str | os.PathLike[str]) -> int:
    """Bytes an ordinary user may still write to the file system that holds `path`."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def device_available(device: torch.device) -> int:
    """Bytes that can be taken on `device`; on cpu, where the device is plain memory, those of the host."""
    if device.type == "cuda":
        # Models that were dropped go with the next collection, and what they had stays with torch's allocator.
        gc.collect()
        torch.cuda.empty_cache()
        free, _total = torch.cuda.mem_get_info(device)
        return int(free)
    if device.type == "cpu":
        return host_available()
    raise OptionError(f"expected a cuda or cpu device, found {str(device)!r}; move the model to one of these")


def _memory_available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE


def _own_headrooms(proc: Path) -> list[int]:
    """What the limits of this process (`ulimit`) leave free; never empty, because no limit reads as very much."""
    found = [1 << 62]
    status = dict(line.split(":", 1) for line in _read(proc / "self/status").splitlines() if ":" in line)
    for kind, key in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        limit, _hard = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY and key in status:
            found.append(limit - int(status[key].split()[0]) * 1024)
    return found


def _cgroup_headrooms(proc: Path, cgroups: Path) -> list[int]:
    """What each limit above this process leaves free; never empty, because no limit reads as very much."""
    found = [1 << 62]
    for version, folder in groups("memory", proc, cgroups):
        if version == 2:
            found += [_headroom(folder, limit, "memory.current", "") for limit in ("memory.max", "memory.high")]
        else:
            found.append(_headroom(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))
    return found


def _headroom(folder: Path, limit_file: str, usage_file: str, prefix: str) -> int:
    limit, usage = _read(folder / limit_file).strip(), _read(folder / usage_file).strip()
    if not limit.isdecimal() or not usage.isdecimal():
        return 1 << 62
    stat = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
    # The kernel drops clean page cache before it kills, so cache is headroom, as in MemAvailable.
    cache = sum(int(stat.get(prefix + key, "0")) for key in ("inactive_file", "active_file"))
    return int(limit) - int(usage) + cache
