"""The ring, and pages on their way through it: fetched, updated, sent home. One thread's; see pager.py.

On cuda everything here is only put on streams; a slot is free again when its page is home. Where the next page is not
to wait for the host, it goes into a slot whose page is still on its way home, and comes behind that.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from overspill.program import Key, Kind, Lane, Op
from overspill.runtime.executor import Executor
from overspill.runtime.lanes import Ticket, Work
from overspill.runtime.loans import Loans
from overspill.runtime.pages import Pages
from overspill.runtime.ring import Page
from overspill.runtime.slots import Slots
from overspill.runtime.updates import Updates
from overspill.runtime.ways import Ways, When
from overspill.tiers import HostTier


@dataclass(slots=True, eq=False)
class _Leaving:
    """A page that is updated, and waits in its slot until it can go home."""

    page: Page
    slot: int
    nbytes: int
    work: Work
    by_driver: bool
    """Whether that is but copies by CUDA's driver."""
    updated: When
    home: Future[When] = field(default_factory=Future)
    """When it is there."""


class WayHome:
    """Pages that are updated: they wait in their slots, then go, in the order of their updates."""

    def __init__(self, ways: Ways, free: Callable[[int], None]) -> None:
        self._ways = ways
        self._free = free
        self.waiting: dict[Page, _Leaving] = {}
        """Not on their way yet; until then they cannot be fetched."""
        self._going: deque[tuple[int, Page, When]] = deque()
        self.stored: dict[Page, When] = {}
        """When they are home, as long as that is not known to be over."""

    def add(self, leaving: _Leaving) -> None:
        self.waiting[leaving.page] = leaving

    def release(self, slot: int, page: Page, after: When) -> None:
        """A page's slot is free after this."""
        self._going.append((slot, page, after))

    def __len__(self) -> int:
        """Pages that are on their way, as of the last look."""
        return len(self._going)

    def look(self) -> bool:
        """Whether some are home by now: their slots are free."""
        before = len(self._going)
        while self._going and _over(self._going[0][2]):
            slot, page, event = self._going.popleft()
            if page in self.stored and self.stored[page] is event:
                del self.stored[page]
            self._free(slot)
        return len(self._going) < before

    def first(self) -> When:
        return self._going[0][2]

    def next_free(self, usable: Callable[[int], bool]) -> tuple[int, When] | None:
        """Take the slot that will be free first, of those on their way that are usable; and when it is."""
        for i, (slot, _, event) in enumerate(self._going):
            if usable(slot):
                del self._going[i]
                return slot, event
        return None

    def send(self, leaving: _Leaving) -> None:
        self._ways.let_others_in()
        op = Op(Kind.STATE_STORE, Lane.DOWN, *leaving.page, leaving.nbytes)
        home = self._ways.put(op, leaving.work, (leaving.updated,), leaving.by_driver)
        del self.waiting[leaving.page]
        self.stored[leaving.page] = home
        self.release(leaving.slot, leaving.page, home)
        leaving.home.set_result(home)

    def fail(self, error: BaseException) -> None:
        """No page goes home any more: whoever waits for one hears of it."""
        for leaving in self.waiting.values():
            leaving.home.set_exception(error)
        self.waiting.clear()


