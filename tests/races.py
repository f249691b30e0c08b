"""A GPU of streams that are only clocks: what each is known to come behind, whatever bytes which of them touches.

The engine runs as it does on a GPU, with its streams, events and threads, but everything is computed at once. Every op
of torch, in every thread, belongs to the stream that is current there. Two that touch the same bytes, one of them
writing, must be ordered by events or by what the host has seen; and memory that is let go belongs to the stream that it
was allocated for, which must be behind all that used it (torch's allocator gives it out again at once).
"""

import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from overspill.plan import sharing
from overspill.plan.hands import Chosen
from overspill.program import Lane, Op
from overspill.runtime import adopt, lanes, norms, pager, parts, ring, rooms, steps, ways
from overspill.runtime.cores import Cores
from overspill.runtime.handle import GradHandle
from overspill.runtime.kernel_update import KernelUpdate
from overspill.runtime.lanes import Lanes, Ticket, Work
from overspill.runtime.pages import Pages
from overspill.runtime.ring import Ring
from overspill.runtime.rooms import Rooms
from overspill.runtime.updates import OnHost
from overspill.runtime.ways import Ways
from overspill.specs import Hands
from overspill.tiers import streams
from overspill.units.unit import Unit

ENGINE = "overspill/runtime"
Clock = dict[int, int]
"""Stream -> how many of its ops."""


@dataclass(frozen=True)
class Touch:
    begin: int
    end: int
    stream: int
    at: int
    writes: bool
    what: str


@dataclass
class Memory:
    """One storage."""

    stream: int
    """For which it was allocated."""
    touched: list[Touch] = field(default_factory=list)


class Stream:
    def __init__(self, gpu: "Gpu", name: str) -> None:
        self.gpu, self.name, self.cuda_stream = gpu, name, len(gpu.streams)
        gpu.streams.append(self)
        self.clock: Clock = {}


class Event:
    """May be seen to be over at any time."""

    def __init__(self, stream: Stream) -> None:
        self._gpu, self._clock = stream.gpu, dict(stream.clock)

    def wait(self, stream: Stream) -> None:
        with self._gpu.lock:
            _join(stream.clock, self._clock)

    def query(self) -> bool:
        with self._gpu.lock:
            seen = all(self._gpu.host.get(stream, 0) >= at for stream, at in self._clock.items())
        if not seen and self._gpu.chance.random() < self._gpu.slow:
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        with self._gpu.lock:
            _join(self._gpu.host, self._clock)


def _join(one: Clock, other: Clock) -> None:
    for stream, at in other.items():
        one[stream] = max(one.get(stream, 0), at)


