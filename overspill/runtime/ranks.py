"""Keeps the ranks in step: before a rank takes part in a collective, all of them agree that it is the next one.

Note [Offers]: collectives need every rank, in the same order. So each rank offers what it is about to do, and sees what
the others offer. Mostly all offers are alike. If they are not (a rank does not use a unit, or uses it earlier), the
first of what was offered is chosen, all ranks take part in it, whether they asked for it or not, and offer again. What
needs all ranks to want it, as a step, is refused when one is elsewhere, with a message that says who is where.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from overspill.errors import RankError
from overspill.program import Kind, Op

if TYPE_CHECKING:
    from overspill.comm import Comm


class Meeting(IntEnum):
    """What ranks do together, the most urgent first. Up to OVER, a rank that is elsewhere can take part."""

    GATHER = 0
    REDUCE = 1
    GRADIENT = 2
    MASTER = 3
    STATE = 4
    BUFFERS = 5
    OVER = 6
    BROKEN = 7
    NORM = 8
    STEP = 9
    SAVE = 10
    LOAD = 11
    CLOSE = 12


WORDS = {
    Meeting.GATHER: "the weights of {}",
    Meeting.REDUCE: "the backward of {}",
    Meeting.GRADIENT: "a look at a gradient of {}",
    Meeting.MASTER: "a look at the weights of {}",
    Meeting.STATE: "a look at the optimizer's state of {}",
    Meeting.BUFFERS: "the begin of a forward",
    Meeting.OVER: "the end of a backward",
    Meeting.BROKEN: "a forward after a backward that an error broke off",
    Meeting.NORM: "the norm of the gradients",
    Meeting.STEP: "optimizer.step()",
    Meeting.SAVE: "a save",
    Meeting.LOAD: "a load",
    Meeting.CLOSE: "overspill.close()",
}
MOST = 6
"""Points that are offered at a time."""
OF_OPS = {Kind.GATHER: Meeting.GATHER, Kind.REDUCE: Meeting.REDUCE}


class Point(NamedTuple):
    """One thing to do together."""

    kind: Meeting
    unit: int = 0
    item: int = 0
    """What else must be alike. Of two gradients that are reduced, the wider."""

    def same(self, other: Point) -> bool:
        return self[:2] == other[:2]


class Ranks:
    """What one engine knows of the other ranks. `joins` says how to take part in what others chose."""

    def __init__(self, comm: Comm, names: Sequence[str]) -> None:
        self.comm = comm
        self._names = names
        self.joins: dict[Meeting, Callable[[Point], None]] = {}
        self.width: Callable[[int], int] = lambda unit: 1
        """How wide a unit's gradients are here: 0 wide, 1 narrow."""
        self.widen: Callable[[int, int], None] = lambda unit, width: None
        self.held: Callable[[], frozenset[int]] = frozenset
        """Units that must not leave the device now."""
        self.phase: Callable[[], str] = lambda: "training"

    def points(self, ops: Sequence[Op]) -> tuple[Point, ...]:
        """What these ops do together with other ranks."""
        found = ((OF_OPS[op.kind], op.unit) for op in ops if op.kind in OF_OPS)
        return tuple(Point(kind, u, self.width(u) if kind == Meeting.REDUCE else 0) for kind, u in found)

    def settled(self, point: Point) -> None:
        """All ranks do this next, in this form."""
        if point.kind == Meeting.REDUCE:
            self.widen(point.unit, point.item)

    def choose(self, mine: tuple[Point, ...]) -> Point | None:
        """None if all ranks offer the same; else what is done first. See Note [Offers]."""
        where = f"{self._words(mine[0])} in {self.phase()}"
        if len(mine) > MOST:
            # What comes later counts too, but not in full.
            rest = zlib.crc32(repr(mine[MOST:]).encode())
            mine = (*mine[:MOST], Point(mine[MOST].kind, rest, len(mine)))
        flat = [x for point in mine for x in point]
        offers = [_points(values) for values in self.comm.meet(flat, where)]
        if all(offer == mine for offer in offers):
            return None
        chosen = min((offer[0] for offer in offers), key=_urgency)
        if chosen.kind > Meeting.OVER:
            raise RankError(self._apart(offers))
        return chosen

    def agree(self, offer: Callable[[], tuple[Point, ...]]) -> bool:
        """Come together at a point that is no op, helping the others to get there. Whether all were there to meet."""
        while mine := offer():
            chosen = self.choose(mine)
            if chosen is None or mine == (chosen,):
                return chosen is None
            self.joins[chosen.kind](chosen)
        return False

    def meet(self, kind: Meeting, unit: int = 0, item: int = 0) -> None:
        self.agree(lambda: (Point(kind, unit, item),))

    def _words(self, point: Point) -> str:
        unit = self._names[point.unit] if point.unit < len(self._names) else point.unit
        return WORDS[point.kind].format(f"unit {unit}")

    def _apart(self, offers: Sequence[tuple[Point, ...]]) -> str:
        places = [self._words(offer[0]) for offer in offers]
        found = ", ".join(f"rank {r} at {p}" for r, p in zip(self.comm.world_ranks, places, strict=True))
        if len(set(places)) > 1:
            return (
                f"expected all ranks to come to the same place, found {found}; make the same calls, and as many steps, "
                "on every rank: a loader that ends earlier on one of them is a common cause"
            )
        return (
            f"expected the same on all ranks at {places[0]} ({self.phase()}), found that it is not: gradients or "
            "arguments are there on some and not on others, or learning rates differ; do the same to gradients, states "
            "and hyperparameters on every rank"
        )


def _urgency(point: Point) -> tuple[int, int, int]:
    """What comes first is least. Backward passes come to the last units first: who is further on waits for the others,
    and they reduce the unit together."""
    return point.kind, -point.unit if point.kind == Meeting.REDUCE else point.unit, point.item


def _points(values: Sequence[int]) -> tuple[Point, ...]:
    return tuple(Point(Meeting(values[i]), values[i + 1], values[i + 2]) for i in range(0, len(values), 3))