class Passage:
    """As many slots as the limits say, and those that are lent. See loans.py."""

    def __init__(self, executor: Executor, pages: Pages, updates: Updates, loans: Loans) -> None:
        self._device = executor.lanes.device
        self._views = executor.views
        self._executor = executor
        self.pages = pages
        self._updates = updates
        self.ways = Ways(executor.lanes)
        self.moved: Counter[Lane] = Counter({Lane.UP: 0, Lane.DOWN: 0})
        self.slots = Slots(pages.ring, loans, executor.program.limits.depth)
        self.loans = loans
        self._there: dict[Page, tuple[int, When]] = {}
        """Pages in slots that wait for their update: the slot, and when the page is there."""
        self.of_units: Counter[int] = Counter()
        """How many of them, by unit."""
        self.coming: deque[When] = deque()
        """Pages that are on their way here, as of the last look."""
        self.way_home = WayHome(self.ways, self.slots.release)
        pages.elsewhere = self

    def pages_of(self, unit: int) -> list[Page]:
        return [(unit, page) for page in range(len(self.pages.model.units[unit].pages))]

    # --- slots

    def has(self, page: Page) -> bool:
        """Whether it is in a slot, or on its way there, or needs none."""
        if not self._executor.program.passes(page[0]):
            return True
        if page in self._there and not self.pages.ring.fits(page):
            # Fetched before gradients turned out to be wider.
            self._drop(page)
        return page in self._there

    def resize(self) -> None:
        """There are as many slots as the limits say now, and all are free."""
        self.look()
        assert not (self._there or self.way_home.waiting or len(self.way_home)), "pages are still in their slots"
        self.slots.resize(self._executor.program)

    def look(self, borrow: bool = False) -> bool:
        """Whether anything that was on its way is over, or slots are lent where that is wanted."""
        before = len(self.coming)
        while self.coming and _over(self.coming[0]):
            self.coming.popleft()
        borrowed = borrow and self.slots.ask()
        return self.way_home.look() or len(self.coming) < before or borrowed

    def on_the_way(self) -> Work | None:
        """What waits for the first that is on its way; None: nothing is. Where nothing is lent, pages are fetched into
        slots that are not free yet, and those are not listed as on their way home any more: what comes is first."""
        events = [self.coming[0]] if self.coming else []
        if len(self.way_home):
            events.insert(0 if self.loans.allowed else 1, self.way_home.first())
        return next((event.synchronize for event in events if event is not None), None)

    def give_up(self, units: Collection[int]) -> None:
        """Free the slot of the page that was fetched last, but for those of these units."""
        page = next((page for page in reversed(self._there) if page[0] not in units), None)
        assert page is not None, f"updates of units {sorted(units)} cannot go on"
        self._drop(page)

    def clear(self) -> None:
        """Forget what was fetched for updates that are not due. All others are home."""
        for page in list(self._there):
            self._drop(page)
        while (wait := self.on_the_way()) is not None:
            wait()
            self.look()
        self.look()
        self.slots.give_back()

    def _drop(self, page: Page) -> None:
        slot, event = self._there[page]
        _finish(event)
        with self._views:
            del self._there[page]
            self.of_units[page[0]] -= 1
            self.pages.forget(page)
        self.slots.release(slot)

    # --- pages

    def fetch(self, page: Page, lent: bool = False, ahead: bool = False) -> bool:
        """Bring a page's state into a slot that is free, one that is lent, or one that will be free; False: there is
        none."""
        slot, free = self.slots.take(lent), None
        if slot is None and ahead and (found := self.way_home.next_free(self.slots.can_follow)) is not None:
            slot, free = found
        if slot is None:
            return False
        with self._views:
            work = self.pages.fetch_into(slot, page)
            event = free
            if work is not None:
                stored = self.way_home.stored.pop(page, None)
                nbytes = self.pages.passing_bytes(*page)
                op = Op(Kind.STATE_FETCH, Lane.UP, *page, nbytes)
                event = self.ways.put(op, work, (stored, free), _by_driver(self.pages, page))
                self.moved[Lane.UP] += nbytes
                if event is not None:
                    self.coming.append(event)
            self._there[page] = (slot, event)
            self.of_units[page[0]] += 1
        return True

    def reads_device(self, unit: int) -> bool:
        """Whether the update of a unit makes the host wait for the device."""
        return self._device.type == "cuda" and self._updates.reads_device(unit)

    def update(self, page: Page, waits: Sequence[Ticket]) -> When:
        """Update a page that is there; when that is done. What it needs beside the page is there after `waits`, all of
        which are issued."""
        behind, op = [ticket.event() for ticket in waits], Op(Kind.UPDATE, Lane.UPDATE, *page)
        with self._views:
            if page not in self._there:
                return self.ways.put(op, lambda: self._updates.run_page(*page), behind)
            slot, there = self._there.pop(page)
            self.of_units[page[0]] -= 1
            there = self._fetch_gradients(page, [there, *behind])
            updated = self.ways.put(op, lambda: self._updates.run_page(*page), (there, *behind))
            work = self.pages.store_from(page)
            if work is None:
                self.way_home.release(slot, page, updated)
            else:
                nbytes, by_driver = self.pages.passing_bytes(*page), _by_driver(self.pages, page)
                leaving = _Leaving(page, slot, nbytes, work, by_driver, updated)
                self.way_home.add(leaving)
                self._executor.tickets.put(Key(Kind.STATE_STORE, *page), Ticket(leaving.home, self._device))
            self.pages.forget(page)
        return updated

    def send_home(self) -> bool:
        """The page that was updated first of those that are still here; False: there is none."""
        leaving = next(iter(self.way_home.waiting.values()), None)
        if leaving is None:
            return False
        self.way_home.send(leaving)
        self.moved[Lane.DOWN] += leaving.nbytes
        return True

    def _fetch_gradients(self, page: Page, waits: Sequence[When]) -> When:
        """When they and the page's state are there."""
        if self._executor.program.placements[page[0]].grad == "device":
            return waits[0]
        work = self._updates.fetch_gradients(page)
        nbytes = self.pages.spec(*page).grad_bytes
        self.moved[Lane.UP] += nbytes
        return self.ways.put(Op(Kind.PAGE_GRADS, Lane.UP, *page, nbytes), work, waits)

    # --- from outside: see Pages.write

    def written(self, page: Page, memory: Tensor) -> None:
        """A page was replaced in its home: the copy that was fetched for its next update, too."""
        with self._views:
            slot, event = self._there.get(page, (-1, None))
            if slot >= 0:
                _finish(event)
                self.pages.ring.memory(page)[: memory.numel()].copy_(memory)


def _by_driver(pages: Pages, page: Page) -> bool:
    """Whether its way to and from its home is but copies by CUDA's driver."""
    home = pages.home(*page)
    return home is not None and isinstance(home[0], HostTier) and home[0].by_driver


def _over(event: When) -> bool:
    return event is None or bool(event.query())


def _finish(event: When) -> None:
    if event is not None:
        event.synchronize()
