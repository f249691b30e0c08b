"""Arrays of any length in the middle of memory that belongs to others, and what becomes of them."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from overspill.kernels import codecs
from overspill.kernels.codecs import BLOCK
from overspill.kernels.elements import Elements
from tests.cpu.test_native import KINDS, calm, differing, elements, expected_in, packed, part

MOST, PLACES, STEP, NUMBER = 4097, 9, 5, 3
"""The greatest length, in how many places; the step and the number of the parameter, for chance."""
RULES = ("adamw", "amsgrad", "momentum", "adagrad")
FORMATS = ("exact", "bf16", "compact")
NAMES = {"fp32": KINDS[0], "bf16 with fp32 gradients": KINDS[1], "bf16": KINDS[2]}
OFTEN = {
    ("adamw", "exact", "bf16"),
    ("momentum", "exact", "fp32"),
    ("momentum", "bf16", "bf16 with fp32 gradients"),
    ("adagrad", "compact", "bf16"),
    ("adamw", "compact", "bf16 with fp32 gradients"),
}
"""Rules, formats and kinds that have each of these somewhere."""


class Room:
    """An array, and memory around it that belongs to others."""

    def __init__(self, array: Tensor) -> None:
        self.array = array
        count = array.nbytes + 8 * PLACES
        self.others = torch.arange(count, dtype=torch.int32, device=array.device).to(torch.uint8)

    def put(self, count: int, place: int) -> Tensor:
        """Its first elements, behind `place` others."""
        self.inside = slice(place * self.array.itemsize, (place + count) * self.array.itemsize)
        self.memory = self.others.clone()
        return self.memory[self.inside].view(self.array.dtype).copy_(self.array[:count])

    def unchanged(self) -> bool:
        """Whether all outside is what it was."""
        outside = (slice(0, self.inside.start), slice(self.inside.stop, None))
        return all(torch.equal(self.memory[each], self.others[each]) for each in outside)


class Rooms:
    """One for each array of elements."""

    def __init__(self, on: Elements) -> None:
        self.on = on
        self.weight, self.gradient = Room(on.weight), Room(on.gradient)
        self.kept = None if on.kept is None else Room(on.kept)
        self.arrays = [Room(array) for array in on.arrays]

    def put(self, count: int, place: int) -> Elements:
        sizes = (count, codecs.blocks_of(count)) if self.on.format == "compact" else (count,)
        arrays = [room.put(size, place) for room, size in zip(self.arrays, itertools.cycle(sizes), strict=False)]
        kept = None if self.kept is None else self.kept.put(count, place)
        weight, gradient = self.weight.put(count, place), self.gradient.put(count, place)
        return replace(self.on, weight=weight, kept=kept, gradient=gradient, arrays=arrays)

    def unchanged(self) -> bool:
        rooms = [self.weight, self.gradient, *self.arrays, *(() if self.kept is None else (self.kept,))]
        return all(room.unchanged() for room in rooms)


def some(rule: str, format: str, kinds: str) -> Elements:
    """As many as there are at most."""
    on = elements(rule, MOST, NAMES[kinds])
    if format != "exact":
        on = packed(rule, calm(on) if format == "compact" else on, format)
    return on


def known(rule: str, on: Elements) -> Sequence[Elements]:
    """What becomes of them, by how many elements the last block has beyond full ones: what is behind those is zero, as
    far as a block is concerned."""
    found = [expected_in(rule, on, STEP, NUMBER)]
    for count in range(1, BLOCK if on.format == "compact" else 1):
        some = part(on, 0, on.weight.numel())
        for array in (some.weight, some.gradient, *some.fields, *(() if some.kept is None else (some.kept,))):
            array.masked_fill_(torch.arange(array.numel()) % BLOCK >= count, 0)
        found.append(expected_in(rule, some, STEP, NUMBER))
    return found


def check(
    rule: str, rooms: Rooms, results: Sequence[Elements], lengths: Sequence[int], update: Callable[[Elements], None]
) -> None:
    """Each length at another place: the bits of `known`, and nothing outside is read into the result or written."""
    for length in lengths:
        found = rooms.put(length, length % PLACES)
        update(found)
        rest = length % BLOCK if found.format == "compact" else 0
        for begin, end, result in ((0, length - rest, results[0]), (length - rest, length, results[rest])):
            assert differing(part(found, begin, end), part(result, begin, end), rule) == [], length
        assert rooms.unchanged(), length
