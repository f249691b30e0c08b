"""Disk: slots in files of reserved size, read and written past the page cache through pinned staging memory.

Note [halves]. Bytes pass through two halves in turn, so that the disk works on one while the other is copied from or
to the tensor. A half is used again only when both its transfer and its copy are complete, and neither `load` nor
`store` returns before that holds for both halves. Each direction has staging and io threads of its own.
"""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from overspill.errors import StateError, TierError
from overspill.specs import BLOCK, align
from overspill.tiers.base import Slot, check_bytes, no_room
from overspill.tiers.host import Arena
from overspill.tiers.probe import disk_free
from overspill.tiers.spillfile import SpillFile, sweep
from overspill.tiers.threads import workers

_IO_THREADS = 4
_PIECE = 1 << 20  # below this, more threads do not make a transfer faster


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One turn of a transfer: `nbytes` of the tensor from `start`, in half number `half`."""

    start: int
    nbytes: int
    half: int


class _Staging:
    """Two halves of page-aligned memory and the io threads that fill or empty them, see Note [halves]."""

    def __init__(self, nbytes: int, pin: bool, direction: str) -> None:
        self.lock = threading.Lock()
        self._half = max(BLOCK, nbytes // 2 // BLOCK * BLOCK)
        self._arena = Arena(2 * self._half)
        if pin:
            self._arena.pin()
        self._pool = workers(_IO_THREADS, f"overspill-{direction}")

    @property
    def nbytes(self) -> int:
        return self._arena.nbytes

    def chunks(self, nbytes: int) -> list[_Chunk]:
        starts = range(0, nbytes, self._half)
        return [_Chunk(start, min(self._half, nbytes - start), turn % 2) for turn, start in enumerate(starts)]

    def tensor(self, chunk: _Chunk) -> Tensor:
        """The chunk's bytes in its half: uint8 [chunk.nbytes], host."""
        return self._arena.tensor[chunk.half * self._half :][: chunk.nbytes]

    def view(self, chunk: _Chunk) -> memoryview:
        """The same, up to the next whole block."""
        return self._arena.view[chunk.half * self._half :][: align(chunk.nbytes, BLOCK)]

    def start(self, move: Callable[[memoryview, int], None], chunk: _Chunk, offset: int) -> list[Future[None]]:
        """Let the io threads `move` the chunk's half, which lies at `offset` of the file."""
        view = self.view(chunk)
        piece = max(_PIECE, align(-(-len(view) // _IO_THREADS), BLOCK))
        return [
            self._pool.submit(move, view[begin : begin + piece], offset + begin) for begin in range(0, len(view), piece)
        ]

    def close(self) -> None:
        # No transfer is under way, so there is nothing to wait for; and waiting for threads inside of a garbage
        # collection, which may come while another thread is being started, can wait for ever.
        self._pool.shutdown(wait=False)
        self._arena.close()


class NvmeTier:
    """Slots in one file per path. `load` and `store` may run at the same time, from two threads."""

    def __init__(
        self,
        paths: Sequence[tuple[Path, int | None]],
        capacity: int,
        staging_bytes: int = 8 << 20,
        pin: bool = False,
    ) -> None:
        """Reserve `capacity` bytes over `paths`, each with its limit; `staging_bytes` is for each direction."""
        self.name = "nvme"
        self.capacity = capacity
        self._closed = False
        for path, _limit in paths:
            check_folder(path)
            sweep(path)
        total = align(capacity, BLOCK)
        self._limits = [total if limit is None else min(total, limit // BLOCK * BLOCK) for _path, limit in paths]
        shares = spread(total, _rooms(paths, self._limits))
        if sum(shares) < total:
            raise TierError(_too_small(paths, capacity, sum(shares)))
        self._ends = [0] * len(paths)
        with contextlib.ExitStack() as owned:
            self._files = [
                owned.enter_context(contextlib.closing(SpillFile(path, share)))
                for (path, _limit), share in zip(paths, shares, strict=True)
            ]
            self._incoming = owned.enter_context(contextlib.closing(_Staging(staging_bytes, pin, "read")))
            self._outgoing = owned.enter_context(contextlib.closing(_Staging(staging_bytes, pin, "write")))
            self._finalizer = weakref.finalize(self, _close_in_maker, owned.pop_all(), os.getpid())

    def reserve(self, nbytes: int) -> Slot:
        """Hand out a place at a multiple of 4096 bytes; TierError when the capacity is exceeded."""
        self._check_open()
        used = self.used()
        if used + nbytes > self.capacity:
            raise TierError(no_room(self.name, self.capacity, used, nbytes))
        if nbytes == 0:
            return Slot(self.name, 0, 0)
        need = align(nbytes, BLOCK)
        file = max(range(len(self._files)), key=self._tail)
        if self._tail(file) < need:
            file = self._gather(need)
        slot = Slot(self.name, nbytes, self._ends[file], file)
        self._ends[file] += need
        return slot

    def load(self, slot: Slot, out: Tensor) -> None:
        """Fill `out` (uint8, at most slot.nbytes, cpu or cuda) from the slot; complete on return."""
        check_bytes(self.name, slot, out)
        with self._incoming.lock, _drained() as flying:
            self._check_open()
            staging, read = self._incoming, self._files[slot.file].read
            chunks = staging.chunks(out.numel())
            for chunk in chunks[:2]:
                flying.append(staging.start(read, chunk, slot.offset + chunk.start))
            for turn, chunk in enumerate(chunks):
                _finish(flying[turn])
                out[chunk.start :][: chunk.nbytes].copy_(staging.tensor(chunk), non_blocking=True)
                _wait_for_copy(out)
                for after in chunks[turn + 2 : turn + 3]:
                    flying.append(staging.start(read, after, slot.offset + after.start))

    def store(self, slot: Slot, src: Tensor) -> None:
        """Write `src` (uint8, at most slot.nbytes, cpu or cuda) to the slot; complete on return."""
        check_bytes(self.name, slot, src)
        with self._outgoing.lock, _drained() as flying:
            self._check_open()
            staging, file = self._outgoing, self._files[slot.file]
            for turn, chunk in enumerate(staging.chunks(src.numel())):
                if turn >= 2:
                    _finish(flying[turn - 2])
                if chunk.nbytes % BLOCK and src.numel() < slot.nbytes:
                    # The last block also holds bytes of the slot that must stay.
                    last = chunk.nbytes // BLOCK * BLOCK
                    file.read(staging.view(chunk)[last:], slot.offset + chunk.start + last)
                staging.tensor(chunk).copy_(src[chunk.start :][: chunk.nbytes], non_blocking=True)
                _wait_for_copy(src)
                flying.append(staging.start(file.write, chunk, slot.offset + chunk.start))
            for futures in flying:
                _finish(futures)

    def used(self) -> int:
        """Bytes taken by slots, in whole blocks."""
        return sum(self._ends)

    def disk_bytes(self) -> int:
        """Bytes of disk that the files take, by their blocks."""
        return 0 if self._closed else sum(file.disk_bytes() for file in self._files)

    def close(self) -> None:
        """Remove the files, once what is under way is done. May be called twice."""
        with self._incoming.lock, self._outgoing.lock:
            self._closed = True
            self._finalizer()

    def _tail(self, file: int) -> int:
        return self._files[file].nbytes - self._ends[file]

    def _gather(self, need: int) -> int:
        """Move reserved space from the ends of other files to one of them, because a slot never straddles files."""
        able = [file for file, limit in enumerate(self._limits) if self._ends[file] + need <= limit]
        if not able:
            raise TierError(
                f"expected a path with {need} bytes in one piece for a slot of the nvme tier, found "
                f"{[limit - end for limit, end in zip(self._limits, self._ends, strict=True)]} left below the limits "
                f"of its paths; raise one of them by as much"
            )
        chosen = max(able, key=self._tail)
        missing = need - self._tail(chosen)
        for file in range(len(self._files)):
            given = min(missing, self._tail(file)) if file != chosen else 0
            self._files[file].resize(self._files[file].nbytes - given)
            missing -= given
        self._files[chosen].resize(self._ends[chosen] + need)
        return chosen

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("expected an open nvme tier, found a closed one; its bytes are gone, prepare anew")


def spread(amount: int, rooms: Sequence[int]) -> list[int]:
    """Split `amount` into whole blocks as evenly as `rooms` allow; less in all than `amount` if they are too small."""
    shares = [0] * len(rooms)
    left = amount
    for done, file in enumerate(sorted(range(len(rooms)), key=rooms.__getitem__)):
        even = align(-(-left // (len(rooms) - done)), BLOCK)
        shares[file] = min(rooms[file] // BLOCK * BLOCK, even, left)
        left -= shares[file]
    return shares


def _rooms(paths: Sequence[tuple[Path, int | None]], limits: Sequence[int]) -> list[int]:
    """What each path may hold: its limit, and its part of what is free on a disk that several paths may share."""
    disks: dict[int, list[int]] = {}
    for index, (path, _limit) in enumerate(paths):
        disks.setdefault(os.stat(path).st_dev, []).append(index)
    rooms = [0] * len(paths)
    for members in disks.values():
        free = disk_free(paths[members[0]][0]) // BLOCK * BLOCK
        for index, room in zip(members, spread(free, [limits[member] for member in members]), strict=True):
            rooms[index] = room
    return rooms


def check_folder(path: Path) -> None:
    """Refuse a path that is no folder, or that this user may not write to."""
    if not path.is_dir():
        found = "something that is not a folder" if path.exists() else "nothing there"
        raise TierError(f"expected a folder at nvme path {str(path)!r}, found {found}; make it or give another path")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise TierError(
            f"expected an nvme path that can be read and written, found {str(path)!r} that this user may not; "
            f"change its mode or give another path"
        )


def _too_small(paths: Sequence[tuple[Path, int | None]], capacity: int, room: int) -> str:
    if not paths:
        return f"expected a path for {capacity} bytes of nvme, found none; give nvme= a path"
    found = "; ".join(
        f"{str(path)!r} has {disk_free(path)} free" + ("" if limit is None else f" and a limit of {limit}")
        for path, limit in paths
    )
    return (
        f"expected room for {capacity} bytes on nvme, found {room}: {found}; "
        f"free {capacity - room} bytes, raise the limits, or add a path"
    )


def _close_in_maker(owned: contextlib.ExitStack, pid: int) -> None:
    # A forked child has copies of all this, but neither its threads nor its memory, and the files are its parent's.
    if os.getpid() == pid:
        owned.close()


@contextlib.contextmanager
def _drained() -> Iterator[list[list[Future[None]]]]:
    """Whatever goes wrong, no transfer is left that would still write into the staging."""
    flying: list[list[Future[None]]] = []
    try:
        yield flying
    finally:
        wait([future for futures in flying for future in futures])


def _finish(futures: Sequence[Future[None]]) -> None:
    for future in futures:
        future.result()


def _wait_for_copy(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
