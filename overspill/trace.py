"""A record of what the lanes did, as Chrome/Perfetto trace events: one track per lane."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Recorder:
    """Collects spans while it is on; off, a span costs one attribute look-up."""

    def __init__(self) -> None:
        self.on = False
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    @contextmanager
    def span(self, track: str, name: str, detail: dict[str, Any]) -> Iterator[None]:
        if not self.on:
            yield
            return
        begin = time.perf_counter()
        try:
            yield
        finally:
            event = {"ph": "X", "pid": 0, "tid": track, "name": name, "args": detail}
            event |= {"ts": begin * 1e6, "dur": (time.perf_counter() - begin) * 1e6}
            with self._lock:
                self._events.append(event)

    def write(self, path: Path) -> None:
        """Write what was recorded, with the tracks named, and forget it."""
        with self._lock:
            events, self._events = self._events, []
        tracks = {name: i for i, name in enumerate(sorted({e["tid"] for e in events}))}
        names = [
            {"ph": "M", "pid": 0, "tid": i, "name": "thread_name", "args": {"name": track}}
            for track, i in tracks.items()
        ]
        body = [{**e, "tid": tracks[e["tid"]]} for e in events]
        path.write_text(json.dumps({"traceEvents": names + body}))


class OwnTime:
    """Counts the host time that a training loop spends in this package, without what it waits there. Calls inside of
    calls count once. Loop and backward pass take turns, so one counter is enough."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._begin = 0.0

    def __enter__(self) -> None:
        if self._depth == 0:
            self._begin = time.perf_counter()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - self._begin

    def waited(self, seconds: float) -> None:
        """So much of it was waiting."""
        if self._depth:
            self.seconds -= seconds


own_time = OwnTime()
