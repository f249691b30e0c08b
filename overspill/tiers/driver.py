"""Copies and events by CUDA's driver itself, as far as they are only put on streams.

Note [Kept lock]: torch lets other threads run Python in every call into CUDA. Where one thread hands pages out while
another one launches a model's kernels, each takes over at every call of the other: a layer that takes 2 ms to launch
took 17. These calls take microseconds, so they keep the interpreter's lock. Copies do not: where many are queued, the
next one waits until there is room.

Note [In one go]: even so, a call waits while the other thread is inside of the driver, and keeps the lock meanwhile. So
what a page needs for its way, up or down, is collected first: what it comes behind, the copy, and the event behind it.
Then the native library makes all of these calls, while others run Python. Nothing but copies of `copy` may be among
them: what torch puts on a stream would not be collected.

Note [Whose context]: the driver works in the context of the thread that calls it, where torch finds out which one is
meant; zero is the default stream of that context. A thread may have another device's, or none yet, as those of autograd
before they do anything else.

Where there is no such library, torch does the same.
"""

import ctypes
import functools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from overspill.native import library

log = logging.getLogger("overspill")

LIBRARY = "libcuda.so.1"
_BLOCKING, _WITHOUT_TIMING = 1, 2
_NO_CONTEXT, _NOT_READY = 201, 600
_POINTER, _INT = ctypes.c_void_p, ctypes.c_uint
_WAIT, _COPY, _RECORD = range(3)
_CALL = 4
"""Numbers that a collected call consists of: see csrc/driver.cpp."""


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
    record: Any
    wait: Any
    query: Any
    synchronize: Any
    play: Callable[[Sequence[int], int], int]
    """Makes collected calls on a stream: (calls, stream). See Note [In one go]."""


@functools.cache
def _driver() -> _Driver | None:
    try:
        kept, free = ctypes.PyDLL(LIBRARY), ctypes.CDLL(LIBRARY)
        return _Driver(
            _call(free, "cuMemcpyAsync", _POINTER, _POINTER, ctypes.c_size_t, _POINTER),
            _call(kept, "cuEventCreate", ctypes.POINTER(_POINTER), _INT),
            _call(kept, "cuEventRecord", _POINTER, _POINTER),
            _call(kept, "cuStreamWaitEvent", _POINTER, _POINTER, _INT),
            _call(kept, "cuEventQuery", _POINTER),
            _call(free, "cuEventSynchronize", _POINTER),
            _player(free),
        )
    except (OSError, AttributeError) as error:
        log.info("copies and events go by torch, which is slower: no %s (%s)", LIBRARY, error)
        return None


def _player(driver: ctypes.CDLL) -> Callable[[Sequence[int], int], int]:
    """See Note [In one go]; without the native library, one call after the other."""
    found = library()
    wait = _call(driver, "cuStreamWaitEvent", _POINTER, _POINTER, _INT)
    copy = _call(driver, "cuMemcpyAsync", _POINTER, _POINTER, ctypes.c_size_t, _POINTER)
    record = _call(driver, "cuEventRecord", _POINTER, _POINTER)
    if found is not None:
        native = _call(found, "overspill_play", _POINTER, _POINTER, ctypes.c_int64, _POINTER)
        table = (_POINTER * 3)(*(ctypes.cast(each, _POINTER) for each in (wait, copy, record)))
        return lambda calls, stream: native(
            table, (ctypes.c_uint64 * len(calls))(*calls), len(calls) // _CALL, stream or None
        )
    by_kind = (
        lambda stream, event, *_: wait(stream, event, 0),
        lambda stream, to, source, nbytes: copy(to, source, nbytes, stream),
        lambda stream, event, *_: record(event, stream),
    )

    def play(calls: Sequence[int], stream: int) -> int:
        each = (by_kind[calls[i]](stream, *calls[i + 1 : i + _CALL]) for i in range(0, len(calls), _CALL))
        return next((code for code in each if code), 0)

    return play


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


class _Collected(threading.local):
    """The calls that this thread has collected. See Note [In one go]."""

    calls: list[int] | None = None


_collected = _Collected()
_unused: defaultdict[torch.device, list[int]] = defaultdict(list)
"""Events that nobody has any more: they can be recorded again. Who waits for what they were is not concerned."""


class _Mark:
    """An event of the driver's own. See Note [Kept lock]."""

    __slots__ = ("_device", "_driver", "_handle")

    def __init__(self, driver: _Driver, device: torch.device) -> None:
        self._driver, self._device, self._handle = driver, device, _event(driver, device)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            _unused[self._device].append(self._handle)

    def record(self, stream: torch.cuda.Stream) -> None:
        _run("record an event", stream.device, self._driver.record, self._handle, stream.cuda_stream)

    def wait(self, stream: torch.cuda.Stream) -> None:
        if _collected.calls is not None:
            _collected.calls += (_WAIT, self._handle, 0, 0)
            return
        _run("wait for an event", stream.device, self._driver.wait, stream.cuda_stream, self._handle, 0)

    def query(self) -> bool:
        code = _called(self._device, self._driver.query, self._handle)
        if code not in (0, _NOT_READY):
            raise RuntimeError(f"CUDA's driver refused to look at an event: error {code}")
        return code == 0

    def synchronize(self) -> None:
        _run("wait for an event", self._device, self._driver.synchronize, self._handle)


def _event(driver: _Driver, device: torch.device) -> int:
    try:
        return _unused[device].pop()
    except IndexError:
        handle = _POINTER()
        _run("make an event", device, driver.create, ctypes.byref(handle), _BLOCKING | _WITHOUT_TIMING)
        assert handle.value is not None, "the driver made an event"
        return handle.value


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
    if _collected.calls is not None:
        _collected.calls += (_COPY, to.data_ptr(), source.data_ptr(), nbytes)
        return True
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    _run("copy", device, driver.copy, to.data_ptr(), source.data_ptr(), nbytes, stream)
    return True


def in_one_go(stream: torch.cuda.Stream, waits: Sequence[Event | None], work: Callable[[], None]) -> Event:
    """Put copies on a stream behind some events; when they are over. All that `work` does with the device is `copy`.
    See Note [In one go]."""
    driver = _driver()
    assert driver is not None, "copies go by the driver"
    mark, calls = _Mark(driver, stream.device), list[int]()
    _collected.calls = calls
    try:
        for event in waits:
            if event is not None:
                event.wait(stream)
        work()
    finally:
        _collected.calls = None
    calls += (_RECORD, mark._handle, 0, 0)
    _run("put a copy behind events", stream.device, driver.play, calls, stream.cuda_stream)
    return mark


def there_is() -> bool:
    """Whether copies and events go by the driver."""
    return _driver() is not None
