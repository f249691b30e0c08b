"""Pages of state: their bytes on the device while they are used, and in their homes."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from overspill.program import Key, Kind
from overspill.runtime.executor import Executor, Handler
from overspill.runtime.lanes import Work, nothing
from overspill.runtime.ring import Ring
from overspill.specs import ModelSpec, PageSpec, PartSpec, align
from overspill.tiers import Slot, Tier

Home = tuple[Tier, Slot]


def arrays_bytes(page: PageSpec) -> int:
    """Of a page's arrays; what is behind them belongs to the user's optimizer."""
    return align(page.format.bytes_for(page.elements))


def arrays_of(page: PageSpec, part: PartSpec, memory: Tensor) -> list[Tensor]:
    """A part's piece of each array of its page: what is kept of the masters (if anything is), then the fields'."""
    return [
        memory[begin : begin + -(-part.numel // shared) * dtype.itemsize].view(dtype)
        for begin, (dtype, shared) in zip(offsets_of(page, part), page.format.arrays, strict=True)
    ]


def offsets_of(page: PageSpec, part: PartSpec) -> list[int]:
    """Where a part's piece of each array begins in its page: bytes."""
    found, offset = [], 0
    for dtype, shared in page.format.arrays:
        found.append(offset + part.element // shared * dtype.itemsize)
        offset += page.elements // shared * dtype.itemsize
    return found


def kept_of(page: PageSpec, part: PartSpec, memory: Tensor) -> Tensor:
    """What is kept of a part's masters: the first of its page's arrays, which may be all that `memory` has."""
    dtype = page.format.master
    assert dtype is not None, "masters are kept"
    return memory[part.element * dtype.itemsize : (part.element + part.numel) * dtype.itemsize].view(dtype)


class Copies(Protocol):
    def written(self, page: tuple[int, int], memory: Tensor) -> None: ...


class Pages:
    """All pages of one model. `homes[unit][page]` is None where they live on the device."""

    def __init__(self, model: ModelSpec, homes: Sequence[list[Home | None]], executor: Executor) -> None:
        self.model = model
        self.device = executor.lanes.device
        self._homes = homes
        self._executor = executor
        self._here: dict[tuple[int, int], Tensor] = {}
        """Pages that live on the device, and those that are there for an update."""
        self.filled: set[tuple[int, int]] = set()
        """Pages whose homes have their bytes."""
        self._left: dict[tuple[int, int], Home] = {}
        """Homes of pages that moved in."""
        self.ring = Ring(model, executor.program.placements, self.device)
        for u, unit in enumerate(model.units):
            for i, page in enumerate(unit.pages):
                nbytes = arrays_bytes(page)
                if homes[u][i] is None and nbytes:
                    self._here[u, i] = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

        self.elsewhere: Copies | None = None
        """Who else may have a copy of a page."""

    def handlers(self) -> dict[Kind, Handler]:
        return {
            Kind.STATE_FETCH: lambda op: self.fetch_into(op.slot, op.page) or (lambda: self.ring.wait(op.page)),
            Kind.STATE_STORE: lambda op: self.store_from(op.page) or nothing,
        }

    def home(self, unit: int, page: int) -> Home | None:
        return self._homes[unit][page]

    def spec(self, unit: int, page: int) -> PageSpec:
        return self.model.units[unit].pages[page]

    # --- for the update of a page

    def make(self, unit: int, page: int) -> Tensor:
        """The page's bytes on the device; zeros, if it has none yet."""
        if (unit, page) not in self._here:
            nbytes = self.spec(unit, page).state_bytes
            passing = self.home(unit, page) is not None
            if passing:
                # Nothing was fetched into its slot, which may be as new.
                self.ring.wait((unit, page))
            self._here[unit, page] = (
                self.ring.memory((unit, page))[:nbytes].zero_()
                if passing
                else torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
            )
        return self._here[unit, page]

    def move_in(self, unit: int) -> None:
        """A unit's pages live on the device from now on. Nothing is in flight."""
        for page, spec in enumerate(self.model.units[unit].pages):
            home = self.home(unit, page)
            if home is None:
                continue
            self._here.pop((unit, page), None)
            if (unit, page) in self.filled:
                memory = torch.empty(spec.state_bytes, dtype=torch.uint8, device=self.device)
                home[0].load(home[1], memory)
                self._here[unit, page] = memory
            self._left[unit, page], self._homes[unit][page] = home, None

    def move_out(self, unit: int) -> None:
        """They live where they lived before. Nothing is in flight."""
        for page in range(len(self.model.units[unit].pages)):
            home = self._left.pop((unit, page), None)
            if home is None:
                continue
            memory = self._here.pop((unit, page), None)
            if memory is not None:
                home[0].store(home[1], memory)
                self.filled.add((unit, page))
            self._homes[unit][page] = home
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def passing_bytes(self, unit: int, page: int) -> int:
        """Of the page's state, what passes through the ring."""
        return self.spec(unit, page).state_bytes if self.home(unit, page) is not None else 0

    def enter(self, slot: int, page: tuple[int, int]) -> None:
        """A page gets a slot; the page that had it before leaves."""
        old = self.ring.put(slot, page)
        if old is not None:
            self.forget(old)

    def drop(self, unit: int, page: int) -> None:
        self.ring.drop((unit, page))
        self.forget((unit, page))

    def forget(self, page: tuple[int, int]) -> None:
        """A page that lives elsewhere is not in its slot any more."""
        if self.home(*page) is not None:
            self._here.pop(page, None)

    # --- ops, and for what passes pages through the ring by itself (passage.py)

    def fetch_into(self, slot: int, page: tuple[int, int]) -> Work | None:
        """A page gets a slot; what fetches its state into it, if it has one elsewhere."""
        home = self.home(*page)
        self.enter(slot, page)
        if home is None:
            return None
        self._here.pop(page, None)
        if page not in self.filled:
            # Nothing to fetch yet; the page is made when the optimizer has made its states.
            return None
        memory = self.ring.memory(page)[: self.spec(*page).state_bytes]
        self._here[page] = memory

        def fetch() -> None:
            self.ring.wait(page)
            home[0].load(home[1], memory)

        return fetch

    def store_from(self, page: tuple[int, int]) -> Work | None:
        """What brings a page home; None: it lives here, or no parameter of it has ever had a gradient."""
        home, memory = self.home(*page), self._here.get(page)
        if home is None or memory is None:
            return None
        self.filled.add(page)
        return lambda: home[0].store(home[1], memory)

    # --- from outside, while no update of the unit is pending

    def read(self, unit: int, page: int) -> Tensor:
        """The page's bytes: its own where it lives on the device, else a copy in host memory."""
        home = self.home(unit, page)
        if home is None:
            return self.make(unit, page)
        self._executor.finish_latest(Key(Kind.STATE_STORE, unit, page))
        out = torch.zeros(self.spec(unit, page).state_bytes, dtype=torch.uint8, device="cpu")
        if (unit, page) in self.filled:
            home[0].load(home[1], out)
        return out

    def write(self, unit: int, page: int, memory: Tensor) -> None:
        """Replace the first bytes of a page, or all of them. What a home never got reads as zeros."""
        home = self.home(unit, page)
        if home is None:
            own = self.make(unit, page)
            if own.data_ptr() != memory.data_ptr():
                own[: memory.numel()].copy_(memory)
            return
        self._executor.finish_latest(Key(Kind.STATE_STORE, unit, page))
        self.filled.add((unit, page))
        home[0].store(home[1], memory)
        if self.elsewhere is not None:
            self.elsewhere.written((unit, page), memory)
        if memory.is_cuda:
            torch.cuda.current_stream(memory.device).synchronize()