class Gpu:
    def __init__(self, seed: int = 0, slow: float = 0.7) -> None:
        self.lock = threading.RLock()
        self.chance, self.slow = random.Random(seed), slow
        self.streams: list[Stream] = []
        self.main = Stream(self, "main")
        self.host: Clock = {}
        """What the host has seen to be over."""
        self.memories: dict[int, Memory] = {}
        self.free: dict[int, list[tuple[Touch, str]]] = {}
        """By the stream that has it again: what was done with memory before it was let go."""
        self.found: list[str] = []
        self._current = threading.local()

    @property
    def current(self) -> Stream:
        return getattr(self._current, "stream", self.main)

    def set(self, stream: Stream) -> None:
        self._current.stream = stream

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        before = self.current
        self.set(before if stream is None else stream)
        try:
            yield
        finally:
            self.set(before)

    def go_on(self, stream: Stream, waits: bool = True) -> None:
        """Another stream is current, and comes behind the one that was."""
        self.follow(stream.cuda_stream, (self.current if waits else stream).cuda_stream)
        self.set(stream)

    @property
    def ops(self) -> int:
        return sum(stream.clock.get(stream.cuda_stream, 0) for stream in self.streams)

    def follow(self, stream: int, other: int) -> None:
        if stream != other:
            Event(self.streams[other]).wait(self.streams[stream])

    # --- what is touched

    def memory(self, t: Tensor) -> Memory:
        # Not by the door of parameters: nobody uses them here.
        storage = Tensor.untyped_storage(t)
        key = storage._cdata
        if key not in self.memories:
            self.memories[key] = Memory(self.current.cuda_stream)
            weakref.finalize(storage, self.let_go, key)
        return self.memories[key]

    def let_go(self, key: int) -> None:
        with self.lock:
            self.is_free(self.memories.pop(key))

    def is_free(self, memory: Memory) -> None:
        """That of the model's own tensors is the user's business."""
        by = _engine_function()
        if by is None:
            return
        self.free.setdefault(memory.stream, []).extend((touch, by) for touch in memory.touched)
        memory.touched = []

    def check_free(self, stream: Stream) -> None:
        """What a stream does next may be in memory that was let go."""
        for touch, by in self.free.pop(stream.cuda_stream, ()):
            if stream.clock.get(touch.stream, 0) < touch.at:
                name = self.streams[touch.stream].name
                self.found.append(f"{stream.name} has memory that {name} still needs for {touch.what}: {by}")

    def touch(self, t: Tensor, writes: bool, what: str) -> None:
        if t.numel() == 0:
            return
        begin = t.storage_offset() * t.itemsize
        extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        memory, stream = self.memory(t), self.current
        touch = Touch(
            begin, begin + extent * t.itemsize, stream.cuda_stream, stream.clock[stream.cuda_stream], writes, what
        )
        kept = []
        for old in memory.touched:
            overlap = old.begin < touch.end and touch.begin < old.end
            ordered = stream.clock.get(old.stream, 0) >= old.at
            if overlap and (writes or old.writes) and not ordered:
                name = self.streams[old.stream].name
                self.found.append(f"{what} on {stream.name} does not come behind {old.what} on {name}")
            inside = touch.begin <= old.begin and old.end <= touch.end
            if not (inside and ordered and (writes or not old.writes)):
                kept.append(old)
        memory.touched = [*kept, touch]

    def did(self, func: Any, given: Sequence[Tensor], written: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        with self.lock, torch._C.DisableTorchFunctionSubclass():
            stream = self.current
            _join(stream.clock, self.host)
            stream.clock[stream.cuda_stream] = stream.clock.get(stream.cuda_stream, 0) + 1
            self.check_free(stream)
            for tensors, writes in ((given, False), (written, True), (made, True)):
                for t in tensors:
                    if _has_memory(t):
                        self.touch(t, writes, f"{func} [{threading.current_thread().name}]")


def _engine_function() -> str | None:
    """Of the engine, that is running."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if ENGINE in frame.f_code.co_filename:
            return frame.f_code.co_qualname
        frame = frame.f_back
    return None


def _has_memory(t: Tensor) -> bool:
    return t.layout is torch.strided and not t.is_meta and not torch._C._functorch.is_functorch_wrapped_tensor(t)


class Watched(TorchDispatchMode):
    """Tells of every op of this thread."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if GradHandle in types:
            # What that does comes by op by op.
            return NotImplemented
        # Whoever called has come through the door of parameters already.
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if getattr(func, "is_view", False):
            return result
        read, written = [], []
        for i, argument in enumerate(func._schema.arguments):
            x = kwargs.get(argument.name) if argument.name in kwargs else args[i] if i < len(args) else None
            tensors = [t for t in tree_leaves(x) if isinstance(t, Tensor)]
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            (written if is_written else read).extend(tensors)
        ids = {*map(id, read), *map(id, written)}
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor) and id(t) not in ids]
        self._gpu.did(func, read, written, made)
        del read, written, made
        return result


class SimulatedLanes(Lanes):
    gpu: Gpu

    def stream(self, lane: Lane) -> Any:
        if lane not in self._streams:
            self._streams[lane] = Stream(self.gpu, f"lane {lane}")  # type: ignore[assignment]
        return self._streams[lane]

    def mark(self) -> Ticket | None:
        stream: Any = self.gpu.current
        return Ticket(Event(stream), self.device, stream.cuda_stream)

    def submit(self, op: Op, work: Work, waits: Sequence[Ticket]) -> Ticket | None:
        here = None if op.free else self.mark()
        stream = self.stream(op.lane)
        for ticket in [*waits, *([] if here is None else [here])]:
            ticket.wait(stream)
        with self.gpu.on(stream):
            self._run(op, work, ())
        event: Any = Event(stream)
        return Ticket(event, self.device, stream.cuda_stream)


@contextmanager
def simulated(monkeypatch: pytest.MonkeyPatch, seed: int = 0, slow: float = 0.7) -> Iterator[Gpu]:
    """A model that is prepared here runs on such a GPU. At the end nothing may have been found."""
    gpu = Gpu(seed, slow)
    SimulatedLanes.gpu = gpu
    _streams(monkeypatch, gpu)
    _memory(monkeypatch, gpu)
    serve = pager._serve

    def served(*given: Any) -> None:
        with Watched(gpu):
            serve(*given)

    monkeypatch.setattr(pager, "_serve", served)
    with Watched(gpu):
        yield gpu


