"""What is to be done for pages: which comes next, which is updated, which goes home. See pager.py.

Note [Two ways of the link]: pages come up and go down side by side, a few at a time each way. So at every turn a page
is fetched, if there is a slot for it, one that is there is updated, and one that is updated is sent home. Updates do
not wait for the way home: in a long ring the pages of the next units are there when the step begins, and the model
goes on as soon as those are updated.

Note [Ahead of the GPU]: the training loop hands work to the GPU long before the GPU gets there. Whoever waits for an
update waits until it is handed out, and would lose what it is ahead by if that had to wait for the GPU. So updates are
handed out before their gradients are computed, in the order in which they came, which is the order in which they will
be computed. Where no slots are lent, pages are also fetched into slots that are not free yet: all that is to be done
for the next forward pass is handed out while the GPU is in the backward pass, because later the loop and this thread
are in each other's way. Of what is computed, what is needed first goes first; what somebody waits for, before the
others.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from overspill.program import next_updates
from overspill.runtime.cores import Cores
from overspill.runtime.executor import Executor
from overspill.runtime.lanes import Ticket
from overspill.runtime.passage import Passage
from overspill.runtime.ring import Page
from overspill.runtime.ways import When
from overspill.tiers import Event, Together

QUEUED = 6
"""Pages that may be on their way, each way, where slots are waited for: more than pass while nobody looks."""
FAR = 24
"""Where they are not. With 64 CUDA let nobody queue the next copy before the first ones were over."""
PASSING = 3
"""Slots that pages fetched for later leave to others: for one that comes, one that is updated, and one that goes."""
SPARE = 4
"""Slots that pages on the device are to leave for those that come: as many as come while one goes home."""


@dataclass(slots=True, eq=False)
class UnitWork:
    """What is left to do for one unit."""

    unit: int
    deadline: int
    waits: list[Ticket]
    """What the update comes behind: that its gradients are computed, above all. It must be issued."""
    left: list[Page]
    """Pages that are to be updated."""
    future: Future[Event | None] = field(default_factory=Future)
    """The event of the last page's update, when it is handed out."""
    hurried: bool = False
    """Whether somebody waits for it."""
    patient: bool = False
    """Whether somebody on the host reads what is computed: it is handed out when that is there."""
    with_cores: int = 0
    """Pages that the host's cores have."""
    not_for_cores: set[Page] = field(default_factory=set)
    """Pages that they refused."""
    last: When = None
    """When the last update on the device is over: those before it are on the same stream."""
    events: list[Event] = field(default_factory=list)
    """Events of pages that the cores are done with."""

    @property
    def is_issued(self) -> bool:
        return not self.patient and all(ticket.issued for ticket in self.waits)

    @property
    def is_computed(self) -> bool:
        while self.waits and self.waits[0].over:
            del self.waits[0]
        return not self.waits


