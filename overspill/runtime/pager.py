"""Passes the pages of whole units through the ring, while the training loop does other things.

Note [Who hands pages out]: each page is handed out when its slot is free (program/, Note [Never far ahead]). The
training loop's own thread is far ahead of the GPU, or waits for it, and comes by too seldom. So a thread of its own
waits for slots. What it works on is decided by the program: which unit is next, and what to fetch when nothing is
pending. It touches no object of the user's.

Note [Two ways of the link]: pages come up and go down side by side, a few at a time each way. So at every turn a page
is fetched, if there is a slot for it, and one that is there is updated and sent home.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import torch

from overspill.program import Lane, Op, Program, State, next_updates
from overspill.runtime.lanes import Ticket
from overspill.runtime.passage import Page, Passage

QUEUED = 3
"""Pages that may be on their way, each way."""
UNITS = 2
"""Units whose updates may have begun: the one at hand, and one whose pages can be fetched meanwhile."""


class Executor(Protocol):
    """As this thread sees it."""

    program: Program
    state: State

    def ahead(self) -> Sequence[Ticket] | None: ...


@dataclass(slots=True)
class UnitWork:
    """What is left to do for one unit."""

    op: Op
    waits: Sequence[Ticket]
    future: Future[torch.cuda.Event | None]
    """Of the last page's update, when it is handed out."""
    pages: deque[Page] = field(default_factory=deque)
    unfetched: deque[Page] = field(default_factory=deque)
    """Those of them that may not be there yet."""
    begun: bool = False


class Pager:
    """Runs until it is closed or forgotten, or Python ends. Its thread refers to it only while it works."""

    def __init__(self, executor: Executor, passage: Passage, device: torch.device) -> None:
        self._executor = executor
        self._passage = passage
        self._device = device
        self.moved: Counter[Lane] = passage.moved
        self._works: deque[UnitWork] = deque()
        self._later: deque[Page] | None = None
        """What may be fetched while nothing is at hand."""
        self._wake, self._idle = threading.Event(), threading.Event()
        self._closed = False
        weakref.finalize(self, self._wake.set)
        args = (weakref.ref(self), self._wake, device)
        self._thread = threading.Thread(target=_serve, args=args, name="overspill-pager", daemon=True)
        self._thread.start()
        _pagers.add(self)

    # --- what others call

    def submit(self, op: Op, waits: Sequence[Ticket]) -> Ticket:
        """Update a unit, after those that were submitted before; the ticket is ready when its last page is handed
        out."""
        pages = self._passage.pages_of(op.unit)
        work = UnitWork(op, waits, Future(), deque(pages), deque(pages))
        self._idle.clear()
        self._works.append(work)
        self._wake.set()
        if self._closed:
            self._fail(RuntimeError("pages are not handed out any more"))
        return Ticket(work.future, self._device)

    def wake(self) -> None:
        """There may be something to do."""
        self._idle.clear()
        self._wake.set()

    def drain(self) -> None:
        """Wait until there is nothing to do any more."""
        while self._thread.is_alive() and not self._idle.wait(0.05):
            self._wake.set()

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # --- the thread

    def serve(self) -> bool:
        """Work until there is nothing to do; False: it is closed."""
        try:
            while not self._closed and self._turn(self._executor):
                pass
        except BaseException as error:
            self._fail(error)
            raise
        if self._closed:
            self._fail(RuntimeError("the engine is closed"))
        if not self._wake.is_set():
            self._idle.set()
        return not self._closed

    def _fail(self, error: BaseException) -> None:
        """Whoever waits for updates hears of it."""
        self._closed = True
        while self._works:
            self._works.popleft().future.set_exception(error)

    def _turn(self, executor: Executor) -> bool:
        """Do something, or wait until there is something to do; False: there is nothing."""
        begun = executor.ahead() if len(self._works) < UNITS else None
        done = self._fetch(executor) | self._update()
        if done or self._passage.wait():
            return True
        assert not self._works, f"an update of unit {self._works[0].op.unit} cannot go on"
        for ticket in begun or ():
            ticket.finish()
        return begun is not None

    def _fetch(self, executor: Executor) -> bool:
        """Fetch the next page that is not there, of what is at hand or else of what comes next."""
        if self._passage.coming() >= QUEUED:
            return False
        for work in self._works:
            page = self._first_missing(work.unfetched)
            if page is not None:
                self._later = None
                return self._passage.fetch(page, set(self._works[0].pages))
        if self._works or not executor.state.training or not self._passage.has_free_slot():
            return False
        if self._later is None:
            units = next_updates(executor.program, executor.state)
            self._later = deque(page for unit in units for page in self._passage.pages_of(unit))
        page = self._first_missing(self._later)
        return page is not None and self._passage.fetch(page, set())

    def _first_missing(self, pages: deque[Page]) -> Page | None:
        while pages and not self._passage.missing(pages[0]):
            pages.popleft()
        return pages[0] if pages else None

    def _update(self) -> bool:
        """Update the next page of what is at hand, if it is there."""
        if not self._works or self._passage.going() >= QUEUED:
            return False
        work = self._works[0]
        if work.pages and self._passage.missing(work.pages[0]):
            if not work.unfetched:
                # Its slot was given up for another one's.
                work.unfetched.extend(work.pages)
                return True
            return False
        if not work.begun:
            work.begun, self._later = True, None
            self._passage.begin(work.op.unit, work.waits)
        event = self._passage.update(work.pages.popleft()) if work.pages else None
        if not work.pages:
            self._works.popleft()
            work.future.set_result(event)
        return True


def _serve(pager: Callable[[], Pager | None], wake: threading.Event, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    while True:
        wake.wait()
        wake.clear()
        found = pager()
        if found is None or not found.serve():
            return
        del found


_pagers: weakref.WeakSet[Pager] = weakref.WeakSet()


def _close_all() -> None:
    for pager in list(_pagers):
        pager.close()


# Before Python ends its pools of threads; and a thread that is inside of CUDA when Python is gone would take the
# process down with it.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
