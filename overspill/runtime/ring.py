"""Slots of device memory that pages pass through, in turn."""

import contextlib

import torch
from torch import Tensor

from overspill.slots import ring_slot_bytes
from overspill.specs import ModelSpec, Placement
from overspill.tiers import Event, recorded

Page = tuple[int, int]
"""(unit, page)"""


class Ring:
    """The slots are taken when they are first used, and kept, unless they are given up for a while. A page's state
    comes first in its slot, behind it the page's gradients."""

    def __init__(self, model: ModelSpec, placements: tuple[Placement, ...], device: torch.device) -> None:
        self._model = model
        self._placements = placements
        self._wide = False
        self._nbytes = ring_slot_bytes(model, placements)
        self._device = device
        self._slots: dict[int, Tensor] = {}
        self._pages: dict[Page, int] = {}
        self._inside: dict[int, Page] = {}
        self._fresh: dict[int, Event] = {}
        """When the memory of a slot was taken from those who had it before."""

    @property
    def slot_bytes(self) -> int:
        return self._nbytes

    def take(self, slot: int, stream: torch.cuda.Stream | None) -> bool:
        """Memory for one more slot, of those that the stream has; False: there is none."""
        try:
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                self._slots[slot] = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
                if stream is not None:
                    self._fresh[slot] = recorded(stream)
        except torch.OutOfMemoryError:
            return False
        return True

    def give_back(self, slot: int) -> None:
        """The memory of such a slot. Nobody uses it any more."""
        page = self._inside.pop(slot, None)
        if page is not None:
            del self._pages[page]
        del self._slots[slot]
        self._fresh.pop(slot, None)

    def put(self, slot: int, page: Page) -> Page | None:
        """A slot is for this page from now on; the page that it was for before."""
        before, old = self._pages.get(page), self._inside.get(slot)
        if before is not None:
            del self._inside[before]
        if old is not None and old != page:
            del self._pages[old]
        self._pages[page], self._inside[slot] = slot, page
        if slot not in self._slots or self._slots[slot].numel() < self._nbytes:
            self._slots[slot] = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
            if self._device.type == "cuda":
                self._fresh[slot] = recorded(torch.cuda.current_stream(self._device))
        return old if old != page else None

    def growth(self) -> int:
        """By how much each slot would grow, were gradients wider than planned."""
        return max(0, ring_slot_bytes(self._model, self._placements, wide=True) - self._nbytes)

    def widen(self) -> None:
        """Gradients turned out to be wider than planned; slots grow as they are used, when nobody has them."""
        self._wide = True
        self._nbytes = ring_slot_bytes(self._model, self._placements, wide=True)

    def memory(self, page: Page) -> Tensor:
        return self._slots[self._pages[page]]

    def fits(self, page: Page) -> bool:
        """Whether a page's slot is as large as it must be by now."""
        return self.takes(self._pages[page])

    def wait(self, page: Page) -> None:
        """Make the current stream come behind those who had the memory before."""
        fresh = self._fresh.get(self._pages[page])
        if fresh is not None:
            fresh.wait(torch.cuda.current_stream(self._device))

    def is_over(self, slot: int) -> bool:
        """Whether those who had a slot's memory before are done with it."""
        fresh = self._fresh.get(slot)
        return fresh is None or bool(fresh.query())

    def takes(self, slot: int) -> bool:
        """Whether a slot is as large as it must be by now."""
        return slot in self._slots and self._slots[slot].numel() >= self._nbytes

    def settle(self, slot: int) -> None:
        """Whatever a slot was used for is over, and all the more what its memory was before."""
        self._fresh.pop(slot, None)

    def resize(self, placements: tuple[Placement, ...]) -> None:
        """Other pages pass from now on. Nobody has a slot; new ones are taken when they are used."""
        self._placements = placements
        self._nbytes = ring_slot_bytes(self._model, placements, wide=self._wide)
        self._slots.clear()
        self._pages.clear()
        self._inside.clear()
        self._fresh.clear()

    def drop(self, page: Page) -> None:
        """Give a page's slot up."""
        slot = self._pages.pop(page, None)
        if slot is not None:
            self._slots.pop(slot, None)
            self._inside.pop(slot, None)
            self._fresh.pop(slot, None)
