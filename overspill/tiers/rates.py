"""How fast the machine is: the link to the GPU, host memory, a disk, matrix products. Every function measures one.

Best of a few rounds: what else runs on the machine only ever makes it slower. Without a GPU there is no link, and the
rest is measured in small. Nothing is kept: memory and files are given back.
"""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from overspill.cgroups import cores
from overspill.errors import OptionError
from overspill.specs import GiB, MiB, align
from overspill.tiers.host import Arena
from overspill.tiers.nvme import NvmeTier, check_folder
from overspill.tiers.probe import disk_free, host_available
from overspill.tiers.threads import workers

PAGE = 64 * MiB
"""What crosses the link in one copy, as a page of optimizer state does."""
ROUNDS = 4
_PAGES = 16
_IN_FLIGHT = 2
_DRAM, _DISK, _SQUARE = GiB, 4 * GiB, 8192
_SMALL_DRAM, _SMALL_DISK, _SMALL_SQUARE = 32 * MiB, 16 * MiB, 512


def link(device: torch.device) -> dict[str, float]:
    """`up`, `down` and `both` of a cuda device; nothing elsewhere."""
    if device.type != "cuda":
        return {}
    room = 2 * _PAGES * PAGE
    if host_available() < 2 * room:
        raise OptionError(
            f"expected {2 * room} bytes of host memory to measure the link, found {host_available()}; free some"
        )
    arenas = [Arena(_PAGES * PAGE) for _ in range(2)]
    try:
        for arena in arenas:
            arena.touch(0)
            arena.pin()
        up, down = (_Way(arena.tensor, device, rising) for arena, rising in zip(arenas, (True, False), strict=True))
        found = {"up": _best(lambda: _crossing([up], device)), "down": _best(lambda: _crossing([down], device))}
        return {**found, "both": _best(lambda: _crossing([up, down], device))}
    finally:
        for arena in arenas:
            arena.close()


class _Way:
    """Copies in one direction, on a stream of its own, page after page."""

    def __init__(self, host: Tensor, device: torch.device, rising: bool) -> None:
        self._pages = host.split(PAGE)  # uint8 [PAGE] each, host
        self._slots = [torch.zeros(PAGE, dtype=torch.uint8, device=device) for _ in range(_IN_FLIGHT)]
        self._rising = rising
        self.stream = torch.cuda.Stream(device)
        self.nbytes = host.numel()

    def copy(self, number: int) -> None:
        page, slot = self._pages[number], self._slots[number % _IN_FLIGHT]
        with torch.cuda.stream(self.stream):
            if self._rising:
                slot.copy_(page, non_blocking=True)
            else:
                page.copy_(slot, non_blocking=True)


def _crossing(ways: list[_Way], device: torch.device) -> float:
    """Bytes per second of all ways together, from the first copy's begin to the last one's end."""
    torch.cuda.synchronize(device)
    begin = torch.cuda.Event(enable_timing=True)
    begin.record(torch.cuda.current_stream(device))
    ends = []
    for way in ways:
        way.stream.wait_event(begin)
    for number in range(_PAGES):
        for way in ways:
            way.copy(number)
    for way in ways:
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record(way.stream)
    torch.cuda.synchronize(device)
    milliseconds: float = max(begin.elapsed_time(end) for end in ends)
    return sum(way.nbytes for way in ways) / milliseconds * 1000


def dram(small: bool) -> float:
    """Bytes per second read and written by a copy that all cores share."""
    threads = cores()
    nbytes = _SMALL_DRAM if small else min(_DRAM, align(host_available() // 8, PAGE))
    source, target = (np.zeros(nbytes, dtype=np.uint8) for _ in range(2))
    source[:], target[:] = 1, 1  # now the pages are there
    pieces = [(a, b) for a, b in zip(*(np.array_split(each, threads) for each in (target, source)), strict=True)]
    with workers(threads, "overspill-dram") as pool:

        def copy() -> float:
            begin = time.perf_counter()
            # numpy lets go of the interpreter while it copies.
            list(pool.map(lambda pair: np.copyto(*pair), pieces))
            return 2 * nbytes / (time.perf_counter() - begin)

        return _best(copy)


def disk(folder: Path, small: bool) -> dict[str, float]:
    """`disk_read` and `disk_write` of overspill's own disk tier, in that folder."""
    check_folder(folder)
    nbytes = _SMALL_DISK if small else _DISK
    if disk_free(folder) < 2 * nbytes:
        raise OptionError(
            f"expected {2 * nbytes} bytes free in {str(folder)!r} to measure the disk, found {disk_free(folder)}; "
            "give another folder"
        )
    tier = NvmeTier([(folder, None)], nbytes)
    try:
        slot = tier.reserve(nbytes)
        page = torch.randint(256, (min(nbytes, PAGE),), dtype=torch.uint8)  # a disk may cheat with zeros
        parts = [slot.piece(begin, page.numel()) for begin in range(0, nbytes, page.numel())]

        def write() -> float:
            begin = time.perf_counter()
            for part in parts:
                tier.store(part, page)
            return nbytes / (time.perf_counter() - begin)

        def read() -> float:
            begin = time.perf_counter()
            for part in parts:
                tier.load(part, page)
            return nbytes / (time.perf_counter() - begin)

        rounds = 2
        return {"disk_write": _best(write, rounds), "disk_read": _best(read, rounds)}
    finally:
        tier.close()


def matmul(device: torch.device) -> float:
    """Floating-point operations per second of a bf16 matrix product."""
    size = _SQUARE if device.type == "cuda" else _SMALL_SQUARE
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out, repeats = torch.empty_like(a), 8

    def multiply() -> float:
        begin = time.perf_counter()
        for _ in range(repeats):
            torch.mm(a, b, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return repeats * 2 * size**3 / (time.perf_counter() - begin)

    multiply()
    return _best(multiply)


def _best(measure: Callable[[], float], rounds: int = ROUNDS) -> float:
    return max(measure() for _ in range(rounds))
