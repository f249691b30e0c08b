"""State formats over their whole input space: what is lost, what never is, and what chance makes of it on average."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from overspill.kernels import codecs, cpu, executors, reference
from overspill.kernels.codecs import BLOCK
from overspill.kernels.elements import Elements

CPU = torch.device("cpu")
SOME = [0x8000, *(pytest.param(lower, marks=pytest.mark.full) for lower in (0, 1, 0xFFFF))]
"""Lower halves."""
UPPER = torch.arange(1 << 16, dtype=torch.int32) << 16
"""The upper halves of all fp32 numbers."""
TOP = 0.999999


def floats(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def noise(count: int, seed: int = 0) -> Tensor:
    return codecs.chance(0, count, codecs.key_of(seed, 1), CPU)[0]


def same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


NOISES = {"least": 0, "some": 0x5A5A5A5A, "most": 0xFFFFFFFF}


@pytest.fixture(params=["some", *(pytest.param(name, marks=pytest.mark.full) for name in ("least", "most"))])
def fixed(request: pytest.FixtureRequest) -> int:
    return NOISES[request.param]


# --- chance


def test_chance_depends_on_the_place_alone() -> None:
    whole = codecs.chance(0, 5000, codecs.key_of(7, 3), CPU)
    for begin, count in ((0, 1), (1234, 77), (4999, 1)):
        for all_, part in zip(whole, codecs.chance(begin, count, codecs.key_of(7, 3), CPU), strict=True):
            assert torch.equal(all_[begin : begin + count], part)
    others = [
        codecs.chance(0, 5000, codecs.key_of(8, 3), CPU),
        codecs.chance(0, 5000, codecs.key_of(7, 4), CPU),
        codecs.chance(1 << 32, 5000, codecs.key_of(7, 3), CPU),
    ]
    for other in (*others, (whole[1], whole[0])):
        assert (other[0] == whole[0]).sum() < 5


def test_chance_is_even_and_independent() -> None:
    """Every bit is set in half of all cases, and no two of them agree more often than that: of the same element and of
    its neighbours, in this step and the next."""
    count = 1 << 17
    bits = []
    for step in (1, 2):
        for found in codecs.chance(0, count, codecs.key_of(0, step), CPU):
            assert int(found.min()) >= 0 and int(found.max()) < 1 << 32
            bits += [(found >> i) & 1 for i in range(32)]
    bits += [b.roll(1) for b in bits[:64]]
    signs = torch.stack(bits).double() * 2 - 1
    means = signs.mean(1).abs()
    agree = (signs @ signs.T / count).fill_diagonal_(0).abs()
    bound = 6 / math.sqrt(count)
    assert means.max() < bound and agree.max() < bound


# --- bf16


@pytest.mark.parametrize("lower", [0, 1, 0x7FFF, 0x8000, 0xFFFF])
def test_bf16_moments_lie_beside_their_values(lower: int, fixed: int) -> None:
    x = floats(UPPER | lower)
    found = codecs.to_bf16(x, torch.full((1 << 16,), fixed)).float()
    finite = x.isfinite() & found.isfinite()
    assert same(found[~x.isfinite()], x[~x.isfinite()])
    normal = finite & (x.abs() >= 2.0**-126)
    assert ((found - x).abs()[normal] <= x.abs()[normal] * 2.0**-7).all()
    if lower == 0:
        assert same(found, x), "what bf16 has stays"


# --- 8-bit remainders


@pytest.mark.parametrize("last", [0, 0x80, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 0x7F, 0xFF))])
def test_masters_keep_24_bits(last: int, fixed: int) -> None:
    """All upper 24 bits: what is kept is exact where the last 8 are zero, else within one of the 24th."""
    for middle in range(0, 1 << 16, 1 << 8):
        x = floats(UPPER | middle | last)
        weight, rest = codecs.split8(x, torch.full((1 << 16,), fixed))
        found = codecs.join8(weight, rest)
        bits, kept = x.view(torch.int32).to(torch.int64), found.view(torch.int32).to(torch.int64)
        number = ~x.isnan()
        assert (found.isnan() == x.isnan()).all()
        assert ((kept - bits)[number].abs() < 256).all() and (kept[number] & 0xFF == 0).all()
        if last == 0:
            assert torch.equal(kept[number], bits[number])
        # The weight is the master rounded half up, as it always is.
        half = ((kept + 0x8000) >> 16).to(torch.int32).to(torch.int16).view(torch.bfloat16)
        assert same(weight[number], half[number])


# --- 8-bit moments


def per_block(x: Tensor, other: float) -> Tensor:
    """Each element in a block of its own, beside others."""
    blocks = torch.full((x.numel(), BLOCK), other)
    blocks[:, 5] = x
    return blocks.flatten()


@pytest.mark.parametrize("lower", SOME)
def test_first_moments_alone_in_their_blocks(lower: int, fixed: int) -> None:
    x = floats(UPPER | lower)
    code, top = codecs.encode_first(per_block(x, 0.0), torch.full((BLOCK << 16,), fixed))
    found = codecs.decode_first(code, top).view(-1, BLOCK)
    assert (found[:, [i for i in range(BLOCK) if i != 5]] == 0).all()
    mine = found[:, 5]
    finite = x.isfinite() & mine.isfinite()
    assert (mine.isnan() == x.isnan()).all() and same(mine[x.isinf()], x[x.isinf()])
    normal = finite & (x.abs() >= 2.0**-120)
    assert ((mine - x).abs()[normal] <= x.abs()[normal] / 16).all()
    assert (mine.abs()[finite & ~normal] <= 2.0**-119).all()
    assert (mine.sign() * x.sign() >= 0)[finite].all()


@pytest.mark.parametrize("lower", SOME)
def test_second_moments_alone_in_their_blocks(lower: int, fixed: int) -> None:
    x = floats((UPPER & 0x7FFFFFFF) | lower)[: 1 << 15]
    code, top = codecs.encode_second(per_block(x, 0.0), torch.full((BLOCK << 15,), fixed))
    found = codecs.decode_second(code, top).view(-1, BLOCK)
    assert (found[:, [i for i in range(BLOCK) if i != 5]] == 0).all()
    mine = found[:, 5]
    assert (mine.isnan() == x.isnan()).all() and same(mine[x.isinf()], x[x.isinf()])
    normal = x.isfinite() & mine.isfinite() & (x >= 2.0**-90)
    assert ((mine - x).abs()[normal] <= x[normal] / 8).all() and (mine[normal] > 0).all()


def beside_one(smallest: float, least: int) -> Tensor:
    """Numbers from 2^least to 1, the smallest of a range among them, and those next to it."""
    edge = torch.tensor(smallest).view(torch.int32) + torch.arange(-2, 3, dtype=torch.int32)
    return torch.cat([torch.logspace(least, 0, 5000, 2.0) * TOP, edge.view(torch.float32)])


def test_first_moments_beside_larger_ones(fixed: int) -> None:
    """Down to 2^-7 of the largest (17/16 of that is the smallest number, where the largest is a power of two) to a
    sixteenth; what is smaller is the smallest number or zero."""
    smallest = 2.0**-7 * 17 / 16
    x = beside_one(smallest, -14)
    x = torch.cat([x, -x])
    code, top = codecs.encode_first(per_block(x, 1.0), torch.full((BLOCK * x.numel(),), fixed))
    found = codecs.decode_first(code, top).view(-1, BLOCK)[:, 5]
    inside = x.abs() >= smallest
    assert ((found - x).abs()[inside] <= x.abs()[inside] / 16).all()
    assert ((found == 0) | (found == x.sign() * smallest))[~inside].all()


def test_second_moments_beside_larger_ones_never_vanish(fixed: int) -> None:
    """Down to 2^-31 of the largest (9/8 of that, where it is a power of two) to an eighth; what is smaller is the
    smallest number."""
    smallest = 2.0**-31 * 9 / 8
    x = beside_one(smallest, -60)
    code, top = codecs.encode_second(per_block(x, 1.0), torch.full((BLOCK * x.numel(),), fixed))
    found = codecs.decode_second(code, top).view(-1, BLOCK)[:, 5]
    inside = x >= smallest
    assert ((found - x).abs()[inside] <= x[inside] / 8).all()
    assert (found[~inside] == smallest).all(), "too large rather than none"


@pytest.mark.parametrize("scale", [1e-8, *(pytest.param(x, marks=pytest.mark.full) for x in (1e-30, 1.0, 1e20))])
def test_on_average_nothing_is_lost(scale: float) -> None:
    """The mean over many steps is the value, also where the value is far below the smallest number of its block."""
    x = torch.cat([torch.logspace(-12, 0, BLOCK - 1, 2.0) * TOP, torch.ones(1)]) * scale
    steps = 4000
    means = {"first": torch.zeros(BLOCK, dtype=torch.float64), "bf16": torch.zeros(BLOCK, dtype=torch.float64)}
    means |= {"second": torch.zeros(BLOCK, dtype=torch.float64), "master": torch.zeros(BLOCK, dtype=torch.float64)}
    for step in range(steps):
        one, two = codecs.chance(0, BLOCK, codecs.key_of(0, step), CPU)
        means["first"] += codecs.decode_first(*codecs.encode_first(x, one))
        means["second"] += codecs.decode_second(*codecs.encode_second(x, two))
        means["bf16"] += codecs.to_bf16(x, one)
        means["master"] += codecs.join8(*codecs.split8(x, two))
    for name, total in means.items():
        spacing = {"first": x.double() / 16, "second": x.double() / 8, "bf16": x / 128, "master": x / 2**15}[name]
        if name == "first":
            # Below the range it is the smallest number, of 2^-7 of the largest, or zero.
            spacing = torch.maximum((x.double() * scale / 64).sqrt(), spacing)
        assert ((total / steps - x.double()).abs() <= 6 * spacing / math.sqrt(steps)).all(), name


def test_any_length() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, generator=generator)
    whole = codecs.decode_first(*codecs.encode_first(x, noise(1000)))
    for count in (0, 1, 127, 128, 129, 383, 1000):
        code, top = codecs.encode_first(x[:count], noise(1000)[:count])
        assert (code.numel(), top.numel()) == (count, codecs.blocks_of(count))
        full = count // BLOCK * BLOCK
        assert torch.equal(codecs.decode_first(code, top)[:full], whole[:full])


@pytest.mark.parametrize("rule", ["adam", "sgd"])
def test_what_is_not_asked_for_any_more_keeps_its_bits(rule: str) -> None:
    """amsgrad or momentum that are turned off midway: of some codes the same value may be packed as others, and the
    native and GPU kernels leave them alone."""
    params, count = [torch.nn.Parameter(torch.zeros(1))], 1000
    adam = torch.optim.Adam(params, amsgrad=True)
    optimizer = adam if rule == "adam" else torch.optim.SGD(params, 0.1, momentum=0.9)
    known = reference.rule_of(optimizer)
    assert known is not None
    generator = torch.Generator().manual_seed(0)
    sizes = (count, codecs.blocks_of(count)) * len(known.fields)
    before = [torch.randint(0, 4, (n,), dtype=torch.uint8, generator=generator) for n in sizes]
    weight, kept = torch.ones(count, dtype=torch.bfloat16), torch.zeros(count, dtype=torch.int8)
    hypers = {**optimizer.param_groups[0], "amsgrad": False, "momentum": 0.0}
    ways = [partial(executors.in_torch, known, reference.ieee_root)]
    if cpu.library() is not None:
        ways.append(partial(cpu.RULES[rule], how=cpu.How.best()))
    for update in ways:
        on = Elements(weight.clone(), kept.clone(), torch.ones(count), (), [a.clone() for a in before], "compact", 0, 7)
        update(on, hypers, 2)
        assert on.kept is not None and not torch.equal(on.kept, kept), "it was updated"
        assert all(torch.equal(a, b) for a, b in zip(on.arrays[-2:], before[-2:], strict=True))
