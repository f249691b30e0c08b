"""The whole input space of every format of states, and what shows that an executor unpacks and packs all of it.

Updates are chosen such that their results show what was unpacked: a weight becomes the moment beside it, or a momentum
the master beside it; or a master becomes any number that is given as gradient. Who carries them out is `Run`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from overspill.kernels import codecs, cpu, executors, masters, reference
from overspill.kernels.codecs import BLOCK
from overspill.kernels.elements import Elements
from overspill.kernels.reference import Rule, ieee_root
from tests.cpu.test_native import ADAGRAD, ADAM, SGD, _same, differing, part

PLAIN = Rule("sgd", (), 0.0, False, reference._sgd)
MOMENTUM = Rule("sgd", ("momentum_buffer",), 0.0, False, reference._sgd)
TOTAL = Rule("adagrad", ("sum",), 0.0, True, reference._adagrad)
MOMENTS = Rule("adam", ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), 0.0, True, reference._adam)

ALL = 1 << 16
EVERY = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
"""All numbers of 16 bits."""
FIRST = (1 << 32) - 70001
"""The number of the first element: soon after it one more bit of it counts."""
STAY: dict[str, Any] = SGD | {"lr": 1.0}
"""Beside a gradient of zero nothing changes."""
TAKE: dict[str, Any] = SGD | {"lr": -1.0}
"""A master of -0 becomes the gradient, whatever that is."""
GROW: dict[str, Any] = SGD | {"lr": -0.7, "weight_decay": 1.0}
"""Beside a gradient of zero a master grows by 0.7 of itself."""
SHOW: dict[str, Any] = TAKE | {"momentum": 1.0}
"""Beside a gradient of -0 a weight of -0 becomes the momentum, which stays; in a first step both the gradient."""
REST = sorted({sign * ((1 << k) - less) for k in range(15) for sign in (-1, 1) for less in (0, 1)} | {-32768, 32767})
"""Remainders: powers of two, what is beside them, and the outermost."""
LOWER = [n & 0xFFFF for n in REST]
"""The same bits, as lower halves."""
WEIGHTS = (0, 1, 0x7F, 0x80, 0x3F80, 0x4049, 0x7F7F, 0x7F80, 0x7F81, 0x7FFF)
"""bf16: zero, the smallest and largest denormal, the smallest that is not, 1, pi, the largest, infinity, NaN."""


class Run(Protocol):
    def __call__(self, rule: Rule, on: Elements, hypers: dict[str, Any], step: int = 2) -> Elements:
        """What plain torch makes of the elements; whoever is tested has to make the same."""
        ...


def floats(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def bf16(bits: Tensor) -> Tensor:
    return bits.to(torch.int16).view(torch.bfloat16)


def zeros(count: int) -> Tensor:
    """Negative, so that any number added to them stays what it is, zeros too."""
    return torch.full((count,), -0.0)


def beside(kept: Tensor) -> Tensor:
    """Weights of masters that are -0."""
    return torch.full((kept.numel(),), -0.0, dtype=torch.bfloat16)


def known(rule: Rule, on: Elements, hypers: dict[str, Any], step: int) -> Elements:
    """What plain torch makes of a copy."""
    found = part(on, 0, on.weight.numel())
    executors.in_torch(rule, ieee_root, found, hypers, step)
    return found


def unlike(rule: Rule, one: Elements, other: Elements) -> list[str]:
    """Arrays whose bits differ: also codes that mean the same, but for those of NaN."""
    wrong = differing(one, other, rule.name)
    if one.format == "compact":
        values = codecs.load("compact", rule.fields, other.arrays)
        triples = zip(rule.fields, values, one.fields, other.fields, strict=True)
        wrong += [f"codes of {name}" for name, value, a, b in triples if not ((a == b) | value.isnan()).all()]
    return wrong


def pieces(on: Elements) -> Iterator[Elements]:
    """So many elements at a time that the caches hold them."""
    for begin in range(0, on.weight.numel(), ALL):
        yield replace(part(on, begin, min(begin + ALL, on.weight.numel())), first=on.first + begin)


def key(step: int = 2) -> int:
    return codecs.key_of(3, step)


# --- masters


def weights_beside_8_bit_remainders(run: Run, remainders: Iterable[int]) -> None:
    """Unpacked and packed again: an update of nothing loses nothing, another one shows what was unpacked."""
    weight = bf16(EVERY)
    for rest in remainders:
        kept = torch.full((ALL,), rest, dtype=torch.int8)
        on = Elements(weight, kept, torch.zeros(ALL), (), (), "compact", FIRST + rest * ALL, key())
        known, number = run(PLAIN, on, STAY), ~masters.join(weight, kept).isnan()
        assert known.kept is not None
        assert _same(known.weight[number], weight[number]) and torch.equal(known.kept[number], kept[number]), rest
        run(PLAIN, on, GROW)


def upper_24_bits_become_8_bit_remainders(run: Run, last: int | None) -> None:
    """Beside any last 8 bits, or those that are given."""
    generator = torch.Generator().manual_seed(0)
    kept = torch.zeros(ALL, dtype=torch.int8)
    for middle in range(0, ALL, 1 << 8):
        lower = torch.randint(0, 256, (ALL,), generator=generator) if last is None else last
        gradient = floats((EVERY << 16) | middle | lower)
        run(PLAIN, Elements(beside(kept), kept, gradient, (), (), "compact", FIRST + middle * ALL, key()), TAKE)


def exact_masters(run: Run, weight: Tensor, kept: Tensor) -> None:
    """Unpacked and packed again, in the formats that keep them whole."""
    master = masters.join(weight, kept)
    number, count = ~master.isnan(), weight.numel()
    momentum = torch.ones(count)
    shown = run(MOMENTUM, Elements(weight, kept, zeros(count), (), (momentum,)), SHOW | {"weight_decay": 1.0}, 1)
    assert _same(shown.fields[0], master), "the momentum is the master now"
    for format in ("exact", "bf16"):
        known = run(PLAIN, Elements(weight, kept, torch.zeros(count), (), (), format), STAY)
        assert known.kept is not None
        assert _same(known.weight[number], weight[number]) and torch.equal(known.kept[number], kept[number])


def every_weight_beside(run: Run, remainders: Iterable[int]) -> None:
    """Of 16 bits."""
    for rest in remainders:
        exact_masters(run, bf16(EVERY), torch.full((ALL,), rest, dtype=torch.int16))


def every_16_bit_remainder(run: Run, weights: Iterable[int]) -> None:
    for bits in weights:
        exact_masters(run, bf16(torch.full((ALL,), bits)), EVERY.to(torch.int16))


def upper_halves_become_16_bit_remainders(run: Run, lowers: Iterable[int]) -> None:
    kept = torch.zeros(ALL, dtype=torch.int16)
    for lower in lowers:
        master = floats((EVERY << 16) | lower)
        for format in ("exact", "bf16"):
            known = run(PLAIN, Elements(beside(kept), kept, master, (), (), format), TAKE)
            assert known.kept is not None
            assert _same(masters.join(known.weight, known.kept), master)


# --- moments, unpacked


def orders() -> list[Tensor]:
    """All numbers from 0 to 2^16 - 1, in three orders: the second and third field are not to follow the first."""
    generator = torch.Generator().manual_seed(1)
    return [torch.arange(ALL), *(torch.randperm(ALL, generator=generator) for _ in range(2))]


def every_bf16() -> tuple[str, list[list[Tensor]]]:
    return "bf16", [[bf16(EVERY)[order]] for order in orders()]


def every_code() -> tuple[str, list[list[Tensor]]]:
    """All codes beside all exponents: two blocks for each of these."""
    tops = (torch.arange(2 * 256) // 2).to(torch.uint8)
    found = []
    for order in orders():
        codes = order.view(256, 256).argsort(1).to(torch.uint8).view(-1, BLOCK)
        blocks = order[order < len(tops)]
        found.append([codes[blocks].flatten(), tops[blocks]])
    return "compact", found


def every_code_alone() -> tuple[str, list[list[Tensor]]]:
    """As above, but each in a block of its own, beside zeros."""
    codes, place = torch.zeros(ALL, BLOCK, dtype=torch.uint8), torch.arange(ALL)
    codes[place, place * 7 % BLOCK] = place.to(torch.uint8)
    both = [codes.flatten(), (place // 256).to(torch.uint8)]
    return "compact", [both, both, both]


Kept = Callable[[], tuple[str, list[list[Tensor]]]]


def with_moments(space: Kept, fields: int, gradient: float) -> Iterator[Elements]:
    format, arrays = space()
    kept = [array for each in arrays[:fields] for array in each]
    count = kept[0].numel()
    yield from pieces(Elements(zeros(count), None, torch.full((count,), gradient), (), kept, format, FIRST, key()))


def every_momentum(run: Run, space: Kept) -> None:
    for on in with_moments(space, 1, -0.0):
        known = run(MOMENTUM, on, SHOW)
        assert _same(known.weight, codecs.load(on.format, MOMENTUM.fields, on.arrays)[0]), "the weight is it now"
        for gradient in (1.0, -1e-30):
            run(MOMENTUM, replace(on, gradient=torch.full_like(on.gradient, gradient)), SGD | {"momentum": 0.9})


def every_sum_of_squares(run: Run, space: Kept) -> None:
    """A gradient whose square is nothing, and a rate that makes up for it: the weight becomes the inverse root."""
    for on in with_moments(space, 1, 1e-30):
        known = run(TOTAL, on, ADAGRAD | {"lr": -1e30, "eps": 0.0})
        total = codecs.load(on.format, TOTAL.fields, on.arrays)[0]
        positive = total > 0
        assert _same((1 / known.weight[positive]).square().bfloat16(), total[positive].bfloat16())
        run(TOTAL, replace(on, gradient=torch.ones_like(on.gradient)), ADAGRAD)


def all_moments_of_adam(run: Run, space: Kept, gradient: float) -> None:
    for on in with_moments(space, 3, gradient):
        run(MOMENTS, on, ADAM | {"amsgrad": True})
        run(MOMENTS, on, ADAM | {"amsgrad": True, "betas": (0.3, 0.5), "lr": 1.0}, 7)
        two = replace(MOMENTS, fields=MOMENTS.fields[:2])
        run(two, replace(on, arrays=on.arrays[: 2 * len(on.arrays) // 3]), ADAM)


# --- moments, packed


def in_order(x: Tensor) -> Tensor:
    return x


def mixed(x: Tensor) -> Tensor:
    return x[orders()[1]]


def near(x: Tensor) -> Tensor:
    """Blocks of a few exponents each, so that most numbers are in the range of theirs."""
    return x.view(-1, 16, BLOCK).transpose(1, 2).flatten()


def alone(x: Tensor) -> Tensor:
    blocks = torch.zeros(x.numel(), BLOCK)
    place = torch.arange(x.numel())
    blocks[place, place * 7 % BLOCK] = x
    return blocks.flatten()


Layout = Callable[[Tensor], Tensor]
LAYOUTS: list[tuple[str, Layout]] = [("bf16", mixed), ("compact", in_order), ("compact", mixed), ("compact", near)]
"""Beside them there is `alone`, which takes long."""


def _packs(run: Run, rule: Rule, on: tuple[str, Tensor], hypers: dict[str, Any]) -> None:
    """In a first step, fields of nothing become those that the gradients make."""
    format, gradient = on
    count = gradient.numel()
    sizes = [count, codecs.blocks_of(count)] if format == "compact" else [count]
    arrays = [torch.zeros(n, dtype=cpu.FORMATS[format]) for _ in rule.fields for n in sizes]
    for some in pieces(Elements(zeros(count), None, gradient, (), arrays, format, FIRST, key(1))):
        run(rule, some, hypers, 1)


def upper_halves_become_momenta(run: Run, format: str, layout: Layout) -> None:
    """A first step keeps the gradient."""
    for lower in (0, 0x8000) if layout is alone else LOWER:
        _packs(run, MOMENTUM, (format, layout(floats((EVERY << 16) | lower))), SHOW)


def positive_upper_halves_become_sums_and_second_moments(run: Run, format: str, layout: Layout) -> None:
    """Their roots are the gradients; the third field has other random bits than the second."""
    for lower in (0, 0x8000) if layout is alone else LOWER[::4]:
        root = layout(floats((EVERY & 0x7FFF) << 16 | lower)).double().sqrt().float()
        _packs(run, TOTAL, (format, root), ADAGRAD)
        _packs(run, MOMENTS, (format, root), ADAM | {"amsgrad": True, "betas": (0.0, 0.0)})


# --- random bits

SELDOM = (0, 0xFF, 0x100, 0x7FFFF, 0x80000, 0xFFFFFF00, 0xFFFFFFFF)


def key_for(bits: int) -> int:
    """The key by which the element of number 0 has these random bits: what codecs.chance mixes, backwards."""
    for shift, factor in ((16, 0x846CA68B), (15, 0x7FEB352D), (16, 1)):
        bits ^= (bits >> shift) ^ (bits >> 2 * shift)
        bits = bits * pow(factor, -1, 1 << 32) & 0xFFFFFFFF
    return bits


def random_bits_that_are_seldom(run: Run, bits: int) -> None:
    """The least, the most, and those that leave a moment below the range just where it begins to count."""
    assert codecs.chance(0, 1, key_for(bits), torch.device("cpu"))[0].item() == bits
    edge = torch.tensor(2.0**-7 * 17 / 16) * ((bits >> 8) * 2.0**-24)
    nearly = (edge.view(torch.int32) + torch.tensor([-1, 0, 1])).clamp(min=0).to(torch.int32).view(torch.float32)
    second = key_for(key_for(bits) ^ 0x6A09E667)
    assert codecs.chance(0, 1, second, torch.device("cpu"))[1].item() == bits
    for x in (0.0, -0.0, 1e-45, 2.0**-31, 0.3, 1.999999, 3.4e38, *nearly.tolist(), *(-nearly).tolist()):
        gradient = torch.tensor([x, 1.0])
        for format in ("bf16", "compact"):
            arrays = [torch.zeros(n, dtype=cpu.FORMATS[format]) for n in (2, 1)][: 1 if format == "bf16" else 2]
            on = Elements(zeros(2), None, gradient, (), arrays, format, 0, key_for(bits))
            run(MOMENTUM, on, SHOW, 1)
            run(TOTAL, on, ADAGRAD, 1)
        kept = torch.zeros(2, dtype=torch.int8)
        run(PLAIN, Elements(beside(kept), kept, gradient, (), (), "compact", 0, second), TAKE)
