"""A record of what the lanes did, as Chrome/Perfetto trace events: one track per lane, and one for the model itself.

Note [Stamps]: on cuda work is only put on streams, so the host's clock says little. There a stamp is an event on the
stream that the work is put on, and all are read when the record is written: spans are when the GPU did it. Lanes that
are threads (disk, other ranks, the host's cores), and all of them without a GPU, have the host's clock.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

THREADS = ("read", "write", "comm", "cores")
"""Lanes that the host runs, with or without a GPU."""
MODEL = "model"
Stamp = float | torch.cuda.Event


@dataclass(frozen=True, slots=True)
class _Span:
    track: str
    name: str
    detail: dict[str, Any]
    begin: Stamp
    end: Stamp


class Recorder:
    """Collects spans while it is on; off, a span costs one attribute look-up."""

    def __init__(self) -> None:
        self.on = False
        self._spans: list[_Span] = []
        self._lock = threading.Lock()
        self._device = torch.device("cpu")
        self._zero: tuple[torch.cuda.Event, float] | None = None
        """On cuda: an event, and when it happened by the host's clock, in seconds."""
        self._mark: tuple[str, Stamp] | None = None

    def start(self, device: torch.device) -> None:
        self._device, self._zero = device, None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            zero = torch.cuda.Event(enable_timing=True)
            zero.record(torch.cuda.current_stream(device))
            zero.synchronize()
            self._zero = (zero, time.perf_counter())
        self.on = True

    def stop(self) -> None:
        self.mark("")
        self.on = False

    @contextmanager
    def span(self, track: str, name: str, detail: dict[str, Any]) -> Iterator[None]:
        if not self.on:
            yield
            return
        begin = self._stamp(track)
        try:
            yield
        finally:
            found = _Span(track, name, detail, begin, self._stamp(track))
            with self._lock:
                self._spans.append(found)

    def mark(self, name: str) -> None:
        """From here on, until the next mark, the model's own stream works for this; nothing: it waits."""
        if not self.on:
            return
        before = self._mark
        if before is not None and before[0] == name:
            return
        now = self._stamp(MODEL)
        self._mark = (name, now) if name else None
        if before is not None:
            with self._lock:
                self._spans.append(_Span(MODEL, before[0], {}, before[1], now))

    def _stamp(self, track: str) -> Stamp:
        """See Note [Stamps]."""
        if self._zero is None or track in THREADS:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        # Whatever device is the current one.
        event.record(torch.cuda.current_stream(self._device))
        return event

    def write(self, path: Path) -> None:
        """Write what was recorded, with the tracks named, and forget it."""
        with self._lock:
            spans, self._spans = self._spans, []
        tracks = {name: i for i, name in enumerate(sorted({span.track for span in spans}))}
        names = [
            {"ph": "M", "pid": 0, "tid": i, "name": "thread_name", "args": {"name": track}}
            for track, i in tracks.items()
        ]
        body = []
        for span in spans:
            begin, end = self._seconds(span.begin), self._seconds(span.end)
            event = {"ph": "X", "pid": 0, "tid": tracks[span.track], "name": span.name, "args": span.detail}
            body.append(event | {"ts": begin * 1e6, "dur": (end - begin) * 1e6})
        path.write_text(json.dumps({"traceEvents": names + body}))

    def _seconds(self, stamp: Stamp) -> float:
        if isinstance(stamp, float):
            return stamp
        assert self._zero is not None, "events are stamps on cuda only"
        stamp.synchronize()
        return self._zero[1] + float(self._zero[0].elapsed_time(stamp)) / 1e3


class OwnTime(threading.local):
    """Counts the host time that a training loop spends in this package: that of its own threads, so without what they
    sleep for. Calls inside of calls count once, and what a plain loop calls just the same does not count (`plain`).

    Note [Full queues]: where the GPU is far behind, putting work into its queue spins until there is room, and that
    counts like work. Waiting for the GPU before each call (`first`) tells how much the work itself is."""

    total = 0.0
    """Of all threads."""
    first: Callable[[], None] | None = None
    """Called before a call is counted, in every thread."""

    def __init__(self) -> None:
        self._depth = 0
        self._begin = 0.0

    @property
    def seconds(self) -> float:
        return OwnTime.total

    def __enter__(self) -> None:
        if self._depth == 0:
            if OwnTime.first is not None:
                OwnTime.first()
            self._begin = time.thread_time()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            OwnTime.total += time.thread_time() - self._begin

    @contextmanager
    def plain(self) -> Iterator[None]:
        """For calls of torch that are a plain loop's, too."""
        begin = time.thread_time()
        try:
            yield
        finally:
            # A count that has begun goes on as if this had taken no time.
            self._begin += time.thread_time() - begin


own_time = OwnTime()
