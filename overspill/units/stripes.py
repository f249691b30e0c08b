"""Divides a unit's flat buffer over ranks.

Note [Stripes]: collectives work on stripes of constant size, however large a unit is. Rank r has the r-th piece of
every stripe, so what arrives or leaves with a stripe is spread evenly over the ranks, and their links. A stripe has one
dtype, and is trained as a whole or frozen as a whole: gradients are summed as one array, and states are spread evenly.
Padding is at the end of a dtype's last stripe only. Where an optimizer needs whole parameters, pieces are runs of whole
parameters, the largest given first to the rank that has least, and no two pieces need be alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from overspill.specs import ALIGNMENT, BLOCK, STRIPE, Sharding, Span, Stripe, align


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter, as far as its place in a flat buffer is concerned."""

    dtype: torch.dtype
    numel: int
    trainable: bool

    @property
    def room(self) -> int:
        return align(self.numel * self.dtype.itemsize)


def arrange(members: Sequence[Member], sharding: Sharding) -> tuple[list[int], tuple[Stripe, ...]]:
    """The offset of every member in the flat buffer, and the buffer's stripes."""
    offsets, stripes, begin = [0] * len(members), list[Stripe](), 0
    for trainable, dtype in dict.fromkeys((m.trainable, m.dtype) for m in members):
        group = [i for i, m in enumerate(members) if (m.trainable, m.dtype) == (trainable, dtype)]
        if sharding.whole and sharding.zero and sharding.size > 1:
            bounds = _packed(members, group, sharding.size, begin, offsets)
        else:
            for i, offset in zip(group, accumulate((members[i].room for i in group), initial=begin), strict=False):
                offsets[i] = offset
            bounds = _even(sum(members[i].room for i in group), sharding.size, begin)
        stripes += [Stripe(dtype, b, trainable) for b in bounds]
        begin = bounds[-1][-1] if bounds else begin
    return offsets, tuple(stripes)


def _even(total: int, size: int, begin: int) -> list[tuple[int, ...]]:
    """Bounds of stripes of `size` equal pieces each."""
    full = max(STRIPE // size // BLOCK * BLOCK, BLOCK)
    found = []
    while total > 0:
        piece = full if total > full * size else align(-(-total // size), ALIGNMENT)
        found.append(tuple(begin + r * piece for r in range(size + 1)))
        begin, total = begin + piece * size, total - piece * size
    return found


def _packed(
    members: Sequence[Member], group: Sequence[int], size: int, begin: int, offsets: list[int]
) -> list[tuple[int, ...]]:
    """Bounds of stripes whose pieces are whole members; writes the members' offsets."""
    found, taken = [], [0] * size
    for batch in _batches(members, group):
        ranks: list[list[int]] = [[] for _ in range(size)]
        for i in sorted(batch, key=lambda i: -members[i].room):
            least = min(range(size), key=lambda r: taken[r])
            ranks[least].append(i)
            taken[least] += members[i].room
        rooms = [sum(members[i].room for i in of) for of in ranks]
        bounds = tuple(accumulate(rooms, initial=begin))
        for of, first in zip(ranks, bounds, strict=False):
            for i in of:
                offsets[i], first = first, first + members[i].room
        begin = bounds[-1]
        if bounds[-1] > bounds[0]:
            found.append(bounds)
    return found


def _batches(members: Sequence[Member], group: Sequence[int]) -> list[list[int]]:
    """Runs of members of about a stripe each; a member that is larger makes a larger one."""
    found: list[list[int]] = []
    room = STRIPE
    for i in group:
        if room + members[i].room > STRIPE:
            found.append([])
            room = 0
        found[-1].append(i)
        room += members[i].room
    return found


def owned(member: Member, offset: int, stripes: Sequence[Stripe], sharding: Sharding) -> Span:
    """The elements of a member that this rank updates."""
    if not sharding.split("state") or sharding.size == 1:
        return Span(((0, member.numel),))
    if member.numel == 0:
        return Span(((0, 0),) if sharding.rank == 0 else ())
    return Span(_inside(offset, member, [s.piece(sharding.rank) for s in stripes]))


def _inside(offset: int, member: Member, pieces: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The elements that lie in `pieces` of the flat buffer; neighbours are one range."""
    item, last = member.dtype.itemsize, offset + member.numel * member.dtype.itemsize
    found: list[tuple[int, int]] = []
    for begin, end in pieces:
        low, high = max(begin, offset), min(end, last)
        if low >= high:
            continue
        low, high = (low - offset) // item, (high - offset) // item
        if found and found[-1][1] == low:
            low = found.pop()[0]
        found.append((low, high))
    return tuple(found)


def share(stripes: Sequence[Stripe], sharding: Sharding) -> tuple[tuple[int, int], ...]:
    """What this rank's home holds of the flat buffer."""
    whole = ((0, stripes[-1].end),) if stripes else ()
    if not sharding.split("weight"):
        return whole
    found = (stripe.piece(sharding.rank) for stripe in stripes)
    return tuple((begin, end) for begin, end in found if end > begin)
