"""A thread that shows that this rank lives, and looks whether the others do."""

import contextlib
import dataclasses
import functools
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

PERIOD = 1.0
_NO_VERDICT = "-"
_LINGER = 3.0

T = TypeVar("T")

# Note [signs of life]
# ~~~~~~~~~~~~~~~~~~~~
# Every rank writes a beat into torch's store each second: a counter, where it is, and why it left if it did. Nobody
# reads them while all is well. A rank whose collective fails (gloo says so at once when a socket closes), or waits for
# more than a second, reads all of them. Another rank is dead
# - if its beat says that it left: `close`, the end of its script, an exception that nobody caught;
# - if it ran on this machine and its process is gone or a zombie;
# - if its counter stands still: for 5 s after a failed collective, for 60 s while we merely wait, because a process
#   may be stopped, or swapped out, and come back.
# Clocks of different machines are never compared: each rank times for itself how long a counter has stood still.
# The first to find a dead rank posts the verdict, and the others adopt it. Without it survivors would blame each
# other: a rank that has raised its error closes its own sockets next.
# The store lives in the process of rank 0, unless torchrun's agent keeps it. When it does not answer and no process of
# this machine is seen to be dead, rank 0 is. For that reason rank 0 stays a little at its end, until all have read.
# All traffic with the store goes through the one thread, on a connection of its own: a store that never answers
# blocks that thread and nobody else.


class StoreGone(Exception):
    """The store did not answer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Beat:
    """What a rank says of itself."""

    count: int
    meets: int
    where: str
    left: str | None
    machine: str
    pid: int
    born: str


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """What the store says of everyone."""

    verdict: str | None
    beats: tuple[Beat, ...]


class Pulse:
    """Writes the beats of this rank and reads those of the others, see Note [signs of life]."""

    def __init__(self, store: Any, place: int, places: int) -> None:
        self.where = "the start"
        self.meets = 0
        self.left: str | None = None
        self.patrol: Callable[[], None] | None = None
        """Called after each beat; for collectives that nobody waits for on the host."""
        self._store = store
        self._place = place
        self._places = places
        self._count = 0
        self._broken = False
        self._pid = os.getpid()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="overspill-pulse", daemon=True)

    def start(self) -> None:
        """Post the first beat and start the thread."""
        self._store.compare_set("verdict", "", _NO_VERDICT)
        self._beat()
        self._thread.start()

    def arrived(self) -> list[bool]:
        """By place, who has posted a first beat."""
        return self._ask(lambda: [self._store.check([_key(place)]) for place in range(self._places)], PERIOD * 5)

    def look(self) -> Picture:
        """Read everything; StoreGone when the store does not answer."""
        return self._ask(self._read, PERIOD * 3)

    def post(self, verdict: str) -> str:
        """Offer a verdict; the one that was there first is returned."""
        return self._ask(lambda: _text(self._store.compare_set("verdict", _NO_VERDICT, verdict)), PERIOD * 3)

    def leave(self, reason: str) -> None:
        """Say why this rank takes part no more. The first reason stands."""
        if self.left is None and os.getpid() == self._pid:
            self.left = reason
            with contextlib.suppress(StoreGone):
                self._ask(self._beat, PERIOD)

    def stop(self, linger: bool) -> None:
        """End the thread; `linger` for the keeper of the store, which waits until the others have left too."""
        if os.getpid() != self._pid:
            return
        end = time.monotonic() + _LINGER
        with contextlib.suppress(StoreGone):
            while linger and time.monotonic() < end and any(is_here(beat) for beat in self.look().beats):
                time.sleep(0.05)
        # A daemon thread that is still in C++ code when the interpreter goes away takes the process down with it.
        self._jobs.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(PERIOD * 2)

    def _ask(self, job: Callable[[], T], within: float) -> T:
        """Have the thread do it; StoreGone if that fails or takes too long."""
        if self._broken:
            raise StoreGone
        future: Future[T] = Future()
        task = functools.partial(self._do, job, future)
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            task()
        else:
            self._jobs.put(task)
        try:
            return future.result(within)
        except (TimeoutError, RuntimeError) as error:
            raise StoreGone(str(error)) from error

    def _do(self, job: Callable[[], T], future: "Future[T]") -> None:
        try:
            if self._broken:
                raise RuntimeError("the store was lost")
            future.set_result(job())
        except RuntimeError as error:
            self._lost(error)
            future.set_exception(error)

    def _lost(self, error: RuntimeError) -> None:
        # The client never connects again; and each further try prints a stack trace of C++.
        self._broken = self._broken or type(error).__name__ == "DistNetworkError"

    def _run(self) -> None:
        while True:
            end = time.monotonic() + PERIOD
            while (rest := end - time.monotonic()) > 0:
                try:
                    job = self._jobs.get(timeout=rest)
                except queue.Empty:
                    break
                if job is None:
                    return
                job()
            if self.left is None and not threading.main_thread().is_alive():
                # The script has ended, and Python waits for other threads, which may wait for other ranks.
                self.left = ending()
            if not self._broken:
                try:
                    self._beat()
                except RuntimeError as error:
                    self._lost(error)
            if self.patrol is not None:
                self.patrol()

    def _beat(self) -> None:
        self._count += 1
        beat = Beat(self._count, self.meets, self.where, self.left, machine(), self._pid, born(self._pid) or "")
        self._store.set(_key(self._place), json.dumps(dataclasses.astuple(beat)))

    def _read(self) -> Picture:
        keys = ["verdict", *map(_key, range(self._places))]
        found = self._many(keys)
        return Picture(None if found[0] == _NO_VERDICT else found[0], tuple(Beat(*json.loads(b)) for b in found[1:]))

    def _many(self, keys: Sequence[str]) -> list[str]:
        values = self._store.multi_get(keys) if self._store.has_extended_api() else [self._store.get(k) for k in keys]
        return [_text(value) for value in values]


def ending() -> str:
    """How the script of this process ended, for the others to read."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return "its script ended"
    return f"its script ended with {type(error).__name__}: {str(error)[:500]}"


def is_here(beat: Beat) -> bool:
    """Whether the rank still takes part."""
    return beat.left is None and not is_gone(beat)


def is_gone(beat: Beat) -> bool:
    """Whether the process ran on this machine and is no more."""
    return has_ended((beat.machine, beat.pid, beat.born))


Origin = tuple[str, int, str]
"""What tells a process from others: its machine, its number there, and when it started."""


def origin() -> Origin:
    """That of this process."""
    return machine(), os.getpid(), born(os.getpid()) or ""


def has_ended(process: Origin) -> bool:
    """Whether it ran on this machine and is no more."""
    where, pid, since = process
    return where == machine() and bool(since) and born(pid) != since


def born(pid: int) -> str | None:
    """When a process started, in ticks since boot; None if there is none, or only a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if fields[0] in "ZX" else fields[19]


@functools.cache
def node() -> str:
    """Names the machine, the same for all containers on it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


@functools.cache
def machine() -> str:
    """Names the machine and the range in which process numbers mean the same."""
    try:
        return f"{node()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{node()} {socket.gethostname()} {os.getpid()}"


def _key(place: int) -> str:
    return f"beat/{place}"


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