def with_cores(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, hands: Hands, seconds: float = 0.0) -> list[int]:
    """The host's cores update too, each time for so long: what they read and write counts as a stream of its own, which
    is over when they are done. How many elements they updated is noted in what is returned."""
    monkeypatch.setattr(parts, "CORES", {"cpu"})
    monkeypatch.setattr(sharing, "choose", lambda speeds, sizes: Chosen(hands, "as told"))
    stream, updated = Stream(gpu, "cores"), list[int]()
    run, task = KernelUpdate.run_on_host, Cores._run

    def runs(self: KernelUpdate, page: tuple[int, int], on: Sequence[OnHost], states: Tensor, how: Any) -> None:
        read = [t for part in on for t in (part.gradient, *part.factors)]
        written = [states, *(part.weight for part in on)]
        updated.append(sum(part.weight.numel() for part in on))
        with gpu.on(stream):
            gpu.did("the cores", read, written, ())
            time.sleep(seconds)
            run(self, page, on, states, how)
        Event(stream).synchronize()

    def watched(self: Cores, given: Any) -> None:
        with Watched(gpu):
            task(self, given)

    monkeypatch.setattr(KernelUpdate, "run_on_host", runs)
    monkeypatch.setattr(Cores, "_run", watched)
    return updated


def _streams(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    monkeypatch.setattr(parts, "Lanes", SimulatedLanes)
    for module in (lanes, ways, ring):
        monkeypatch.setattr(module, "recorded", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: gpu.current)
    monkeypatch.setattr(torch.cuda, "set_stream", gpu.set)
    monkeypatch.setattr(torch.cuda, "stream", gpu.on)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(streams, "current", lambda device: gpu.current.cuda_stream)
    monkeypatch.setattr(streams, "follow", lambda device, stream, other: gpu.follow(stream, other))
    monkeypatch.setattr(parts, "PAGED", {"cpu"})
    monkeypatch.setattr(rooms, "PIECES", {"cpu"})
    monkeypatch.setattr(norms, "TOGETHER", {"cpu"})
    monkeypatch.setattr(steps, "HEARS_LATER", {"cpu"})
    begin = Ways.__init__

    def begins(self: Ways, made: Lanes) -> None:
        begin(self, made)
        self._streams = {lane: Stream(gpu, f"way {lane}") for lane in (Lane.UP, Lane.DOWN, Lane.UPDATE, Lane.PAGES)}  # type: ignore[misc]

    monkeypatch.setattr(Ways, "__init__", begins)


def _waited_for(run: Callable[..., None], gpu: Gpu) -> Callable[..., None]:
    """As on a GPU: the host waits until it is done."""

    def runs(*given: Any) -> None:
        run(*given)
        Event(gpu.current).synchronize()

    return runs


def _memory(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    put, new, grow, shrink = Ring.put, Rooms._new, Unit.grow, Unit.shrink

    def puts(self: Ring, slot: int, page: Any) -> Any:
        before = self._slots.get(slot)
        found = put(self, slot, page)
        if self._slots[slot] is not before:
            self._fresh[slot] = Event(gpu.current)  # type: ignore[assignment]
        return found

    def makes(self: Rooms, unit: int) -> Any:
        self.loans.stream = gpu.current  # type: ignore[assignment]
        room = new(self, unit)
        self.loans.stream = gpu.current  # type: ignore[assignment]
        return room

    def grows(self: Unit) -> None:
        if not self.here:
            gpu.memory(self.flat).stream = gpu.current.cuda_stream
        grow(self)

    def shrinks(self: Unit) -> None:
        with gpu.lock:
            gpu.is_free(gpu.memory(self.flat))
        shrink(self)

    monkeypatch.setattr(Ring, "put", puts)
    for name in ("write", "move_out"):
        monkeypatch.setattr(Pages, name, _waited_for(getattr(Pages, name), gpu))
    monkeypatch.setattr(adopt, "_move_out", _waited_for(adopt._move_out, gpu))
    monkeypatch.setattr(Rooms, "_new", makes)
    monkeypatch.setattr(Unit, "grow", grows)
    monkeypatch.setattr(Unit, "shrink", shrinks)
