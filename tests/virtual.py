"""A GPU of clocks: the program and the thread of pages as they are, on streams that take as long as they are told.

Two threads take turns by their own clocks: the loop, which follows the program through steps, and the one that hands
pages out (runtime/handing.py, passage.py). So how well pages overlap is known without a GPU, and the same every time.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from overspill.program import Begin, Due, Kind, Lane, Need, Op, Program, Step, deadline, react, start
from overspill.runtime.handing import Handing, UnitWork
from overspill.runtime.lanes import Ticket
from overspill.runtime.loans import Loans
from overspill.runtime.passage import Passage
from overspill.specs import Limits, Placement

PAGE = 0.112e9
"""Bytes."""
LINK = 48e9
"""Bytes per second, each way, both at a time."""
MEMORY = 4e12
"""Bytes per second that an update reads and writes."""
CALL = 0.25e-3
"""Seconds that it takes to hand a copy or an update out."""
QUEUE = 12
"""Layers that the loop may be ahead of the GPU."""
DEVICE = torch.device("cpu")


@dataclass
class Clock:
    """Of the thread that runs now."""

    now: float = 0.0


@dataclass
class Moment:
    """An event: when it will have happened is known."""

    clock: Clock
    at: float

    def query(self) -> bool:
        return self.at <= self.clock.now

    def synchronize(self) -> None:
        self.clock.now = max(self.clock.now, self.at)


@dataclass
class Stream:
    clock: Clock
    free: float = 0.0

    def put(self, seconds: float, behind: Sequence[Moment | None] = ()) -> Moment:
        self.free = max(self.free, self.clock.now, *(m.at for m in behind if m is not None)) + seconds
        return Moment(self.clock, self.free)


@dataclass
class Work:
    """Layers between an embedding and a head: what they compute, in seconds, and what each takes of the host."""

    layers: int = 33
    forward: float = 14.5e-3
    backward: float = 46e-3
    host: tuple[float, float] = (2.5e-3, 7e-3)
    pages: int = 19
    """Of a layer; the others have two thirds of that."""
    waits: bool = False
    """Whether the loop waits for the GPU at every layer of a backward pass."""
    resident: frozenset[int] = frozenset()
    """Units whose states live on the device."""
    limits: Limits = field(default_factory=lambda: Limits(window=0, depth=4, flight=0))
    eager: bool = False


class Ways:
    """As runtime/ways.py."""

    def __init__(self, clock: Clock) -> None:
        self.up, self.down, self.update, self._clock = Stream(clock), Stream(clock), Stream(clock), clock
        self.fetched = 0
        """Pages."""

    def put(self, op: Op, work: Any, waits: Sequence[Any], copies: bool = False) -> Moment:
        self._clock.now += CALL
        if op.kind == Kind.UPDATE:
            return self.update.put(2 * PAGE / MEMORY, waits)
        self.fetched += op.kind == Kind.STATE_FETCH
        return (self.up if op.kind == Kind.STATE_FETCH else self.down).put(PAGE / LINK, waits)

    def let_others_in(self) -> None: ...


class Ring:
    """As runtime/ring.py: there is memory for every slot."""

    slot_bytes = int(PAGE)

    def fits(self, page: Any) -> bool:
        return True

    def takes(self, slot: int) -> bool:
        return True

    def settle(self, slot: int) -> None: ...


class Gpu:
    def __init__(self, work: Work) -> None:
        self.clock, self.work = Clock(), work
        self.compute = Stream(self.clock)
        others = work.pages * 2 // 3
        counts = [others, *[work.pages] * work.layers, others]
        units = [_unit(count) for count in counts]
        sharding = SimpleNamespace(split=lambda role: False)
        model: Any = SimpleNamespace(units=units, sharding=sharding, format=SimpleNamespace(fields=("m", "v")))
        homes = ("device" if u in work.resident else "host" for u in range(len(units)))
        placements = tuple(Placement("device", "device", home) for home in homes)  # type: ignore[arg-type]
        program = Program(model, placements, work.limits, eager=work.eager, piped=True)
        self.executor: Any = SimpleNamespace(program=program, state=start(program), views=threading.Lock())
        self.executor.lanes = SimpleNamespace(device=DEVICE)
        self.executor.tickets = SimpleNamespace(put=lambda key, ticket: None)
        self.passage = Passage(self.executor, _Pages(model), SimpleNamespace(run_page=None), Loans())  # type: ignore[arg-type]
        self.ways = Ways(self.clock)
        self.passage.ways = self.passage.way_home._ways = self.ways  # type: ignore[assignment]
        self.handing = Handing(self.executor, self.passage)
        self._due: dict[int, Ticket] = {}
        self._works: dict[int, UnitWork] = {}
        self._ahead: deque[Moment] = deque()
        self.begun: list[float] = []
        """When the GPU came to each step."""

    def steps(self, count: int) -> list[float]:
        """Seconds of each but the last."""
        loop, clocks = self._loop(count), [0.0, 0.0]
        while True:
            mine = int(clocks[1] <= clocks[0])
            self.clock.now = clocks[mine]
            if mine:
                clocks[1] = self._hand_out(clocks[0])
                continue
            until = next(loop, None)
            if until is None:
                return [b - a for a, b in zip(self.begun, self.begun[1:], strict=False)]
            clocks[0] = max(self.clock.now, until)

    def _hand_out(self, other: float) -> float:
        """One turn of the thread of pages; its clock after that."""
        if self.handing.do():
            return self.clock.now + 1e-5
        wait = self.handing.waits()
        if wait is None:
            return max(other, self.clock.now) + 1e-5
        if wait.__name__ in ("_moment", "wait_issued"):
            return self.clock.now + 1e-3
        wait()
        return self.clock.now + 1e-5

    # --- the loop: yields until when it waits

    def _loop(self, count: int) -> Iterator[float]:
        work, last = self.work, self.work.layers + 1
        for _ in range(count):
            self.begun.append(self.compute.free)
            for unit in range(last + 1):
                yield from self._need(unit)
                yield from self._launch(work.forward, work.host[0])
            for unit in range(last, -1, -1):
                yield from self._need(unit)
                yield from self._launch(work.backward, work.host[1])
                if work.waits:
                    yield self.compute.free
                if work.eager:
                    yield from self._react(Due(frozenset((unit,))))
            yield from self._react(Step(frozenset() if work.eager else frozenset(range(last + 1))))
            # As models do that look at a mask.
            yield self.compute.free
            yield from self._react(Begin("train"))

    def _need(self, unit: int) -> Iterator[float]:
        """Weights live on the device: where no update is pending, nobody asks (runtime/residency.py)."""
        if unit in self.executor.state.pending:
            yield from self._react(Need((unit,)))

    def _launch(self, seconds: float, host: float) -> Iterator[float]:
        self.clock.now += host
        self._ahead.append(self.compute.put(seconds))
        if len(self._ahead) > QUEUE:
            yield self._ahead.popleft().at

    def _react(self, event: Any) -> Iterator[float]:
        self.executor.state, ops = react(self.executor.program, self.executor.state, event)
        for op in ops:
            if op.kind == Kind.DUE:
                self._due[op.unit] = Ticket(Moment(self.clock, self.compute.free), DEVICE)  # type: ignore[arg-type]
            elif op.kind == Kind.UPDATE and op.lane == Lane.PAGES:
                where, waits = deadline(self.executor.state, op.unit), [self._due[op.unit]]
                self._works[op.unit] = UnitWork(op.unit, where, waits, self.passage.pages_of(op.unit))
                self.handing.add(self._works[op.unit])
            elif op.kind == Kind.UPDATED:
                self.handing.hurry(op.unit)
                while not self._works[op.unit].future.done():
                    yield self.clock.now + 1e-4
                done: Any = self._works[op.unit].future.result()
                self.compute.free = max(self.compute.free, done.at)


def _unit(pages: int) -> Any:
    page = SimpleNamespace(state_bytes=int(PAGE), grad_bytes=int(PAGE / 5), parts=())
    made = int(pages * PAGE / 5)
    return SimpleNamespace(pages=[page] * pages, made_bytes=made, weight_bytes=made, home_bytes=made, params=())


class _Pages:
    """As runtime/pages.py."""

    ring = Ring()

    def __init__(self, model: Any) -> None:
        self.model = model

    def fetch_into(self, slot: int, page: Any) -> Any:
        return _nothing

    def store_from(self, page: Any) -> Any:
        return _nothing

    def passing_bytes(self, unit: int, page: int) -> int:
        return int(PAGE)

    def home(self, unit: int, page: int) -> None: ...
    def forget(self, page: Any) -> None: ...


def _nothing() -> None: ...
