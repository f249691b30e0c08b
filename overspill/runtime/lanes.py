"""Lanes: who runs ops, each in its own order, side by side with the others.

Note [Tickets]: a ticket stands for work given to a lane. On the CPU it is done when the work is done. On cuda the
lane's thread only *issues* the work on the lane's stream and records an event behind it; the ticket is ready when
that event is recorded. Whoever needs the result waits on the host until the work is issued and lets its own stream
wait for the event: the host never waits for a copy. Waiting on an event that was not yet recorded would be a
silent no-op, so the event only becomes visible through the finished future.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from overspill.program import Key, Kind, Lane, Op
from overspill.tiers import workers
from overspill.trace import Recorder

Work = Callable[[], None]
DEVICE_CYCLES_PER_SECOND = 1_500_000_000
"""For injected delays only: about what a GPU's clock ticks."""


class Ticket:
    """See Note [Tickets]."""

    def __init__(self, future: "Future[torch.cuda.Event | None]", device: torch.device) -> None:
        self._future = future
        self._device = device

    def wait(self) -> None:
        """Make what the current stream (on the CPU: the current thread) does next come after this work."""
        event = self._future.result()
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def finish(self) -> None:
        """Block until the work is done."""
        event = self._future.result()
        if event is not None:
            event.synchronize()


class Lanes:
    """All lanes of one engine. `delays` (seconds per kind of op) is for tests that look for races."""

    def __init__(self, device: torch.device, recorder: Recorder) -> None:
        self.device = device
        self.delays: dict[Kind, float] = {}
        self._recorder = recorder
        self._threads: dict[Lane, ThreadPoolExecutor] = {}
        self._streams: dict[Lane, torch.cuda.Stream] = {}

    def _thread(self, lane: Lane) -> ThreadPoolExecutor:
        if lane not in self._threads:
            self._threads[lane] = workers(1, f"overspill-{lane}")
            if self.device.type == "cuda":
                self._streams[lane] = torch.cuda.Stream(self.device)
        return self._threads[lane]

    def compute(self, op: Op, work: Work, waits: Sequence[Ticket]) -> None:
        """Run on the caller's thread and stream, behind `waits`."""
        for ticket in waits:
            ticket.wait()
        with self._recorder.span(op.lane, op.kind, {"unit": op.unit, "item": op.item}):
            self._delay(op.kind)
            work()

    def submit(self, op: Op, work: Work, waits: Sequence[Ticket]) -> Ticket:
        """Hand to a side lane, behind `waits` and behind what the caller's stream has been given so far."""
        thread = self._thread(op.lane)
        here = None
        if self.device.type == "cuda":
            here = torch.cuda.Event()
            here.record(torch.cuda.current_stream(self.device))
        return Ticket(thread.submit(self._run, op, work, waits, here), self.device)

    def _run(
        self, op: Op, work: Work, waits: Sequence[Ticket], here: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        if here is None:
            for ticket in waits:
                ticket.wait()
            with self._recorder.span(op.lane, op.kind, _detail(op)):
                self._delay(op.kind)
                work()
            return None
        stream = self._streams[op.lane]
        with torch.cuda.stream(stream):
            stream.wait_event(here)
            for ticket in waits:
                ticket.wait()
            with self._recorder.span(op.lane, op.kind, _detail(op)):
                self._delay(op.kind)
                work()
            done = torch.cuda.Event()
            done.record(stream)
        return done

    def _delay(self, kind: Kind) -> None:
        seconds = self.delays.get(kind, 0.0)
        if not seconds:
            return
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda._sleep(int(seconds * DEVICE_CYCLES_PER_SECOND))
        else:
            time.sleep(seconds)

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=True)
        self._threads.clear()
        self._streams.clear()


def _detail(op: Op) -> dict[str, int]:
    return {"unit": op.unit, "item": op.item, "bytes": op.nbytes}


class Tickets:
    """The latest ticket of every key. See program/__init__.py, Note [Waiting]."""

    def __init__(self) -> None:
        self._latest: dict[Key, Ticket] = {}

    def put(self, key: Key, ticket: Ticket) -> None:
        self._latest[key] = ticket

    def of(self, keys: Sequence[Key]) -> list[Ticket]:
        """The tickets of these keys that may still be worth waiting for."""
        found = []
        for key in keys:
            ticket = self._latest.get(key)
            if ticket is not None:
                found.append(ticket)
        return found

    def finish(self) -> None:
        """Block until everything is done; an error that happened on a lane comes out here, at the latest."""
        for ticket in self._latest.values():
            ticket.finish()
        self._latest.clear()
