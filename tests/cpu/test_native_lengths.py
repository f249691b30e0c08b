"""Native kernels at every length from 0 to 4,097, each at another place in memory: the bits of plain torch, and nothing
outside is read into the result or written."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from overspill.kernels import codecs, cpu, executors
from overspill.kernels.codecs import BLOCK
from overspill.kernels.cpu import How
from overspill.kernels.elements import Elements
from overspill.kernels.reference import ieee_root, rule_of
from tests.cpu.test_native import KINDS, NATIVE, RULES, _same, calm, differing, elements, expected_in, packed, part

pytestmark = NATIVE

MOST, PLACES, STEP, NUMBER = 4097, 9, 5, 3
"""The greatest length, in how many places; the step and the number of the parameter, for chance."""
NAMES = {"fp32": KINDS[0], "bf16 with fp32 gradients": KINDS[1], "bf16": KINDS[2]}
OFTEN = {
    ("adamw", "exact", "bf16"),
    ("momentum", "exact", "fp32"),
    ("momentum", "bf16", "bf16 with fp32 gradients"),
    ("adagrad", "compact", "bf16"),
    ("adamw", "compact", "bf16 with fp32 gradients"),
}
"""What is tested with every change, on the widest instructions."""


def cases() -> list[Any]:
    rules = ("adamw", "amsgrad", "momentum", "adagrad")
    found = []
    for case in itertools.product(rules, ("exact", "bf16", "compact"), NAMES, cpu.sets()):
        often = case[:3] in OFTEN and case[3] == cpu.sets()[-1]
        found.append(pytest.param(*case, marks=() if often else pytest.mark.full))
    return found


class Room:
    """An array, and memory around it that belongs to others."""

    def __init__(self, array: Tensor) -> None:
        self.array = array
        self.others = torch.arange(array.nbytes + 8 * PLACES, dtype=torch.int32).to(torch.uint8)

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


@pytest.mark.parametrize(("rule", "format", "kinds", "instructions"), cases())
def test_every_length_at_odd_places(rule: str, format: str, kinds: str, instructions: str) -> None:
    on = elements(rule, MOST, NAMES[kinds])
    if format != "exact":
        on = packed(rule, calm(on) if format == "compact" else on, format)
    results, rooms = known(rule, on), Rooms(replace(on, key=codecs.key_of(NUMBER, STEP)))
    name, _, hypers = RULES[rule]
    for length in range(MOST + 1):
        found = rooms.put(length, length % PLACES)
        cpu.RULES[name](found, hypers, STEP, How(instructions, 1))
        rest = length % BLOCK if format == "compact" else 0
        for begin, end, result in ((0, length - rest, results[0]), (length - rest, length, results[rest])):
            assert differing(part(found, begin, end), part(result, begin, end), rule) == [], length
        assert rooms.unchanged(), length


@pytest.mark.parametrize("format", ["bf16", "compact"])
def test_fp16_weights_are_updated_by_plain_torch(format: str) -> None:
    """The library has no kernel for them."""
    rule = rule_of(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]))
    assert rule is not None
    executor = executors.executor_for(rule, torch.device("cpu"), format)
    for length in (0, 1, 127, 129, 4097):
        own = packed("adamw", elements("adamw", length, KINDS[0]), format)
        on = replace(own, weight=own.weight.half(), kept=own.weight, factors=())
        assert not cpu.takes(on)
        ours, theirs = part(on, 0, length), part(on, 0, length)
        executor.run(ours, RULES["adamw"][2], STEP)
        executors.in_torch(rule, ieee_root, theirs, RULES["adamw"][2], STEP)
        assert differing(replace(ours, kept=None), replace(theirs, kept=None), "adamw") == [], length
        assert ours.kept is not None and theirs.kept is not None and _same(ours.kept, theirs.kept), length
