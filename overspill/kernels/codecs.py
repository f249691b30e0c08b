"""State formats: how the arrays of an update are kept between steps, in plain torch. What every other executor has to
reproduce bit for bit.

| format  | master, beside its bf16 weight | first moment | second moment | bytes per element |
|---------|--------------------------------|--------------|---------------|-------------------|
| exact   | 16 bits                        | fp32         | fp32          | 10                |
| bf16    | 16 bits                        | bf16         | bf16          | 6                 |
| compact | 8 bits                         | 8 bits       | 8 bits        | 3 and 2/128       |

Note [Small floats]: the 8 bits of a moment are a float of their own: a first moment has a sign, 3 bits of exponent and
4 of mantissa, a second one 5 and 3. Both count exponents from the largest of their block of 128 elements, which is kept
in a byte. So large and small values of a block are kept to the same relative precision, down to 2^-7 and 2^-31 of the
largest (2^-15 of its root, which is what counts). Encoding is a shift of the fp32 bits: no division, no root, the same
everywhere.

Note [Rounding by chance]: what is cut off is made up for by adding a random number below the cut before cutting, so
that the expected value is the value itself: a small step is not lost every time, but taken sometimes. A first moment
below the range of its block becomes the smallest number of the range, or zero, by chance. A second moment that is not
zero never becomes zero, or a step would be divided by next to nothing; but for those below 2^-129, by chance, which are
nothing beside any usual eps.

Note [Chance]: the random bits of an element come from its place in its parameter, the parameter's number and the step,
by a hash of integers: not from a generator, so it does not matter who updates it, when, or beside what.

Worst cases, over all fp32 numbers within the range: first moment 1/16 of the value, second moment 1/8, an 8-bit
remainder 2^-15 of the master, bf16 moments 2^-7. NaN stays NaN and infinities stay infinite, with all others of their
block at its smallest numbers or zero.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from overspill.specs import STATE_BLOCK as BLOCK

FIRST = ("exp_avg", "momentum_buffer")
"""Fields that have a sign; all others are never negative."""
_LOW32 = 0xFFFFFFFF
_NAN = 0x7F800000
"""fp32 bits above this, but for the sign, are no number."""


def chance(begin: int, count: int, key: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two arrays of 32 random bits for the elements from `begin` on: int64 [n]. `key`: of `key_of`. See Note
    [Chance]."""
    place = torch.arange(begin, begin + count, dtype=torch.int64, device=device)
    first = _mixed_((place & _LOW32) ^ key ^ _mixed_high(place))
    return first, _mixed_(first ^ 0x6A09E667)


def key_of(number: int, step: int) -> int:
    """What the random bits of a parameter begin with, in a step."""
    x = (number * 0x9E3779B1 + step * 0x85EBCA77) & _LOW32
    x ^= x >> 16
    x = (x * 0x7FEB352D) & _LOW32
    x ^= x >> 15
    x = (x * 0x846CA68B) & _LOW32
    return x ^ (x >> 16)


def _mixed_(x: Tensor) -> Tensor:
    """As above, in int64 of which the low 32 bits count: products wrap around there."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _LOW32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _LOW32
    return x ^ (x >> 16)


def _mixed_high(place: Tensor) -> Tensor:
    """Of elements beyond the first 2^32."""
    high = place >> 32
    return (high * 0x2545F491) & _LOW32


def _bits(x: Tensor) -> Tensor:
    """Of fp32 numbers, without the sign: int64."""
    return x.view(torch.int32).to(torch.int64) & 0x7FFFFFFF


def _from_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


# --- bf16 moments


def to_bf16(x: Tensor, noise: Tensor) -> Tensor:
    """Rounded by chance: bf16 [n] from fp32 [n] and random bits, of which the low 16 count."""
    bits, nan = x.view(torch.int32).to(torch.int64) & _LOW32, x.isnan()
    cut = torch.where(nan, (bits >> 16) | 0x40, (bits + (noise & 0xFFFF)) >> 16)
    return (cut & 0xFFFF).to(torch.int32).to(torch.int16).view(torch.bfloat16)


# --- 8-bit remainders


def split8(master: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 weights [n] and int8 remainders [n] of fp32 masters [n]: the upper 24 bits of these, cut by chance with the
    low 8 of the random bits. Weights are rounded half up, as beside exact masters (masters.py)."""
    bits, nan = master.view(torch.int32).to(torch.int64) & _LOW32, master.isnan()
    cut = (bits + (noise & 0xFF)) >> 8
    upper = (cut + 0x80) >> 8
    rest = torch.where(nan, 0, cut - (upper << 8))
    upper = torch.where(nan, (bits >> 16) | 0x40, upper) & 0xFFFF
    return upper.to(torch.int32).to(torch.int16).view(torch.bfloat16), rest.to(torch.int8)


def join8(weight: Tensor, rest: Tensor) -> Tensor:
    """The masters: fp32 [n], new."""
    upper = weight.view(torch.int16).to(torch.int32)
    return ((upper << 8) + rest.to(torch.int32)).bitwise_left_shift_(8).view(torch.float32)


