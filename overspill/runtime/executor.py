"""The executor: folds the program over events and hands each op to its lane. It decides nothing."""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from overspill.errors import StateError
from overspill.program import Event, Key, Kind, Lane, Mark, Op, Program, State, react, start
from overspill.runtime.lanes import Lanes, Ticket, Tickets, Work
from overspill.runtime.ranks import Ranks


class Pager(Protocol):
    """See pager.py."""

    @property
    def moved(self) -> Counter[Lane]: ...
    def submit(self, unit: int, waits: Sequence[Ticket]) -> Ticket: ...
    def hurry(self, unit: int) -> None: ...
    def wake(self) -> None: ...
    def drain(self) -> None: ...
    def resize(self) -> None: ...
    def close(self) -> None: ...


Handler = Callable[[Op], Work]
"""Called on the caller's thread when the op is handed out (allocations happen here); what it returns runs on the
lane. For ops of the compute lane both happen at once, behind the op's waits."""

LETS_GO = frozenset((Kind.RELEASE, Kind.GRAD_DROP, Kind.PAGE_DROP, Kind.UPDATED))
"""Ops of the compute lane that let device memory go, which they do not read themselves. (GRAD_ADD does.)"""

WEIGHTS, STATES = "weights", "states"
LOADED = (WEIGHTS, STATES)
"""What a load may leave mixed, or a backward pass whose updates had begun."""


@dataclass(frozen=True, slots=True)
class Mixed:
    """What a load left that ended in the middle, or a backward pass."""

    found: str
    part: object = None
    """The module that was to be loaded; None: the whole model, or its optimizer."""
    closes: bool = False
    """Whether the model may be given back as it is."""


ANEW = (
    "prepare anew: build the model and its optimizer again, and load a checkpoint; this model can neither go on nor be "
    "closed, and gives its memory back when it is deleted"
)

AS_IT_IS = (
    "load a checkpoint (overspill.load), or the state dicts of both the model and its optimizer, and go on from there; "
    "or call overspill.close(model), which gives it back as it is"
)


