"""Passes the pages of whole units through the ring, while the training loop does other things.

Note [Who hands pages out]: each page is handed out when its slot is free (program/, Note [Never far ahead]). The
training loop's own thread is far ahead of the GPU, or waits for it, and comes by too seldom. So a thread of its own
waits for slots. The program says what it works on: which updates may run, by when they are needed, and what may be
fetched when all of that is on its way. It touches no object of the user's.

Note [Two ways of the link]: pages come up and go down side by side, a few at a time each way. So at every turn a page
is fetched, if there is a slot for it, one that is there is updated, and one that is updated is sent home. Updates do
not wait for the way home: in a long ring the pages of the next units are there when the step begins, and the model
goes on as soon as those are updated.

Note [Turns of threads]: whoever runs Python gives the others their turn after 5 ms, which is as long as several pages
take. While there is a pager on cuda, it does so after half a millisecond. A model that mostly launches kernels gives
way at each of them anyway.

Note [Gradients first]: an update is handed out when its gradients are computed, so nothing that is queued ever waits
for the model. Of several the one that is needed first goes first; all that somebody waits for, before the others.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from overspill.program import Lane, deadline, next_updates
from overspill.runtime.executor import Executor
from overspill.runtime.lanes import Ticket
from overspill.runtime.passage import Passage
from overspill.runtime.ring import Page

QUEUED = 6
"""Pages that may be on their way, each way: more than pass while this thread waits for its turn."""
SPARE = 4
"""Slots that pages on the device are to leave for those that come: as many as come while one goes home."""
TURN = 0.0005
"""Seconds; see Note [Turns of threads]."""


@dataclass(slots=True, eq=False)
class UnitWork:
    """What is left to do for one unit."""

    unit: int
    deadline: int
    waits: list[Ticket]
    """What must be over before: that its gradients are computed, above all."""
    left: list[Page]
    """Pages that are to be updated."""
    future: Future[torch.cuda.Event | None] = field(default_factory=Future)
    """Of the last page's update, when it is handed out."""
    hurried: bool = False
    """Whether somebody waits for it."""

    @property
    def ready(self) -> bool:
        while self.waits and self.waits[0].over:
            del self.waits[0]
        return not self.waits


