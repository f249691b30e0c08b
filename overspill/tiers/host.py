"""Host memory: one arena of exact size, taken before training starts and page-locked once."""

import logging
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from overspill.errors import BudgetError, StateError, TierError
from overspill.specs import align
from overspill.tiers import driver
from overspill.tiers.base import Slot, check_bytes, no_room
from overspill.tiers.numa import prefer
from overspill.tiers.probe import host_available
from overspill.tiers.threads import workers

_ALIGNMENT = 512
_STEP = 1 << 30
# So small that torch fills it in the thread that asks, instead of waking its own pool from each of ours.
_PIECE = 64 << 20
_TOUCHERS = 8
# From here on pages of 2 MiB are asked for: fewer to fault in and to lock, and their rounding is nothing.
_HUGE = 1 << 30
# What the rest of the process may need while we touch: a look at the headroom is always a little old.
_MARGIN = 64 << 20
_CUDA_HOST_REGISTER_PORTABLE = 1

log = logging.getLogger("overspill")


class Arena:
    """Anonymous memory of whole pages, absent from forked children, page-locked for cuda if asked.

    A child that shared it would make every later write here copy its page first.
    """

    def __init__(self, nbytes: int, node: int | None = None) -> None:
        self.nbytes = align(nbytes, mmap.PAGESIZE)
        self.pinned = False
        self.view = memoryview(bytearray())
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")  # uint8 [nbytes], host
        self._locked: list[tuple[int, int]] = []
        """What is page-locked: (address, the device whose copies it is for)."""
        self._finalizer: Callable[[], object] | None = None
        if self.nbytes == 0:
            return
        memory = _map(self.nbytes)
        # Through a memoryview, because torch keeps the object it is given but not the buffer: only this way does
        # closing the map fail while a tensor still looks into it.
        self.view = memoryview(memory)
        with torch.inference_mode(False):
            self.tensor = torch.frombuffer(self.view, dtype=torch.uint8)
        self._finalizer = weakref.finalize(self, _release, memory, self._locked, os.getpid())
        if node is not None:
            prefer(self.tensor.data_ptr(), self.nbytes, node)

    def touch(self, start: int) -> None:
        """Fault in the pages behind `start`, before locking would do so with no way to stop before the OOM killer."""
        _touch(self.tensor[align(start, mmap.PAGESIZE) :])

    def pin(self) -> None:
        """Page-lock it for cuda's current device; where that fails, one line is logged and copies are slower."""
        if self.nbytes and not self.pinned:
            self.pinned = _pin(self.tensor.data_ptr(), self.nbytes)
            self._locked += [(self.tensor.data_ptr(), torch.cuda.current_device())] if self.pinned else []

    def close(self) -> None:
        """Unlock and unmap. May be called twice."""
        self.view = memoryview(bytearray())
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.pinned = False
        if self._finalizer is not None:
            self._finalizer()