class Executor:
    """Runs one program."""

    def __init__(self, program: Program, lanes: Lanes, ranks: Ranks | None = None) -> None:
        self.program = program
        self.ranks = ranks
        self.state = start(program)
        self.lanes = lanes
        self.moved: Counter[Lane] = Counter()
        self.times: dict[Kind, float] = dict.fromkeys(Kind, 0.0)
        self._handlers: dict[Kind, Handler] = {}
        self.tickets = Tickets()
        self._together: Ticket | None = None
        """The ticket of the last collective."""
        self._failed: BaseException | None = None
        self._mixed: dict[str, Mixed] = {}
        self.hears: Callable[[], None] = lambda: None
        """Looks whether a backward pass broke off."""
        self.reloads: Callable[[], bool] = lambda: False
        """Whether the caller is a load by torch, which may make it whole again."""
        self._pid = os.getpid()
        self.lock = threading.RLock()
        """Autograd may run the nodes of one backward pass in two threads."""
        self.pager: Pager | None = None
        """Who passes pages through the ring, where somebody does."""
        self.views = threading.Lock()
        """Held by whoever works on weights in another thread, and by whoever looks for views of them."""

    def handle(self, handlers: dict[Kind, Handler]) -> None:
        self._handlers |= handlers

    @property
    def mixed(self) -> dict[str, Mixed]:
        """What loads left that failed in the middle, or a backward pass. Until all values are loaded, nobody may go on
        with it."""
        self.hears()
        return self._mixed

    @mixed.setter
    def mixed(self, left: dict[str, Mixed]) -> None:
        self._mixed = left

    def __call__(self, event: Event) -> None:
        # Autograd may run the nodes of one backward pass in two threads: those on the GPU and those on the CPU.
        with self.lock:
            self._check(event)
            resting = not self.state.training
            state, ops = react(self.program, self.state, event)
            while self.ranks is not None and (offer := self.ranks.points(ops)):
                chosen = self.ranks.choose(offer)
                if chosen is None or (len(offer) == 1 and offer[0].same(chosen)):
                    self.ranks.settled(chosen or offer[0])
                    break
                self.ranks.joins[chosen.kind](chosen)
                state, ops = react(self.program, self.state, event)
            self._fold(state, ops)
            if self.pager is not None and resting and self.state.training:
                self.pager.wake()

    def join(self, event: Event) -> None:
        """React to an event that all ranks agreed on."""
        with self.lock:
            self._check(event)
            self._fold(*react(self.program, self.state, event))

    def _check(self, event: Event) -> None:
        if os.getpid() != self._pid:
            raise StateError(
                "expected a prepared model to be used in the process that prepared it, found a forked one, which has "
                "neither its lanes nor its host memory; hand plain tensors to workers"
            )
        if self._failed is not None:
            raise StateError(
                f"expected an engine that runs, found that it stopped at an earlier error ({self._failed!r}), perhaps "
                f"with some of its weights updated and some not; {ANEW}"
            )
        # What was written until then is no use of it, and what is whole of it stays when the rest is loaded.
        mixed = self.mixed
        if mixed and not isinstance(event, Mark) and not self.reloads():
            left = next(iter(mixed.values()))
            cure = AS_IT_IS if left.closes else f"load a whole checkpoint or state dict, or {ANEW}"
            raise StateError(f"expected a whole model, found {left.found}; {cure}")

    def give_up(self, error: BaseException) -> None:
        """Weights are neither those before a step nor those after it."""
        self._failed = error

    def _fold(self, state: State, ops: list[Op]) -> None:
        self.state = state
        if not ops:
            return
        try:
            # The caller may evaluate in inference mode, or be inside a transform of torch.func; what is allocated and
            # computed here is no part of that.
            with torch.inference_mode(False), torch.no_grad(), temporarily_clear_interpreter_stack():
                for op in ops:
                    self._run(op)
        except BaseException as error:
            self._failed = error
            raise

    def _run(self, op: Op) -> None:
        for ticket in self.tickets.of(op.done):
            ticket.finish()
        waits = self.tickets.of(op.waits)
        if op.lane == Lane.PAGES:
            assert self.pager is not None, "only where there is a pager"
            self.tickets.put(op.key, self.pager.submit(op.unit, waits))
            return
        if op.lane == Lane.COMPUTE:
            begin = time.perf_counter()
            if op.kind == Kind.UPDATED and self.pager is not None:
                self.pager.hurry(op.unit)
            self.lanes.use()
            for ticket in waits:
                ticket.wait()
            if op.kind in LETS_GO:
                self.lanes.give_back()
            self.lanes.compute(op, lambda: self._handlers[op.kind](op)())
            if op.kind == Kind.GRAD_ADD:
                self.lanes.give_back()
            self.times[op.kind] += time.perf_counter() - begin
            if op.kind == Kind.UPDATED and self.pager is not None:
                # Its next update may be looked forward to.
                self.pager.wake()
            if op.kind == Kind.DUE:
                self.tickets.put(op.key, self.lanes.mark())
            return
        self.moved[op.lane] += op.nbytes
        issued = self.lanes.submit(op, self._handlers[op.kind](op), waits)
        self.tickets.put(op.key, issued)
        if op.lane == Lane.COMM:
            self._together = issued

    def wait(self, key: Key) -> None:
        """Make what the caller does next come after the latest op of this key."""
        for ticket in self.tickets.of((key,)):
            ticket.wait()

    def finish_latest(self, key: Key) -> None:
        """Block until the latest op of this key is done."""
        for ticket in self.tickets.of((key,)):
            ticket.finish()

    def finish_together(self) -> None:
        """Make what the caller does next come after all collectives so far: it is one too."""
        if self._together is not None:
            self._together.wait()

    def finish(self) -> None:
        """Block until every lane is idle."""
        if self.pager is not None:
            self.pager.drain()
        with self.lock:
            self.tickets.finish()

    def traffic(self) -> Counter[Lane]:
        """Bytes that were moved, by lane."""
        return self.moved + self.pager.moved if self.pager is not None else Counter(self.moved)
