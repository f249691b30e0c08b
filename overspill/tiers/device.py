"""The device tier: memory that compute works in. On cuda it is torch's caching allocator; without a GPU, malloc."""

import ctypes
import logging
import os
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_THRESHOLD = 128 << 10
GROWTH = 20 << 20
"""Bytes by which torch's growing segments grow. Whether there is room for them is decided by what was asked for, which
may be less: without as much to spare a limit would be passed by a part of it."""
LARGE = 64 * GROWTH
"""A budget that can spare that. A smaller one would miss it: there the limit may be passed."""

log = logging.getLogger("overspill")


def current(device: torch.device) -> AbstractContextManager[None]:
    """Makes it the current device: what cuda does for no tensor in particular, it does for that one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def share_one_heap(device: torch.device) -> None:
    """Without a GPU: threads that are started from here on take their memory from one heap.

    glibc gives each thread a heap of its own and reserves 64 MiB for it, which counts where a process has a limit on
    its address space.
    """
    if device.type == "cpu" and hasattr(ctypes.CDLL(None), "mallopt"):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def keep_no_freed_memory(device: torch.device) -> None:
    """Without a GPU `device` is plain memory, and a budget only holds if what is freed goes back.

    glibc's malloc keeps freed blocks of up to 32 MiB for itself once it has seen such sizes (it was seen to hold
    three times what was in use). Fixed thresholds give every large block a mapping of its own; trimming gives back
    what was freed before. Called when the model's own bytes have been taken over.
    """
    if device.type != "cpu":
        return
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, _THRESHOLD)
        libc.malloc_trim(0)
    except (OSError, AttributeError):
        log.info("this C library cannot trim: freed memory may count against the budget for a while")


@dataclass(frozen=True, slots=True)
class _Held:
    nbytes: int
    others: int
    lifted: bool = False


class HeldBudget:
    """Keeps torch's allocator within the budgets of this process, until it is closed or forgotten. Peaks that torch
    counts are those from here on.

    Without it freed blocks pile up beyond any budget before the allocator looks for one that it could use again.
    `there`: what the process has on the device beside the model that the budget is for.
    """

    def __init__(self, device: torch.device, nbytes: int, there: int) -> None:
        self._device = device
        held = _budgets.setdefault(device, {})
        if not held:
            _caps[device] = _cap(device)
        # What other prepared models have is within their budgets.
        self.others = max(0, there - sum(b.nbytes + b.others for b in _held(device)))
        self._finalizer = weakref.finalize(self, _give_budget_back, device, id(self), os.getpid())
        held[id(self)] = _Held(nbytes, self.others)
        _use_growing_segments()
        # What building the model left behind would only count.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        _limit(device)

    def lift(self) -> None:
        """No budget is held until this one is closed or forgotten."""
        held = _budgets[self._device]
        held[id(self)] = replace(held[id(self)], lifted=True)
        _limit(self._device)

    def close(self) -> None:
        self._finalizer()


@contextmanager
def no_budgets(device: torch.device) -> Iterator[None]:
    """While a model moves in: those that are there already may have filled theirs, and it has none yet."""
    if not _budgets.get(device):
        yield
        return
    _suspended[device] += 1
    try:
        _limit(device)
        yield
    finally:
        _suspended[device] -= 1
        _limit(device)


def _use_growing_segments() -> None:
    """Segments of fixed sizes leave holes that no other size fits: of a budget of 16 GB a quarter was lost to them."""
    if any(name in os.environ for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")):
        return
    try:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    except (AttributeError, RuntimeError) as error:
        log.info("torch's allocator keeps segments of fixed sizes, which may waste some of the budget: %s", error)


_budgets: dict[torch.device, dict[int, _Held]] = {}
_caps: dict[torch.device, float] = {}
"""What the user allowed himself before there was a budget, as a share of the device."""
_suspended: Counter[torch.device] = Counter()
"""How many models move in beside budgets, which are not held until then."""


def _cap(device: torch.device) -> float:
    # Older torch cannot tell.
    ask = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return float(ask(device)) if ask is not None else 1.0


def _give_budget_back(device: torch.device, which: int, pid: int) -> None:
    if os.getpid() == pid:
        _budgets.get(device, {}).pop(which, None)
        _limit(device)


def _held(device: torch.device) -> list[_Held]:
    """As of now: one may end at any time, when Python's garbage collector runs."""
    return list(_budgets[device].values())


def _limit(device: torch.device) -> None:
    held, total = _held(device), torch.cuda.get_device_properties(device).total_memory
    kept = sum(b.nbytes - (GROWTH if b.nbytes >= LARGE else 0) + b.others for b in held)
    free = not held or _suspended[device] > 0 or any(b.lifted for b in held)
    torch.cuda.set_per_process_memory_fraction(min(_caps[device], 1.0 if free else kept / total), device)
