"""The rules in one kernel give the bits of the reference with an IEEE root on the CPU, in every format of states."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import overspill
from overspill.kernels import codecs, executors
from overspill.kernels.elements import Addresses, Elements
from overspill.kernels.reference import ieee_root, rule_of
from tests import lengths, small
from tests.cpu.test_native import KINDS, RULES, calm, elements, expected, expected_in, packed
from tests.cpu.test_native import differing as unlike
from tests.gpu.where import DEVICE, INTERPRETED, fewer, kernels, moved
from tests.places import PLACES, prepare_tight
from tests.reference import Recipe, differing, train, weights

pytestmark = pytest.mark.gpu
NUMBER = 3
"""Of the parameter, for chance."""


def same(on: Elements) -> Elements:
    return on


def on_gpu(rule: str, on: Elements, step: int) -> Elements:
    from overspill.kernels import gpu

    name, _, hypers = RULES[rule]
    found = moved(replace(on, key=codecs.key_of(NUMBER, step)), DEVICE)
    gpu.RULES[name](found, hypers, step)
    return moved(found, "cpu")


@kernels
@pytest.mark.parametrize("kinds", KINDS, ids=["fp32", "bf16 with fp32 gradients", "bf16"])
@pytest.mark.parametrize("format", ["exact", "bf16", "compact"])
@pytest.mark.parametrize("rule", RULES)
def test_the_bits_of_the_reference(rule: str, format: str, kinds: tuple[torch.dtype, torch.dtype]) -> None:
    for count, change in ((0, same), (129, same), (20011, same), (20000, same), (20000, same), (20011, calm)):
        on = change(elements(rule, fewer(count), kinds))
        on = on if format == "exact" else packed(rule, on, format)
        for step in (1, 7):
            known = expected(rule, on, step) if format == "exact" else expected_in(rule, on, step, NUMBER)
            assert unlike(on_gpu(rule, on, step), known, rule) == [], (count, step)


def addresses(on: Elements) -> Addresses:
    return Addresses(
        on.weight.data_ptr(),
        None if on.kept is None else on.kept.data_ptr(),
        on.gradient.data_ptr(),
        tuple(f.data_ptr() for f in on.factors),
        tuple(a.data_ptr() for a in on.arrays),
        on.weight.numel(),
        (on.weight.dtype, None if on.kept is None else on.kept.dtype, on.gradient.dtype),
        on.format,
        on.first,
        on.key,
        None if on.skip is None else on.skip.data_ptr(),
    )


@pytest.mark.parametrize("kinds", KINDS, ids=["fp32", "bf16 with fp32 gradients", "bf16"])
@pytest.mark.parametrize("format", ["exact", "bf16", "compact"])
@pytest.mark.parametrize("rule", RULES)
def test_by_addresses_alone(rule: str, format: str, kinds: tuple[torch.dtype, torch.dtype]) -> None:
    """Where such a kernel was launched before, and everything is at a multiple of 16: the same bits."""
    from overspill.kernels import gpu

    name, _, hypers = RULES[rule]
    for count, step in ((20000, 1), (20000, 7), (20011, 7)):
        on = elements(rule, count, kinds)
        on = on if format == "exact" else packed(rule, on, format)
        # Chance is of the element's number; the kernels that are launched so take those of 31 bits, odd ones too.
        on = replace(on, first=(1 << 31) - 30001)
        known = on_gpu(rule, on, step)
        there = moved(replace(on, key=codecs.key_of(NUMBER, step)), DEVICE)
        assert gpu.QUICK[name](addresses(there), hypers, step) == (count % 16 == 0)
        torch.cuda.synchronize()
        if count % 16 == 0:
            assert unlike(moved(there, "cpu"), known, rule) == []
    at = addresses(there)._replace(numel=20000)
    odd = at._replace(gradient=at.gradient + there.gradient.itemsize)
    assert not gpu.QUICK[name](odd, hypers, step), "an odd place"
    assert not gpu.QUICK[name](at._replace(first=1 << 31), hypers, step), "a number of more bits"


@kernels
@pytest.mark.parametrize("format", ["exact", "bf16", "compact"])
@pytest.mark.parametrize("rule", RULES)
def test_what_is_skipped_stays(rule: str, format: str) -> None:
    """By a number on the device, also where a kernel is launched by addresses; not where that is zero, or missing."""
    from overspill.kernels import gpu

    name, _, hypers = RULES[rule]
    for count in map(fewer, (20000, 20011)):
        on = elements(rule, count, (torch.bfloat16, torch.bfloat16))
        on = on if format == "exact" else packed(rule, on, format)
        known = on_gpu(rule, on, 7)
        assert unlike(known, on, rule) != []
        for skip, then in ((0.0, known), (1.0, on)):
            assert unlike(on_gpu(rule, replace(on, skip=torch.tensor(skip)), 7), then, rule) == [], (count, skip)
            there = moved(replace(on, key=codecs.key_of(NUMBER, 7), skip=torch.tensor(skip)), DEVICE)
            if gpu.QUICK[name](addresses(there), hypers, 7):
                assert unlike(moved(there, "cpu"), then, rule) == [], (count, skip)
            else:
                assert INTERPRETED or count % 16 or max(on.first, count) >= 1 << 31


@kernels
def test_a_negative_zero_stays_one() -> None:
    """Of a momentum whose code is that of nothing below zero."""
    from overspill.kernels import gpu

    hypers = {"lr": 0.01, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": True}
    arrays = [torch.zeros(128, dtype=torch.int8).view(torch.uint8), torch.zeros(1, dtype=torch.uint8)]
    on = Elements(torch.ones(128), None, torch.zeros(128), (), arrays, "compact")
    there = moved(on, DEVICE)
    rule = rule_of(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01, momentum=0.9, maximize=True))
    for step in (1, 2):
        here, there = replace(on, key=codecs.key_of(NUMBER, step)), replace(there, key=codecs.key_of(NUMBER, step))
        executors.in_torch(rule, ieee_root, replace(here, gradient=torch.zeros(128)), hypers, step)
        gpu.RULES["sgd"](there, hypers, step)
        assert arrays[0].tolist() == there.arrays[0].tolist(), step


def lengths_for(case: tuple[str, str, str]) -> Sequence[int]:
    """All where a GPU runs them, for the cases that have everything somewhere; else some of all sizes, and those at the
    edges of a block of codes and of a kernel's block."""
    if not INTERPRETED and case in lengths.OFTEN:
        return range(lengths.MOST + 1)
    edges = {n for block in (128, 1024, 4096) for n in (block - 1, block, block + 1)}
    return sorted(edges | set(range(0, lengths.MOST, 991 if INTERPRETED else 37)) | {1, 2, 15, 16, 17})