class Handing:
    """Updates that may run, and what is done for them, by one thread."""

    def __init__(self, executor: Executor, passage: Passage, cores: Cores | None = None) -> None:
        self._executor = executor
        self._passage = passage
        self._cores = cores
        self._works: list[UnitWork] = []
        """The units at work, in the order in which they came."""
        self._submitted = 0
        """How many came so far."""
        self._lock = threading.Lock()
        self._later: tuple[tuple[object, ...], deque[Page]] = ((), deque())
        """What may be fetched when everything at hand is on its way; as of when so many had come, these units were
        being updated, and the updates of those had been due in this pass."""
        self.ends = False
        """Whether nothing is fetched any more but for updates that may run."""

    # --- what others call, at any time

    def add(self, work: UnitWork) -> None:
        with self._lock:
            self._works.append(work)
            self._submitted += 1

    def hurry(self, unit: int) -> None:
        """Somebody waits for this unit, if it is not done."""
        for work in tuple(self._works):
            if work.unit == unit:
                work.hurried = True

    def fail(self, error: BaseException) -> None:
        """Whoever waits for updates hears of it."""
        with self._lock:
            for work in self._works:
                work.future.set_exception(error)
            self._works.clear()

    # --- what the thread calls

    def do(self) -> bool:
        """Hand out what can be handed out now; False: there is nothing, or it must be waited for."""
        with self._lock:
            works, submitted = tuple(self._works), self._submitted
        in_order, ready = _in_order(works)
        if self._fetch(in_order, submitted) | self._update(ready) | self._send_home(ready) | self._share(ready):
            return True
        borrow = self._is_left(ready) and ready[0].is_computed
        if not borrow:
            self._passage.slots.give_back()
        if self._passage.look(borrow):
            return True
        stuck = next((work.unit for work in ready if any(_is_fetched(self._cores, p, work) for p in work.left)), None)
        if stuck is not None and self._passage.on_the_way() is None and not _are_busy(self._cores):
            # Pages that could go home later have all slots, or are what is waited for; or those that cannot be updated
            # yet have them.
            if not self._passage.send_home() and not len(self._passage.slots):
                self._passage.give_up((stuck,))
            return True
        return False

    def waits(self) -> Callable[[], None] | None:
        """What waits until there is something to do; None: there is nothing."""
        with self._lock:
            waits = [ticket for work in self._works for ticket in work.waits]
        on_the_way = self._passage.on_the_way()
        if on_the_way is not None and (waits or _are_busy(self._cores)):
            # That may be behind much else, and what is handed out next may not be.
            return _moment
        unready = next((t.finish if t.issued else t.wait_issued for t in waits), None)
        return on_the_way or unready or (_moment if _are_busy(self._cores) else None)

    def end(self) -> None:
        """What was fetched for later is given up."""
        self.ends = False
        self._later = ((), deque())
        self._passage.clear()

    def _fetch(self, works: Sequence[UnitWork], submitted: int) -> bool:
        """Fetch the next page that is not there, of what is at hand or else of what comes next."""
        far = not self._passage.loans.allowed
        if len(self._passage.coming) >= (FAR if far else QUEUED):
            return False
        for work in works:
            if self._passage.of_units[work.unit] == len(work.left):
                continue
            page = next((page for page in work.left if self._is_to_come(page, work)), None)
            if page is not None:
                return _make_way(self._passage, works) or self._passage.fetch(page, lent=not far, ahead=far)
        state = self._executor.state
        if not state.training or self.ends or not len(self._passage.slots):
            return False
        known = (submitted, state.begun, state.early)
        if self._later[0] != known:
            at_hand = {work.unit for work in works}
            units = [unit for unit in next_updates(self._executor.program, state) if unit not in at_hand]
            self._later = known, deque(page for unit in units for page in self._passage.pages_of(unit))
        later = self._later[1]
        while later and (self._passage.has(later[0]) or _is_for(self._cores, later[0])):
            later.popleft()
        if not later or later[0] in self._passage.way_home.waiting:
            return False
        return self._passage.fetch(later.popleft())

    def _update(self, ready: Sequence[UnitWork]) -> bool:
        """Update the next page that is there."""
        for work in ready:
            page = next((page for page in work.left if self._passage.has(page)), None)
            if page is None and (work.left or work.with_cores):
                continue
            # What the first one comes behind, the others do too: they are on the same stream.
            waits = work.waits if work.last is None else ()
            event = None if page is None else self._passage.update(page, waits)
            with self._lock:
                if page is not None:
                    work.left.remove(page)
                    work.last = event
                self._finish(work)
            return True
        return False

    def _share(self, ready: Sequence[UnitWork]) -> bool:
        """Give a page that is not here to the cores. See cores.py, Note [Two hands]."""
        if self._cores is None or self._cores.hands == "streamed" or not self._cores.has_room():
            return False
        waiting, stored = self._passage.way_home.waiting, self._passage.way_home.stored
        for work, page in _computed(ready, last_first=self._cores.hands == "split"):
            here = page in waiting or self._passage.has(page)
            if here or page in work.not_for_cores or not self._cores.suits(page):
                continue
            with self._lock:
                work.left.remove(page)
                work.with_cores += 1
            if self._cores.take(page, work.waits, stored.get(page), functools.partial(self._came_back, work)):
                stored.pop(page, None)
                return True
            with self._lock:
                work.left.append(page)
                work.with_cores -= 1
                work.not_for_cores.add(page)
        return False

    def _came_back(self, work: UnitWork, event: When, failed: BaseException | None) -> None:
        """The cores are done with a page. Called by their thread."""
        with self._lock:
            if failed is not None and work in self._works:
                self._works.remove(work)
                work.future.set_exception(failed)
                return
            work.with_cores -= 1
            work.events += [] if event is None else [event]
            self._finish(work)

    def _finish(self, work: UnitWork) -> None:
        """Whoever waits for a unit goes on, if that was its last page. The lock is held."""
        if work.left or work.with_cores or work not in self._works:
            return
        self._works.remove(work)
        events = [*work.events, *([] if work.last is None else [work.last])]
        work.future.set_result(Together(tuple(events)) if len(events) > 1 else next(iter(events), None))

    def _send_home(self, ready: Sequence[UnitWork]) -> bool:
        """See loans.py, Note [Way home later]."""
        later = self._passage.loans.allowed and self._passage.slots.left() > SPARE and self._is_left(ready)
        return not later and len(self._passage.way_home) < QUEUED and self._passage.send_home()

    def _is_left(self, ready: Sequence[UnitWork]) -> bool:
        """Whether there are pages to fetch that can be updated."""
        return any(self._is_to_come(page, work) for work in ready for page in work.left)

    def _is_to_come(self, page: Page, work: UnitWork) -> bool:
        """Whether it is to be fetched, and is not here yet."""
        here = page in self._passage.way_home.waiting or self._passage.has(page)
        return not here and _is_fetched(self._cores, page, work)