class HostTier:
    """Slots in one arena; copies are asynchronous on the caller's current stream when the other side is cuda.

    `moving_in`: bytes that are in host memory already and are given up as they are stored in the first slots. They
    must not be there twice, so the pages for them are taken as they are written, all others now. `node`: whose memory
    it shall be, where there are several; see numa.py.
    """

    def __init__(self, capacity: int, moving_in: int = 0, node: int | None = None) -> None:
        self.name = "host"
        self.capacity = capacity
        self._used = 0
        self._closed = False
        _check_headroom(capacity - moving_in, done=0, total=capacity)
        self._arena = Arena(capacity, node)
        self._arena.touch(moving_in)

    def pin(self) -> None:
        """Page-lock the arena for cuda, once everything has moved in."""
        self._arena.pin()

    @property
    def by_driver(self) -> bool:
        """Whether copies to and from cuda are but calls of CUDA's driver."""
        return self._arena.pinned and driver.there_is()

    @property
    def pinned(self) -> bool:
        """Whether the arena is page-locked, so that copies to cuda are asynchronous."""
        return self._arena.pinned

    def reserve(self, nbytes: int) -> Slot:
        """Hand out a place at a multiple of 512 bytes; TierError when the capacity is exceeded."""
        offset = align(self._used, _ALIGNMENT)
        if offset + nbytes > self.capacity:
            raise TierError(no_room(self.name, self.capacity, self._used, nbytes))
        self._used = offset + nbytes
        return Slot(self.name, nbytes, offset)

    def tensor(self, slot: Slot, nbytes: int | None = None) -> Tensor:
        """The slot's own memory, or the first bytes of it: uint8, host."""
        if self._closed:
            raise StateError("expected an open host tier, found a closed one; its bytes are gone, prepare anew")
        assert slot.tier == self.name, f"a slot of tier {slot.tier!r} was given to tier {self.name!r}"
        return self._arena.tensor[slot.offset : slot.offset + (slot.nbytes if nbytes is None else nbytes)]

    def load(self, slot: Slot, out: Tensor) -> None:
        """Copy the slot into `out` (uint8, at most slot.nbytes)."""
        check_bytes(self.name, slot, out)
        self._copy(out, self.tensor(slot, out.numel()), out.is_cuda)

    def store(self, slot: Slot, src: Tensor) -> None:
        """Copy `src` (uint8, at most slot.nbytes) into the slot."""
        check_bytes(self.name, slot, src)
        self._copy(self.tensor(slot, src.numel()), src, src.is_cuda)

    def _copy(self, to: Tensor, source: Tensor, cuda: bool) -> None:
        if not (cuda and self._arena.pinned and driver.copy(to, source)):
            to.copy_(source, non_blocking=True)

    def used(self) -> int:
        """The end of the last slot."""
        return self._used

    def close(self) -> None:
        """Give the memory back. Views that are still held keep it until they go. May be called twice."""
        self._closed = True
        self._arena.close()


def _map(nbytes: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise BudgetError(
            f"expected to map {nbytes} bytes of host memory, found {error}; give a smaller host budget"
        ) from error
    memory.madvise(mmap.MADV_DONTFORK)
    if nbytes >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            log.info("host memory has pages of the usual size, which take longer to lock: %s", error)
    return memory


def _check_headroom(asked: int, *, done: int, total: int) -> None:
    available = host_available()
    if asked > 0 and asked + _MARGIN > available:
        raise BudgetError(
            f"expected {total} bytes of host memory for the arena, found {available} available (system or cgroup) "
            f"after {done} were taken; {_MARGIN} must stay free; give a smaller host budget or stop what else runs"
        )


def _touch(memory: Tensor) -> None:
    """Fault in every page of `memory` (uint8, whole pages), with a look at the headroom before each step."""
    total = memory.numel()
    with workers(_TOUCHERS, "overspill-touch") as pool:
        for start in range(0, total, _STEP):
            step = memory[start : start + _STEP]
            _check_headroom(step.numel(), done=start, total=total)
            list(pool.map(_touch_pages, torch.split(step, _PIECE)))


def _touch_pages(piece: Tensor) -> None:
    piece.view(-1, mmap.PAGESIZE)[:, 0].zero_()


def _pin(pointer: int, nbytes: int) -> bool:
    if not torch.cuda.is_available():
        log.warning("host memory stays unpinned: no cuda device is available")
        return False
    code = int(_cudart().cudaHostRegister(pointer, nbytes, _CUDA_HOST_REGISTER_PORTABLE))
    if code == 0:
        return True
    log.warning("host memory stays unpinned, copies will be slower: cudaHostRegister of %d bytes gave %d", nbytes, code)
    _forget_cuda_error()
    return False


def _cudart() -> Any:
    return torch.cuda.cudart()


def _forget_cuda_error() -> None:
    # A failed call stays "the last error" of the thread, and torch's next kernel launch would raise it as its own.
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        log.debug("the error of cudaHostRegister was cleared")


def _release(memory: mmap.mmap, locked: list[tuple[int, int]], pid: int) -> None:
    # A forked child has neither the pages nor the cuda context.
    if os.getpid() != pid:
        return
    for pointer, device in locked:
        torch.cuda.synchronize(device)
        code = int(_cudart().cudaHostUnregister(pointer))
        if code != 0:
            log.warning("cudaHostUnregister gave %d", code)
    try:
        memory.close()
    except BufferError:
        # Someone still holds a view; unmapping under it would crash, so the garbage collector unmaps after it.
        log.debug("the arena is still in use and is freed with its last view")
