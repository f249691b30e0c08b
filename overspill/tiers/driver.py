"""Copies and events by CUDA's driver itself, as far as they are only put on streams.

Note [Kept lock]: torch lets other threads run Python in every call into CUDA. Where one thread hands pages out while
another one launches a model's kernels, each takes over at every call of the other: a layer that takes 2 ms to launch
took 17. These calls take microseconds, so they keep the interpreter's lock. Copies do not: where many are queued, the
next one waits until there is room.

Where there is no such library, torch does the same.
"""

import ctypes
import functools
import logging
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

log = logging.getLogger("overspill")

LIBRARY = "libcuda.so.1"
_BLOCKING, _WITHOUT_TIMING = 1, 2
_NOT_READY = 600
_POINTER, _INT = ctypes.c_void_p, ctypes.c_uint


class Event(Protocol):
    """As torch's: recorded on a stream, and over when the stream is past that. Whoever waits on the host sleeps."""

    def record(self, stream: torch.cuda.Stream) -> None: ...
    def wait(self, stream: torch.cuda.Stream) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Driver:
    copy: Any
    create: Any
    destroy: Any
    record: Any
    wait: Any
    query: Any
    synchronize: Any


@functools.cache
def _driver() -> _Driver | None:
    try:
        kept, free = ctypes.PyDLL(LIBRARY), ctypes.CDLL(LIBRARY)
        return _Driver(
            _call(free, "cuMemcpyAsync", _POINTER, _POINTER, ctypes.c_size_t, _POINTER),
            _call(kept, "cuEventCreate", ctypes.POINTER(_POINTER), _INT),
            _call(kept, "cuEventDestroy_v2", _POINTER),
            _call(kept, "cuEventRecord", _POINTER, _POINTER),
            _call(kept, "cuStreamWaitEvent", _POINTER, _POINTER, _INT),
            _call(kept, "cuEventQuery", _POINTER),
            _call(free, "cuEventSynchronize", _POINTER),
        )
    except (OSError, AttributeError) as error:
        log.info("copies and events go by torch, which is slower: no %s (%s)", LIBRARY, error)
        return None


def _call(library: ctypes.CDLL, name: str, *kinds: Any) -> Any:
    found = getattr(library, name)
    found.argtypes, found.restype = kinds, ctypes.c_int
    return found


def _check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"CUDA's driver refused to {what}: error {code}")


class _Mark:
    """See Note [Kept lock]."""

    __slots__ = ("_destroy", "_driver", "_handle")

    def __init__(self, driver: _Driver) -> None:
        handle = _POINTER()
        _check(driver.create(ctypes.byref(handle), _BLOCKING | _WITHOUT_TIMING), "make an event")
        self._driver, self._handle = driver, handle.value
        self._destroy = driver.destroy

    def __del__(self) -> None:
        if hasattr(self, "_destroy"):
            self._destroy(self._handle)

    def record(self, stream: torch.cuda.Stream) -> None:
        _check(self._driver.record(self._handle, stream.cuda_stream), "record an event")

    def wait(self, stream: torch.cuda.Stream) -> None:
        _check(self._driver.wait(stream.cuda_stream, self._handle, 0), "wait for an event")

    def query(self) -> bool:
        code = self._driver.query(self._handle)
        if code == _NOT_READY:
            return False
        _check(code, "look at an event")
        return True

    def synchronize(self) -> None:
        _check(self._driver.synchronize(self._handle), "wait for an event")


@dataclass(frozen=True, slots=True)
class Together:
    """Several events: over when all are."""

    events: tuple[Event, ...]

    def record(self, stream: torch.cuda.Stream) -> None:
        raise AssertionError("each of them is recorded by itself")

    def wait(self, stream: torch.cuda.Stream) -> None:
        for event in self.events:
            event.wait(stream)

    def query(self) -> bool:
        return all(event.query() for event in self.events)

    def synchronize(self) -> None:
        for event in self.events:
            event.synchronize()


def recorded(stream: torch.cuda.Stream) -> Event:
    """An event behind all that a stream was given so far."""
    driver = _driver()
    if driver is None:
        event: Event = torch.cuda.Event(blocking=True)
    elif stream.device.index == torch.cuda.current_device():
        event = _Mark(driver)
    else:
        with torch.cuda.device(stream.device):
            event = _Mark(driver)
    event.record(stream)
    return event


def copy(to: Tensor, source: Tensor) -> bool:
    """Copy bytes between page-locked host memory and the device, on the current stream; False: it must be done by
    torch. Both are contiguous, and of one size."""
    driver, device = _driver(), to.device if to.is_cuda else source.device
    if driver is None or device.index != torch.cuda.current_device():
        return False
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    _check(driver.copy(to.data_ptr(), source.data_ptr(), to.numel() * to.itemsize, stream), "copy")
    return True
