"""Updates pages ahead of their use, while the training loop does other things.

Note [Who hands pages out]: pages pass through few slots, and each is handed out when its slot is free (program/,
Note [Never far ahead]). The training loop's own thread is far ahead of the GPU, or waits for it, and comes by too
seldom. So a thread of its own waits for slots. What it does is decided by the program, under the executor's lock; it
touches no object of the user's.
"""

import atexit
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class Waitable(Protocol):
    def finish(self) -> None: ...


class Pages(Protocol):
    """The executor, as this thread sees it."""

    def ahead(self) -> Sequence[Waitable] | None: ...


class Pager:
    """Runs until it is closed, nobody refers to the executor any more, or Python ends."""

    def __init__(self, executor: Pages, device: torch.device) -> None:
        self._wake = threading.Event()
        self._closed = False
        kept = weakref.ref(executor, lambda _: self._stop())
        self._thread = threading.Thread(target=self._loop, args=(kept, device), name="overspill-pager", daemon=True)
        self._thread.start()
        _pagers.add(self)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def mine(self) -> bool:
        """Whether it is this thread that asks."""
        return threading.current_thread() is self._thread

    def wake(self) -> None:
        """There may be something to do."""
        self._wake.set()

    def _stop(self) -> None:
        self._closed = True
        self._wake.set()

    def close(self) -> None:
        self._stop()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _loop(self, executor: Callable[[], Pages | None], device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        while True:
            self._wake.wait()
            self._wake.clear()
            # An error ends the thread; the executor remembers it, and whoever uses the model next hears of it.
            while not self._closed and _one(executor()):
                pass
            if self._closed:
                return


_pagers: "weakref.WeakSet[Pager]" = weakref.WeakSet()


def _close_all() -> None:
    for pager in list(_pagers):
        pager.close()


# Before Python ends its pools of threads, which pages are handed to; and a thread that is inside of CUDA when Python is
# gone would take the process down with it.
getattr(threading, "_register_atexit", atexit.register)(_close_all)


def _one(executor: Pages | None) -> bool:
    """Hand one page out, or wait until that is possible; False: there is none."""
    waits = None if executor is None else executor.ahead()
    for ticket in waits or ():
        ticket.finish()
    return waits is not None