# --- 8-bit moments


def encode_first(x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [n] and exponents uint8 [blocks] of fp32 [n] and random bits. See Note [Small floats]."""
    bits = _bits(x)
    nan = bits > _NAN
    cut = torch.where(nan, (bits >> 19) | 8, (bits + (noise & 0x7FFFF)) >> 19)
    top = _blocks(cut).amax(1) >> 4
    least = _spread((top << 4) + 15 - 126, x.numel())
    # Below the range: the smallest number of it as often as is right on average, else zero.
    smallest = _from_bits(least.clamp(min=0) << 19)
    share = ((noise >> 8) & 0xFFFFFF).to(torch.float32) * 2.0**-24
    seldom = (smallest * share < _from_bits(bits)).to(torch.int64)
    code = torch.where(bits >> 19 >= least, cut - least + 1, seldom)
    return torch.where(x.signbit(), -code, code).to(torch.int8), top.to(torch.uint8)


def decode_first(code: Tensor, top: Tensor) -> Tensor:
    """fp32 [n], new."""
    size = code.to(torch.int64).abs()
    bits = (_spread((top.to(torch.int64) << 4) + 15 - 127, code.numel()) + size).clamp_(min=0) << 19
    found = torch.where(size == 0, 0.0, _from_bits(bits))
    return torch.where(code < 0, -found, found)


def encode_second(x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [n] and exponents uint8 [blocks] of fp32 [n] that are not negative, and random bits."""
    bits = _bits(x)
    nan = bits > _NAN
    cut = torch.where(nan, (bits >> 20) | 4, (bits + (noise & 0xFFFFF)) >> 20)
    top = _blocks(cut).amax(1) >> 3
    code = (cut - _spread((top << 3) + 7 - 255, x.numel())).clamp_(1, 255)
    return torch.where(bits == 0, 0, code).to(torch.uint8), top.to(torch.uint8)


def decode_second(code: Tensor, top: Tensor) -> Tensor:
    """fp32 [n], new."""
    size = code.to(torch.int64)
    bits = (_spread((top.to(torch.int64) << 3) + 7 - 255, code.numel()) + size).clamp_(min=0) << 20
    return torch.where(size == 0, 0.0, _from_bits(bits))


def blocks_of(count: int) -> int:
    return -(-count // BLOCK)


def _blocks(x: Tensor) -> Tensor:
    """[blocks, BLOCK], filled up with zeros."""
    rest = blocks_of(x.numel()) * BLOCK - x.numel()
    return torch.nn.functional.pad(x, (0, rest)).view(-1, BLOCK)


def _spread(each: Tensor, count: int) -> Tensor:
    """A number of each block, for all of its elements."""
    return each.repeat_interleave(BLOCK)[:count]


# --- all fields of a rule

Noise = tuple[Tensor, Tensor]


def pieces(name: str, arrays: Sequence[Tensor], begin: int, end: int) -> list[Tensor]:
    """What the arrays have for some elements, from the first of a block on."""
    if name != "compact":
        return [cut(array, begin, end) for array in arrays]
    blocks = begin // BLOCK, blocks_of(end)
    return [cut(array, *(blocks if i % 2 else (begin, end))) for i, array in enumerate(arrays)]


def cut(array: Tensor, begin: int, end: int) -> Tensor:
    """A piece of it; itself where that is all: views take time."""
    return array if end - begin == array.numel() else array[begin:end]


def load(name: str, fields: Sequence[str], arrays: Sequence[Tensor]) -> list[Tensor]:
    """The fields, fp32 [n]: new, but where they are kept as they are."""
    if name == "exact":
        return list(arrays)
    if name == "bf16":
        return [array.float() for array in arrays]
    pairs = zip(arrays[::2], arrays[1::2], strict=True)
    return [
        decode_first(code.view(torch.int8), top) if field in FIRST else decode_second(code, top)
        for field, (code, top) in zip(fields, pairs, strict=True)
    ]


def keep(
    name: str, fields: Sequence[str], arrays: Sequence[Tensor], noise: Noise | None, values: Sequence[Tensor]
) -> None:
    """Put fields back, fp32 [n], the first ones of all: by chance where less is kept, with random bits as `chance`
    gives them."""
    if name == "exact":
        for array, value in zip(arrays, values, strict=False):
            if array is not value:
                array.copy_(value)
        return
    assert noise is not None, "what is cut off is made up for by chance"
    # The third one, where there is one, has bits of the first's that this did not use.
    bits = (noise[0], noise[1], noise[0] >> 12)
    for i, (field, value) in enumerate(zip(fields, values, strict=True)):
        if name == "bf16":
            arrays[i].copy_(to_bf16(value, bits[i] if i < 2 else noise[0] >> 16))
            continue
        first = field in FIRST
        code, top = (encode_first if first else encode_second)(value, bits[i])
        arrays[2 * i].copy_(code.view(torch.uint8))
        arrays[2 * i + 1].copy_(top)
