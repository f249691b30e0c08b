"""Which slots of the ring are free, and those that are lent to it. See loans.py."""

from collections import deque

from overspill.program import Program
from overspill.runtime.loans import Loans
from overspill.runtime.ring import Ring
from overspill.runtime.rooms import bytes_in_rooms

FIRST_LENT = 1 << 20
"""Numbers of slots that are lent are above this."""
ASKED = 4
"""Slots that are asked for at a time."""


class Slots:
    """One thread's: see pager.py."""

    def __init__(self, ring: Ring, loans: Loans, depth: int) -> None:
        self._ring = ring
        self.loans = loans
        self.depth = depth
        """How many are the ring's own."""
        self._free = deque(range(depth))
        self._lent: dict[int, int] = {}
        """Slots that are lent: how large they are."""
        self._fresh: deque[int] = deque()
        """Of these, those that the model may still use for what it did before."""
        self._unused: deque[int] = deque()
        """Of these, those that are free."""
        self._next = FIRST_LENT

    def __len__(self) -> int:
        """Those that are the ring's own, and free."""
        return len(self._free)

    def left(self) -> int:
        """How many pages could come now or soon."""
        lent = len(self._unused) + len(self._fresh)
        return len(self._free) + lent + self.loans.room() // max(self._ring.slot_bytes, 1)

    def take(self, lent: bool) -> int | None:
        """One that is free now, or lent and free; None: there is none."""
        found = self._unused if lent and self._unused else self._free
        return found.popleft() if found else None

    def can_follow(self, slot: int) -> bool:
        """Whether the next page can go into a slot as soon as the one before is home."""
        return slot not in self._lent and self._ring.takes(slot)

    def ask(self) -> bool:
        """Ask for slots to be lent; whether there are more that are free now. A page that waited for one would hold up
        all that come behind it, so a slot counts as free when the model is past what it used the memory for."""
        nbytes = self._ring.slot_bytes
        while len(self._fresh) < ASKED and self.loans.take(nbytes):
            self._next += 1
            if not self._ring.take(self._next, self.loans.stream):
                self.loans.end("the device has no hole for one more")
                break
            self._lent[self._next] = nbytes
            self._fresh.append(self._next)
        before = len(self._unused)
        while self._fresh and self._ring.is_over(self._fresh[0]):
            self._unused.append(self._fresh.popleft())
        return len(self._unused) > before

    def give_back(self) -> None:
        """What is lent, and not used."""
        for slots in (self._fresh, self._unused):
            while slots:
                self.release(slots.popleft())

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
        assert not self._lent, "slots are still lent"
        self.depth = program.limits.depth
        self._free = deque(range(self.depth))
        self._ring.resize(program.placements)
        self.loans.allow(bytes_in_rooms(program.model.units, program.placements), program.limits.lent)
