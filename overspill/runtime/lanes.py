"""Lanes: who runs ops, each in its own order, side by side with the others.

Note [Tickets]: a ticket stands for work given to a lane. On the CPU it is done when the work is done. On cuda work is
only *issued* on the lane's stream, at once or by the lane's thread, and an event is recorded behind it; the ticket is
ready when that event is recorded. Whoever needs the result waits on the host until the work is issued and lets its own
stream wait for the event: the host never waits for a copy. Waiting on an event that was not yet recorded would be a
silent no-op, so the event only becomes visible through a ticket that is ready.

Note [Memory of several streams]: memory that is let go is the stream's again for which it was allocated, at once. Where
branches of a model run on streams of their own, that may be another one than the one that waited for all who used it.
So all that ever used the model come behind that one first. (With one stream there is nothing to do.)
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from overspill.program import Key, Kind, Lane, Op
from overspill.tiers import Event, recorded, streams, workers
from overspill.trace import Recorder

Work = Callable[[], None]
"""What an op does on its lane."""
INLINE = (Lane.UP, Lane.DOWN, Lane.UPDATE)
"""Lanes whose work on cuda is only put on a stream, which whoever hands it out can do."""
DEVICE_CYCLES_PER_SECOND = 1_500_000_000
"""About what a GPU's clock ticks, for kernels that only take time."""


def nothing() -> None:
    """The work of an op that has none."""


class Ticket:
    """See Note [Tickets]."""

    def __init__(self, work: "Future[Event | None] | Event", device: torch.device, stream: int = 0) -> None:
        self._work = work
        self._device = device
        self._stream = stream
        """Whose event it is, if that is known."""

    def event(self) -> Event | None:
        """What is recorded behind the work, when that is issued; None: it is done."""
        return self._work.result() if isinstance(self._work, Future) else self._work

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Make what this stream, or the current one (on the CPU: the current thread), does next come after this
        work."""
        event = self.event()
        if event is not None:
            here = torch.cuda.current_stream(self._device) if stream is None else stream
            if not self._stream or here.cuda_stream != self._stream:
                event.wait(here)

    def wait_issued(self) -> None:
        """Block until nobody would have to wait on the host any more."""
        self.event()

    @property
    def issued(self) -> bool:
        """Whether nobody would have to wait on the host."""
        return not isinstance(self._work, Future) or self._work.done()

    @property
    def over(self) -> bool:
        """Whether the work is done."""
        if not self.issued:
            return False
        event = self.event()
        return event is None or bool(event.query())

    def finish(self) -> None:
        """Block until the work is done."""
        event = self.event()
        if event is not None and not event.query():
            event.synchronize()


class Lanes:
    """All lanes of one engine. `delays` (seconds per kind of op) is for tests that look for races."""

    def __init__(self, device: torch.device, recorder: Recorder) -> None:
        self.device = device
        self.delays: dict[Kind, float] = {}
        self._index = device.index
        self._recorder = recorder
        self._threads: dict[Lane, ThreadPoolExecutor] = {}
        self._streams: dict[Lane, torch.cuda.Stream] = {}
        self._users: set[int] = set()
        """Streams that used the model, and for which memory may have been allocated."""

    def _thread(self, lane: Lane) -> ThreadPoolExecutor:
        if lane not in self._threads:
            self._threads[lane] = workers(1, f"overspill-{lane}")
        return self._threads[lane]

    def stream(self, lane: Lane) -> torch.cuda.Stream:
        if lane not in self._streams:
            # Updates are short, and whole copies wait for them: they go before what computes meanwhile.
            self._streams[lane] = torch.cuda.Stream(self.device, priority=-1 if lane == Lane.UPDATE else 0)
        return self._streams[lane]

    def compute(self, op: Op, work: Work) -> None:
        """Run on the caller's thread and stream."""
        self.timed(op.lane, op, work)

    def timed(self, lane: Lane, op: Op, work: Work) -> None:
        """Run, behind the delay that tests ask for, and on record if somebody records."""
        if not self.watches(op.kind):
            work()
            return
        with self._recorder.span(lane, op.kind, _detail(op)):
            self._delay(op.kind, on_host=lane == Lane.CORES)
            work()

    def watches(self, kind: Kind) -> bool:
        """Whether somebody records what runs, or delays what is of this kind."""
        return self._recorder.on or kind in self.delays

    def mark(self) -> Ticket | None:
        """A ticket for all that the caller's stream has been given so far."""
        if self.device.type != "cuda":
            return None
        stream = torch.cuda.current_stream(self.device)
        return Ticket(recorded(stream), self.device, stream.cuda_stream)

    def use(self) -> None:
        """The current stream uses the model. See Note [Memory of several streams]."""
        self._users.add(streams.current(self.device))

    def give_back(self) -> None:
        """The current stream is behind all uses of memory that is let go now."""
        here = streams.current(self.device)
        for other in tuple(self._users):
            streams.follow(self.device, other, here)

    def submit(self, op: Op, work: Work, waits: Sequence[Ticket]) -> Ticket | None:
        """Hand to a side lane, behind `waits` and, if it is not free, behind what the caller's stream has been given so
        far. No ticket: it is done already."""
        if self.device.type != "cuda":
            if op.lane == Lane.UPDATE:
                self._run(op, work, waits)
                return None
            return Ticket(self._thread(op.lane).submit(self._run, op, work, waits), self.device)
        here = None if op.free else self.mark()
        behind = [*waits, here] if here is not None else waits
        stream = self.stream(op.lane)
        if op.lane in INLINE:
            return Ticket(self._issue(op, work, behind), self.device, stream.cuda_stream)
        return Ticket(self._thread(op.lane).submit(self._issue, op, work, behind), self.device)

    def _run(self, op: Op, work: Work, waits: Sequence[Ticket]) -> None:
        for ticket in waits:
            ticket.wait()
        self.timed(op.lane, op, work)

    def _issue(self, op: Op, work: Work, waits: Sequence[Ticket]) -> Event:
        stream, before, device = (
            self._streams[op.lane],
            torch.cuda.current_stream(self._index),
            torch._C._cuda_getDevice(),
        )
        for ticket in waits:
            ticket.wait(stream)
        # Not torch's context: it asks for the current stream twice more.
        torch.cuda.set_stream(stream)
        try:
            self._run(op, work, ())
        finally:
            torch.cuda.set_stream(before)
            if device != self._index:
                # Whose stream is set is the current device from then on; the caller's may be another one.
                torch.cuda.set_device(device)
        return recorded(stream)

    def _delay(self, kind: Kind, on_host: bool) -> None:
        seconds = self.delays.get(kind, 0.0)
        if not seconds:
            return
        if self.device.type == "cuda" and not on_host:
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

    def put(self, key: Key, ticket: Ticket | None) -> None:
        if ticket is None:
            self._latest.pop(key, None)
        else:
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
        for ticket in list(self._latest.values()):
            ticket.finish()
        self._latest.clear()
