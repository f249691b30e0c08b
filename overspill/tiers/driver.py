"""Copies and events by CUDA's driver itself, as far as they are only put on streams.

Note [Kept lock]: torch lets other threads run Python in every call into CUDA. Where one thread hands pages out while
another one launches a model's kernels, each takes over at every call of the other: a layer that takes 2 ms to launch
took 17. These calls take microseconds, so they keep the interpreter's lock. Copies do not: where many are queued, the
next one waits until there is room.

Note [Whose context]: the driver works in the context of the thread that calls it, where torch finds out which one is
meant; zero is the default stream of that context. A thread may have another device's, or none yet, as those of autograd
before they do anything else.

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
_NO_CONTEXT, _NOT_READY = 201, 600
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


def _called(device: torch.device, call: Any, *given: Any) -> int:
    """What a call returns. See Note [Whose context]."""
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _called(device, call, *given)
    code: int = call(*given)
    if code == _NO_CONTEXT:
        torch.cuda.set_device(device)
        torch.cuda.current_stream(device).query()
        code = call(*given)
    return code


def _run(what: str, device: torch.device, call: Any, *given: Any) -> None:
    code = _called(device, call, *given)
    if code:
        raise RuntimeError(f"CUDA's driver refused to {what}: error {code}")


class _Mark:
    """See Note [Kept lock]."""

    __slots__ = ("_device", "_driver", "_handle")

    def __init__(self, driver: _Driver, device: torch.device) -> None:
        handle = _POINTER()
        _run("make an event", device, driver.create, ctypes.byref(handle), _BLOCKING | _WITHOUT_TIMING)
        self._driver, self._device, self._handle = driver, device, handle.value

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._driver.destroy(self._handle)

    def record(self, stream: torch.cuda.Stream) -> None:
        _run("record an event", stream.device, self._driver.record, self._handle, stream.cuda_stream)

    def wait(self, stream: torch.cuda.Stream) -> None:
        _run("wait for an event", stream.device, self._driver.wait, stream.cuda_stream, self._handle, 0)

    def query(self) -> bool:
        code = _called(self._device, self._driver.query, self._handle)
        if code not in (0, _NOT_READY):
            raise RuntimeError(f"CUDA's driver refused to look at an event: error {code}")
        return code == 0

    def synchronize(self) -> None:
        _run("wait for an event", self._device, self._driver.synchronize, self._handle)


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
    event: Event = torch.cuda.Event(blocking=True) if driver is None else _Mark(driver, stream.device)
    event.record(stream)
    return event


def copy(to: Tensor, source: Tensor) -> bool:
    """Copy bytes between page-locked host memory and the device, on the current stream; False: it must be done by
    torch. Both are contiguous, and of one size."""
    driver, device, nbytes = _driver(), to.device if to.is_cuda else source.device, to.numel() * to.itemsize
    if driver is None or not nbytes:
        return driver is not None
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    _run("copy", device, driver.copy, to.data_ptr(), source.data_ptr(), nbytes, stream)
    return True