@kernels
@pytest.mark.parametrize("kinds", lengths.NAMES)
@pytest.mark.parametrize("format", lengths.FORMATS)
@pytest.mark.parametrize("rule", lengths.RULES)
def test_every_length_at_odd_places(rule: str, format: str, kinds: str) -> None:
    from overspill.kernels import gpu

    on, (name, _, hypers) = lengths.some(rule, format, kinds), RULES[rule]
    results = [moved(each, DEVICE) for each in lengths.known(rule, on)]
    rooms = lengths.Rooms(moved(replace(on, key=codecs.key_of(lengths.NUMBER, lengths.STEP)), DEVICE))

    def update(found: Elements) -> None:
        gpu.RULES[name](found, hypers, lengths.STEP)

    lengths.check(rule, rooms, results, lengths_for((rule, format, kinds)), update)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("states", ["bf16", "compact"])
def test_states_give_the_same_bits_wherever_they_live(states: str, precision: str, tmp_path: Path) -> None:
    found = []
    for place in ("device", "host", "mixed", "nvme"):
        model = small.build()
        keywords = {"precision": precision, "states": states, "micro_batches": 2}
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        model, optimizer = prepare_tight(model, optimizer, PLACES[place], tmp_path, **keywords)
        losses = train(model, optimizer, small.batches(), Recipe(6, 2, clip=2.5), small.loss_of)
        found.append((losses, weights(overspill.close(model))))
    for losses, values in found[1:]:
        assert losses == found[0][0]
        assert differing(values, found[0][1]) == []
