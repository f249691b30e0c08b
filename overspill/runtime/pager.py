"""Passes the pages of whole units through the ring, while the training loop does other things.

Note [Who hands pages out]: pages are handed out as slots become free (program/, Note [Never far ahead]). The training
loop's own thread is far ahead of the GPU, or waits for it, and comes by too seldom. So a thread of its own does that.
What it works on says handing.py. It touches no object of the user's.

Note [Turns of threads]: whoever runs Python gives the others their turn after 5 ms, which is as long as several pages
take. While there is a pager on cuda, it does so after half a millisecond. A model that mostly launches kernels gives
way at each of them anyway.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from overspill.program import Lane, deadline
from overspill.runtime.cores import Cores
from overspill.runtime.executor import Executor
from overspill.runtime.handing import Handing, UnitWork
from overspill.runtime.lanes import Ticket
from overspill.runtime.passage import Passage

TURN = 0.0005
"""Seconds; see Note [Turns of threads]."""


class Pager:
    """Runs until it is closed or forgotten, or Python ends. Its thread refers to it only while it works."""

    def __init__(self, executor: Executor, passage: Passage, device: torch.device, cores: Cores | None = None) -> None:
        self._executor = executor
        self._passage = passage
        self.cores = cores
        self._handing = Handing(executor, passage, cores)
        self._device = device
        self._wake: SimpleQueue[None] = SimpleQueue()
        """Not an event: it is also used by whoever collects garbage, in the middle of anything."""
        self._idle = threading.Event()
        self._lock = threading.Lock()
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

    @property
    def moved(self) -> Counter[Lane]:
        return self._passage.moved + (Counter() if self.cores is None else self.cores.moved)

    def submit(self, unit: int, waits: Sequence[Ticket]) -> Ticket:
        """Update a unit; the ticket is ready when its last page is handed out."""
        pages = self._passage.pages_of(unit)
        work = UnitWork(unit, deadline(self._executor.state, unit), list(waits), pages)
        work.patient = self._passage.reads_device(unit)
        with self._lock:
            if self._closed:
                work.future.set_exception(self._reason())
                return Ticket(work.future, self._device)
            self._handing.add(work)
        self.wake()
        return Ticket(work.future, self._device)

    def hurry(self, unit: int) -> None:
        """Somebody waits for this unit, if it is not done."""
        self._handing.hurry(unit)

    def wake(self) -> None:
        """There may be something to do."""
        with self._lock:
            self._idle.clear()
            self._wake.put(None)

    def drain(self) -> None:
        """Wait until there is nothing to do any more; what was fetched for later is given up."""
        self._handing.ends = True
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
        if self.cores is not None:
            self.cores.close()
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
            if self._handing.ends and not self._closed:
                self._handing.end()
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
        self._handing.fail(self._reason())
        while self._error is None and self._passage.send_home():
            pass
        self._passage.way_home.fail(self._reason())
        self._passage.loans.end()

    def _turn(self) -> bool:
        """Do something, or wait until there is something to do; False: there is nothing."""
        if self._handing.do():
            return True
        waits = self._handing.waits()
        if waits is not None:
            waits()
        return waits is not None


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
