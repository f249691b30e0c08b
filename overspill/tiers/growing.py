"""Disk for what is not known ahead: a file that grows as places are asked for, and shrinks as they are given back.

Slower than `NvmeTier` (one transfer at a time, by the thread that asks) and more flexible: places of any number, each
of which can be given back, and read from anywhere inside.
"""

import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from overspill.errors import StateError, TierError
from overspill.specs import BLOCK, MiB, align
from overspill.tiers.base import Slot, check_bytes
from overspill.tiers.host import Arena
from overspill.tiers.nvme import check_folder
from overspill.tiers.probe import disk_free
from overspill.tiers.spillfile import SpillFile, sweep

EXTENT = 256 * MiB
"""How much a file grows at once, where the disk and the limit have that much: few system calls, few fragments."""
_STAGING = 8 * MiB


class GrowingTier:
    """Slots in one growing file per path. The files are made when they are first needed."""

    def __init__(self, paths: Sequence[tuple[Path, int | None]]) -> None:
        """`paths`: folders, each with the bytes it may hold at most (None: what is free)."""
        self.name = "nvme"
        for path, _limit in paths:
            check_folder(path)
            sweep(path)
        self._paths = list(paths)
        self._ends = [0] * len(self._paths)
        self._files: dict[int, SpillFile] = {}
        self._free: dict[tuple[int, int], list[Slot]] = {}  # (file, whole blocks) -> places given back
        self._staging: Arena | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()
        weakref.finalize(self, _close_files, self._files)

    def reserve(self, nbytes: int) -> Slot:
        """Hand out a place at a multiple of 4096 bytes; TierError when no path has room for it."""
        self._check_process()
        need = align(nbytes, BLOCK)
        with self._lock:
            for file in range(len(self._paths)):
                if old := self._free.get((file, need)):
                    found = old.pop()
                    return Slot(self.name, nbytes, found.offset, file)
            file = self._roomiest(need)
            self._grow(file, need)
            slot = Slot(self.name, nbytes, self._ends[file], file)
            self._ends[file] += need
            return slot

    def free(self, slot: Slot) -> None:
        """Take a place back, with its space on the disk where the file system can."""
        if os.getpid() != self._pid:
            return
        need = align(slot.nbytes, BLOCK)
        with self._lock:
            if slot.file in self._files and need:
                self._files[slot.file].punch(slot.offset, need)
                self._free.setdefault((slot.file, need), []).append(slot)

    def load(self, slot: Slot, out: Tensor, start: int = 0) -> None:
        """Fill `out` (uint8, host) with the bytes of the slot from `start`."""
        check_bytes(self.name, slot, out)
        assert start + out.numel() <= slot.nbytes, f"{out.numel()} bytes from {start} are not in {slot.nbytes}"
        end = start + out.numel()
        with self._lock:
            staging, file = self._staging_memory(), self._file(slot)
            for begin in range(start // BLOCK * BLOCK, end, _STAGING):
                size = min(_STAGING, align(end, BLOCK) - begin)
                file.read(staging.view[:size], slot.offset + begin)
                first, last = max(begin, start), min(begin + size, end)
                out[first - start : last - start].copy_(staging.tensor[first - begin : last - begin])

    def store(self, slot: Slot, src: Tensor) -> None:
        """Write `src` (uint8, host, as many bytes as the slot has) to the slot."""
        check_bytes(self.name, slot, src)
        assert src.numel() == slot.nbytes, f"expected all {slot.nbytes} bytes of the slot, found {src.numel()}"
        with self._lock:
            staging, file = self._staging_memory(), self._file(slot)
            for begin in range(0, src.numel(), _STAGING):
                piece = src[begin : begin + _STAGING]
                staging.tensor[: piece.numel()].copy_(piece)
                file.write(staging.view[: align(piece.numel(), BLOCK)], slot.offset + begin)

    def used(self) -> int:
        """Bytes taken by slots, in whole blocks."""
        return sum(self._ends) - sum(need * len(slots) for (_file, need), slots in self._free.items())

    def disk_bytes(self) -> int:
        """Bytes of disk that the files take, by their blocks."""
        return sum(file.disk_bytes() for file in self._files.values())

    def close(self) -> None:
        """Remove the files and give the staging memory back; slots are void. New ones may be reserved."""
        with self._lock:
            _close_files(self._files)
            self._ends = [0] * len(self._paths)
            self._free.clear()
            if self._staging is not None:
                self._staging.close()
                self._staging = None

    def _roomiest(self, need: int) -> int:
        """The least filled path that can take `need` more."""
        able = [file for file in range(len(self._paths)) if self._room(file) >= need]
        if not able:
            found = "; ".join(
                f"{str(path)!r} holds {end}, has {disk_free(path)} free" + ("" if limit is None else f", limit {limit}")
                for (path, limit), end in zip(self._paths, self._ends, strict=True)
            )
            raise TierError(
                f"expected room for {need} more bytes on nvme, found: {found}; free some space, raise the limit, or "
                "add a path"
            )
        return min(able, key=self._ends.__getitem__)

    def _room(self, file: int) -> int:
        """Bytes that the path could still take."""
        path, limit = self._paths[file]
        reserved = self._files[file].nbytes if file in self._files else 0
        room = reserved + disk_free(path) - self._ends[file]
        return room if limit is None else min(room, limit // BLOCK * BLOCK - self._ends[file])

    def _grow(self, file: int, need: int) -> None:
        """Reserve disk space for `need` more bytes, and some in advance if there is plenty."""
        path, _limit = self._paths[file]
        end = self._ends[file]
        ahead = max(need, EXTENT)
        size = end + (ahead if self._room(file) >= 2 * ahead else need)
        if file not in self._files:
            self._files[file] = SpillFile(path, size)
        elif self._files[file].nbytes < end + need:
            self._files[file].resize(size)

    def _file(self, slot: Slot) -> SpillFile:
        self._check_process()
        assert slot.file in self._files, "a slot was used after its tier was closed"
        return self._files[slot.file]

    def _staging_memory(self) -> Arena:
        if self._staging is None:
            self._staging = Arena(_STAGING)
        return self._staging

    def _check_process(self) -> None:
        # A forked child has neither the staging memory nor a say in what the file holds.
        if os.getpid() != self._pid:
            raise StateError(
                "expected the process that built the model, found a forked child of it; use the parameters in the "
                "parent, or give the child copies of them"
            )


def _close_files(files: dict[int, SpillFile]) -> None:
    while files:
        files.popitem()[1].close()
