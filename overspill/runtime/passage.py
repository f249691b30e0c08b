"""The ring, and pages on their way through it: fetched, updated, sent home. One thread's; see pager.py.

On cuda everything here is only put on streams; a slot is free again when its page is home.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import torch
from torch import Tensor

from overspill.program import Key, Kind, Lane, Op
from overspill.runtime.executor import Executor
from overspill.runtime.lanes import Ticket, Work
from overspill.runtime.pages import Pages
from overspill.runtime.updates import Updates

Page = tuple[int, int]
"""(unit, page)"""
Event = torch.cuda.Event | None
"""None: it is over, as everything is at once without a GPU."""


class Passage:
    """`depth` slots."""

    def __init__(self, executor: Executor, pages: Pages, updates: Updates, depth: int) -> None:
        self._lanes = executor.lanes
        self._views = executor.views
        self._executor = executor
        self._pages = pages
        self._updates = updates
        self._cuda = executor.lanes.device.type == "cuda"
        self.moved: Counter[Lane] = Counter()
        self._free = deque(range(depth))
        self._there: dict[Page, tuple[int, Event]] = {}
        """Pages in slots that wait for their update: the slot, and when the page is there."""
        self._coming: deque[Event] = deque()
        self._going: deque[tuple[int, Event]] = deque()
        self._stored: dict[Page, Event] = {}
        pages.elsewhere = self

    def pages_of(self, unit: int) -> list[Page]:
        return [(unit, page) for page in range(len(self._pages.model.units[unit].pages))]

    # --- slots

    def _passes(self, page: Page) -> bool:
        """Whether it needs a slot."""
        placement = self._executor.program.placements[page[0]]
        return placement.state != "device" or placement.grad != "device"

    def missing(self, page: Page) -> bool:
        return page not in self._there and self._passes(page)

    def coming(self) -> int:
        """Pages that are on their way here."""
        while self._coming and _over(self._coming[0]):
            self._coming.popleft()
        return len(self._coming)

    def going(self) -> int:
        """Pages that are on their way home."""
        while self._going and _over(self._going[0][1]):
            self._free.append(self._going.popleft()[0])
        return len(self._going)

    def has_free_slot(self) -> bool:
        self.going()
        return bool(self._free)

    def wait(self) -> bool:
        """Until something that is on its way is over; False: nothing is."""
        on_its_way = len(self._going) + len(self._coming)
        if self.going() + self.coming() < on_its_way:
            return True
        events = [self._going[0][1]] if self._going else [self._coming[0]] if self._coming else []
        for event in events:
            assert event is not None, "without a GPU nothing is ever on its way"
            event.synchronize()
        return bool(events)

    def _slot(self, at_hand: set[Page]) -> int | None:
        if self.has_free_slot():
            return self._free.popleft()
        if self._going:
            return None
        # All slots are taken by pages that were fetched for later: the last of them gives its slot up to one that is
        # at hand.
        later = [page for page in self._there if page not in at_hand] if at_hand else []
        if not later:
            return None
        slot, event = self._there.pop(later[-1])
        if event is not None:
            event.synchronize()
        return slot

    # --- pages

    def fetch(self, page: Page, at_hand: set[Page]) -> bool:
        """Bring a page's state into a slot; False: there is none."""
        slot = self._slot(at_hand)
        if slot is None:
            return False
        with self._views:
            work = self._pages.fetch_into(slot, page)
            event = None
            if work is not None:
                stored = self._stored.pop(page, None)
                event = self._put(Lane.UP, Op(Kind.STATE_FETCH, Lane.UP, *page), work, (stored,))
                self.moved[Lane.UP] += self._pages.passing_bytes(*page)
                if event is not None:
                    self._coming.append(event)
            self._there[page] = (slot, event)
        return True

    def begin(self, unit: int, waits: Sequence[Ticket]) -> None:
        """The pages that follow belong to an update that comes behind these; what fetches their gradients too."""
        up = [Lane.UP] if self._executor.program.placements[unit].grad != "device" else []
        streams = [self._lanes.stream(lane) for lane in (*up, Lane.UPDATE)] if self._cuda else []
        for ticket in waits:
            for stream in streams:
                ticket.wait(stream)
            if not streams:
                ticket.wait()

    def update(self, page: Page) -> Event:
        """Update a page that is there, and send it home; when the update is done."""
        with self._views:
            slot, there = self._there.pop(page, (-1, None))
            there = self._fetch_gradients(page, there)
            op = Op(Kind.UPDATE, Lane.UPDATE, *page)
            updated = self._put(Lane.UPDATE, op, lambda: self._updates.run_page(*page), (there,))
            home = updated
            work = self._pages.store_from(page)
            if work is not None:
                home = self._put(Lane.DOWN, Op(Kind.STATE_STORE, Lane.DOWN, *page), work, (updated,))
                self.moved[Lane.DOWN] += self._pages.passing_bytes(*page)
                self._stored[page] = home
                self._executor.tickets.put(
                    Key(Kind.STATE_STORE, *page), None if home is None else Ticket(home, self._lanes.device)
                )
            if slot >= 0:
                self._pages.forget(page)
                self._going.append((slot, home))
        return updated

    def _fetch_gradients(self, page: Page, there: Event) -> Event:
        if self._executor.program.placements[page[0]].grad == "device":
            return there
        work = self._updates.fetch_gradients(page)
        self.moved[Lane.UP] += self._pages.spec(*page).grad_bytes
        return self._put(Lane.UP, Op(Kind.PAGE_GRADS, Lane.UP, *page), work, (there,))

    def _put(self, lane: Lane, op: Op, work: Work, waits: Sequence[Event]) -> Event:
        """On a lane's stream, behind some events."""
        if not self._cuda:
            self._lanes.timed(lane, op, work)
            return None
        stream = self._lanes.stream(lane)
        for event in waits:
            if event is not None:
                stream.wait_event(event)
        torch.cuda.set_stream(stream)
        self._lanes.timed(lane, op, work)
        # Blocking: whoever waits for it on the host sleeps.
        done = torch.cuda.Event(blocking=True)
        done.record(stream)
        return done

    # --- from outside: see Pages.write

    def written(self, page: Page, memory: Tensor) -> None:
        """A page was replaced in its home: the copy that was fetched for its next update, too."""
        with self._views:
            slot, event = self._there.get(page, (-1, None))
            if slot >= 0:
                if event is not None:
                    event.synchronize()
                self._pages.ring.memory(page)[: memory.numel()].copy_(memory)


def _over(event: Event) -> bool:
    return event is None or bool(event.query())