def _make_way(passage: Passage, works: Sequence[UnitWork]) -> bool:
    """A page at hand is to come: whether one that was fetched for later gave its slot up, because those have so many
    that the others would pass one by one. (What is next was foreseen wrongly.)"""
    if len(passage.slots):
        return False
    at_hand = {work.unit for work in works}
    later = sum(count for unit, count in passage.of_units.items() if unit not in at_hand)
    if later <= max(0, passage.slots.depth - PASSING):
        return False
    passage.give_up(at_hand)
    return True


def _are_busy(cores: Cores | None) -> bool:
    """Whether the cores have pages. An error of theirs comes out here."""
    return cores is not None and cores.busy


def _is_fetched(cores: Cores | None, page: Page, work: UnitWork) -> bool:
    """Whether it comes through the ring, if the cores do not take it before."""
    return page in work.not_for_cores or not _is_for(cores, page)


def _is_for(cores: Cores | None, page: Page) -> bool:
    """Whether the cores update all pages that suit them, and this is one."""
    return cores is not None and cores.hands == "host" and cores.suits(page)


def _moment() -> None:
    time.sleep(0.001)


def _computed(ready: Sequence[UnitWork], last_first: bool) -> Iterator[tuple[UnitWork, Page]]:
    """Pages of what is computed, in the order in which they are needed, or the last ones first."""
    found = [(w, page) for w in itertools.takewhile(lambda w: w.is_computed, ready) for page in w.left]
    return reversed(found) if last_first else iter(found)


def _in_order(works: Sequence[UnitWork]) -> tuple[list[UnitWork], list[UnitWork]]:
    """All of them, and of these the ones that can be handed out. See Note [Ahead of the GPU]."""
    computed = list(itertools.takewhile(lambda work: work.is_computed, works))
    others = [(work, work.is_issued) for work in works[len(computed) :]]
    issued = sorted((work for work, yes in others if yes), key=lambda work: not work.hurried)
    ready = sorted(computed, key=_urgency) + issued
    return [*ready, *(work for work, yes in others if not yes)], ready


def _urgency(work: UnitWork) -> tuple[bool, int]:
    return not work.hurried, work.deadline
