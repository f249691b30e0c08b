"""What training takes of every tier, measured from outside.

Note [device without a GPU]. There the device is plain memory, as the host's arena is, so only their sum can be seen:
the growth of resident memory. The arena is mapped in full, so the rest is the device's. Three things would be counted
that are nobody's: the code of libraries, which is read from files, hence only memory of no file counts; what libraries
set up in their first step, hence the warm-up in the run's own precision before the zero is taken; and what the C
library keeps of freed memory, hence the fixed threshold above which it gives every block back at once. What they set
up for the run's own model and shapes is counted all the same, and so is what Python knows of it: tens of MiB.
"""

import ctypes
import gc
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from overspill.cli.loop import train_steps
from overspill.cli.settings import BuiltIn
from overspill.cli.workload import VOCABULARY, batches, plain_trainee
from overspill.config import DTYPES
from overspill.specs import KiB

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_M_MMAP_THRESHOLD = -3
_THRESHOLD = 128 * KiB
_SPILLED = "overspill-*-{pid}-*"
"""The folders that a process makes for itself in an nvme folder; other ranks have theirs beside them."""
_BLOCK = 512
"""The unit of st_blocks, whatever the file system's own is."""


@dataclass(frozen=True, slots=True)
class Zero:
    """What was there before the model was built; growth is counted from here."""

    resident: int
    disk: int
    """Bytes in the nvme folders, which may hold what this process spilled before."""


@dataclass(frozen=True, slots=True)
class Meter:
    """Reads the peaks of all tiers since it was last read."""

    device: torch.device
    host: int
    """Bytes of the host's arena and staging: fixed, from the plan."""
    nvme: Sequence[Path]
    zero: Zero

    def start(self) -> None:
        """To be called when the model is prepared, before the first step."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.read()

    def read(self) -> dict[str, int]:
        found = {"host": self.host, "nvme": max(0, disk_bytes(self.nvme) - self.zero.disk)}
        if self.device.type == "cuda":
            found["device"] = torch.cuda.max_memory_reserved(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            found["device"] = max(0, resident_peak() - self.zero.resident - self.host)
        return found


def resident_bytes() -> int:
    """Memory of no file."""
    return _status("RssAnon")


def resident_peak() -> int:
    """The same at its largest since the last call; where the kernel cannot forget a peak, what is resident now."""
    # What is mapped of files stays, so it was about the same at the peak.
    peak = _status("VmHWM") - _status("RssFile") - _status("RssShmem")
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return resident_bytes()
    return peak


def disk_bytes(folders: Iterable[Path]) -> int:
    """What is spilled to the folders takes of the disk; a run's own folder and whatever else is there does not count.

    Opens no file: that would drop the locks of our own process.
    """
    found = 0
    spilled = (path for folder in folders for path in folder.glob(_SPILLED.format(pid=os.getpid())))
    for path, _folders, files in (entry for folder in spilled for entry in os.walk(folder)):
        for name in files:
            try:
                found += os.lstat(os.path.join(path, name)).st_blocks * _BLOCK
            except FileNotFoundError:
                continue  # another process removed its own
    return found


def zero_point(device: torch.device, nvme: Sequence[Path], precision: str) -> Zero:
    """To be called before the model is built, see Note [device without a GPU]."""
    if device.type == "cpu":
        give_freed_memory_back()
        tiny = BuiltIn(layers=2, hidden=64, heads=2, batch=1, steps=2)
        text = (torch.arange(2 * tiny.seq) % VOCABULARY).to(torch.uint8)
        trainee = plain_trainee(tiny, device)
        trainee.model.to(DTYPES[precision])
        for _ in train_steps(trainee, batches(text, tiny, device), tiny, tiny.steps):
            pass
        del trainee
        gc.collect()
    return Zero(resident_bytes(), disk_bytes(nvme))


def _status(key: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * KiB
    raise AssertionError(f"{_STATUS} has no {key}")


def give_freed_memory_back() -> None:
    """Every freed block above the threshold goes back to the system at once, see Note [device without a GPU]."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not every C library has it
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _THRESHOLD)
