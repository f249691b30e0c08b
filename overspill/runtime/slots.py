"""Which slots of the ring are free, and those that are lent to it. See loans.py."""

from collections import deque

from overspill.program import Program
from overspill.runtime.loans import Loans
from overspill.runtime.ring import Ring

FIRST_LENT = 1 << 20
"""Numbers of slots that are lent are above this."""


class Slots:
    """One thread's: see pager.py."""

    def __init__(self, ring: Ring, loans: Loans, depth: int) -> None:
        self._ring = ring
        self.loans = loans
        self._free = deque(range(depth))
        self._lent: dict[int, int] = {}
        """Slots that are lent: how large they are."""
        self._next = FIRST_LENT

    def __len__(self) -> int:
        """Those that are the ring's own, and free."""
        return len(self._free)

    def left(self) -> int:
        """How many pages could come now."""
        return len(self._free) + self.loans.room() // max(self._ring.slot_bytes, 1)

    def take(self, lend: bool) -> int | None:
        """One that is free now, or lent; None: there is none."""
        if self._free:
            return self._free.popleft()
        nbytes = self._ring.slot_bytes
        if not lend or not self.loans.take(nbytes):
            return None
        self._next += 1
        if not self._ring.take(self._next, self.loans.stream):
            self.loans.end("the device has no hole for one more")
            return None
        self._lent[self._next] = nbytes
        return self._next

    def release(self, slot: int) -> None:
        """Nobody uses it any more."""
        if slot not in self._lent:
            self._ring.settle(slot)
            self._free.append(slot)
            return
        self._ring.give_back(slot)
        self.loans.give_back(self._lent.pop(slot))

    def resize(self, program: Program) -> None:
        """As many as its limits say, all of them free."""
        self._free = deque(range(program.limits.depth))
        self._ring.resize(program.placements)
        self.loans.allow(program.model.units, program.placements, program.limits.lent)