class Pager:
    """Runs until it is closed or forgotten, or Python ends. Its thread refers to it only while it works."""

    def __init__(self, executor: Executor, passage: Passage, device: torch.device) -> None:
        self._executor = executor
        self._passage = passage
        self._device = device
        self.moved: Counter[Lane] = passage.moved
        self._works: list[UnitWork] = []
        """In the order in which they came."""
        self._submitted = 0
        """How many came so far."""
        self._wake: SimpleQueue[None] = SimpleQueue()
        """Not an event: it is also used by whoever collects garbage, in the middle of anything."""
        self._idle = threading.Event()
        self._lock = threading.Lock()
        self._later: tuple[tuple[int, frozenset[int]] | None, deque[Page]] = (None, deque())
        """What may be fetched when everything at hand is on its way; as of when so many had come, and these units were
        being updated."""
        self._clears = False
        self._closed = False
        self._error: BaseException | None = None
        self.pid = os.getpid()
        weakref.finalize(self, self._wake.put, None)
        args = (weakref.ref(self), self._wake, device)
        self._thread = threading.Thread(target=_serve, args=args, name="overspill-pager", daemon=True)
        self._thread.start()
        self._turns = _take_short_turns(self) if device.type == "cuda" else None
        _pagers.add(self)

    # --- what others call

    def submit(self, unit: int, waits: Sequence[Ticket]) -> Ticket:
        """Update a unit; the ticket is ready when its last page is handed out."""
        pages = self._passage.pages_of(unit)
        work = UnitWork(unit, deadline(self._executor.state, unit), list(waits), pages)
        with self._lock:
            if self._closed:
                work.future.set_exception(self._reason())
                return Ticket(work.future, self._device)
            self._works.append(work)
            self._submitted += 1
        self.wake()
        return Ticket(work.future, self._device)

    def hurry(self, unit: int) -> None:
        """Somebody waits for this unit, if it is not done."""
        for work in tuple(self._works):
            if work.unit == unit:
                work.hurried = True

    def wake(self) -> None:
        """There may be something to do."""
        with self._lock:
            self._idle.clear()
            self._wake.put(None)

    def drain(self) -> None:
        """Wait until there is nothing to do any more; what was fetched for later is given up."""
        self._clears = True
        self.wake()
        while self._thread.is_alive() and not self._idle.wait(0.05):
            pass

    def resize(self) -> None:
        """The ring has as many slots as the program's limits say. Nothing is on its way, and nothing in a slot."""
        self._passage.resize()

    def close(self) -> None:
        self._closed = True
        self._wake.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()
        if self._turns is not None:
            self._turns()

    def _reason(self) -> BaseException:
        return self._error or RuntimeError("pages are not handed out any more")

    # --- the thread

    def serve(self) -> bool:
        """Work until there is nothing to do; False: it is closed."""
        try:
            while not self._closed and self._turn():
                pass
            if self._clears and not self._closed:
                self._clears = False
                self._later = (None, deque())
                self._passage.clear()
        except BaseException as error:
            self._error = error
            raise
        finally:
            if self._closed or self._error is not None:
                self._fail()
        with self._lock:
            if self._wake.empty():
                self._idle.set()
        return not self._closed

    def _fail(self) -> None:
        """Whoever waits for updates hears of it."""
        with self._lock:
            self._closed = True
            for work in self._works:
                work.future.set_exception(self._reason())
            self._works.clear()
        while self._error is None and self._passage.send_home():
            pass
        self._passage.way_home.fail(self._reason())
        self._passage.loans.end()

    def _turn(self) -> bool:
        """Do something, or wait until there is something to do; False: there is nothing."""
        with self._lock:
            works, submitted = tuple(self._works), self._submitted
        ready = sorted((w for w in works if w.ready), key=_urgency)
        # What came first is computed first.
        unready = [w for w in works if w.waits]
        works = (*ready, *unready)
        if self._fetch(works, submitted) | self._update(ready) | self._send_home(ready) or self._passage.wait():
            return True
        if ready:
            # Nothing is on its way. If no slot became free just now, pages that cannot be updated yet have them all.
            if not self._passage.free_slots():
                self._passage.give_up(ready[0].unit)
            return True
        for work in unready[:1]:
            work.waits[0].finish()
        return bool(unready)

    def _fetch(self, works: Sequence[UnitWork], submitted: int) -> bool:
        """Fetch the next page that is not there, of what is at hand or else of what comes next."""
        if len(self._passage.coming) >= QUEUED:
            return False
        for work in works:
            if self._passage.of_units[work.unit] == len(work.left):
                continue
            waiting = self._passage.way_home.waiting
            page = next((p for p in work.left if p not in waiting and not self._passage.has(p)), None)
            if page is not None:
                return self._passage.fetch(page, lend=work.ready)
        state = self._executor.state
        if not state.training or self._clears or not self._passage.free_slots():
            return False
        known = (submitted, state.begun)
        if self._later[0] != known:
            at_hand = {work.unit for work in works}
            units = [unit for unit in next_updates(self._executor.program, state) if unit not in at_hand]
            self._later = known, deque(page for unit in units for page in self._passage.pages_of(unit))
        later = self._later[1]
        while later and self._passage.has(later[0]):
            later.popleft()
        if not later or later[0] in self._passage.way_home.waiting:
            return False
        return self._passage.fetch(later.popleft())

    def _update(self, ready: Sequence[UnitWork]) -> bool:
        """Update the next page that is there."""
        for work in ready:
            page = next((page for page in work.left if self._passage.has(page)), None)
            if page is None and work.left:
                continue
            event = None
            if page is not None:
                work.left.remove(page)
                event = self._passage.update(page)
            if not work.left:
                with self._lock:
                    self._works.remove(work)
                work.future.set_result(event)
            return True
        return False

    def _send_home(self, ready: Sequence[UnitWork]) -> bool:
        """See loans.py, Note [Way home later]."""
        later = self._passage.loans.allowed and self._passage.free_slots(lent=True) > SPARE and self._is_left(ready)
        return not later and len(self._passage.way_home) < QUEUED and self._passage.send_home()

    def _is_left(self, ready: Sequence[UnitWork]) -> bool:
        """Whether there are pages to fetch that can be updated at once."""
        return any(self._passage.of_units[work.unit] < len(work.left) for work in ready)


def _urgency(work: UnitWork) -> tuple[bool, int]:
    return not work.hurried, work.deadline


def _serve(pager: Callable[[], Pager | None], wake: SimpleQueue[None], device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    while True:
        wake.get()
        while not wake.empty():
            wake.get()
        found = pager()
        if found is None or not found.serve():
            return
        del found


_pagers: weakref.WeakSet[Pager] = weakref.WeakSet()
_hasty: dict[int, float] = {}
"""Pagers that there are on cuda, with the turns that threads took before each."""


def _take_short_turns(pager: Pager) -> weakref.finalize[[int], Pager]:
    """See Note [Turns of threads]."""
    _hasty[id(pager)] = next(iter(_hasty.values()), sys.getswitchinterval())
    sys.setswitchinterval(min(TURN, sys.getswitchinterval()))
    return weakref.finalize(pager, _end_short_turns, id(pager))


def _end_short_turns(which: int) -> None:
    before = _hasty.pop(which)
    if not _hasty:
        sys.setswitchinterval(before)


def _close_all() -> None:
    for pager in list(_pagers):
        if pager.pid == os.getpid():
            pager.close()


# Before Python ends its pools of threads; and a thread that is inside of CUDA when Python is gone would take the
# process down with it.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
