"""Native kernels at every length from 0 to 4,097, each at another place in memory: the bits of plain torch, and nothing
outside is read into the result or written."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from overspill.kernels import codecs, cpu, executors
from overspill.kernels.cpu import How
from overspill.kernels.elements import Elements
from overspill.kernels.reference import ieee_root, rule_of
from tests import lengths
from tests.cpu.test_native import KINDS, NATIVE, RULES, _same, differing, elements, packed, part

pytestmark = NATIVE


def cases() -> list[Any]:
    """Some of them with every change, on the widest instructions."""
    found = []
    for case in itertools.product(lengths.RULES, lengths.FORMATS, lengths.NAMES, cpu.sets()):
        often = case[:3] in lengths.OFTEN and case[3] == cpu.sets()[-1]
        found.append(pytest.param(*case, marks=() if often else pytest.mark.full))
    return found


@pytest.mark.parametrize(("rule", "format", "kinds", "instructions"), cases())
def test_every_length_at_odd_places(rule: str, format: str, kinds: str, instructions: str) -> None:
    on = lengths.some(rule, format, kinds)
    rooms, how = lengths.Rooms(replace(on, key=codecs.key_of(lengths.NUMBER, lengths.STEP))), How(instructions, 1)
    name, _, hypers = RULES[rule]

    def update(found: Elements) -> None:
        cpu.RULES[name](found, hypers, lengths.STEP, how)

    lengths.check(rule, rooms, lengths.known(rule, on), range(lengths.MOST + 1), update)


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
        executor.run(ours, RULES["adamw"][2], lengths.STEP)
        executors.in_torch(rule, ieee_root, theirs, RULES["adamw"][2], lengths.STEP)
        assert differing(replace(ours, kept=None), replace(theirs, kept=None), "adamw") == [], length
        assert ours.kept is not None and theirs.kept is not None and _same(ours.kept, theirs.kept), length
