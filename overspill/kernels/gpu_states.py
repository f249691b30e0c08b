"""What is kept of masters and states, loaded and stored within the kernels of gpu.py: the bits of codecs.py and
masters.py.

Imported only where there is a GPU.
"""

import triton
import triton.language as tl

from overspill.specs import STATE_BLOCK

SHARED = tl.constexpr(STATE_BLOCK)
"""Elements that share an exponent."""
FORMATS = ("exact", "bf16", "compact")
OWN, LOW, WHOLE, SHORT = 0, 1, 2, 3
"""How a weight's master is kept: it is its own; bf16 and 16 of the lower bits; fp16 beside the whole; bf16 and 8 of the
lower bits."""


@triton.jit
def _mixed(x):  # type: ignore[no-untyped-def]
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def chance(first, key, at):  # type: ignore[no-untyped-def]
    """Two arrays of 32 random bits: uint32."""
    place = at + first
    low, high = place.to(tl.uint32), (place >> 32).to(tl.uint32)
    one = _mixed(low ^ tl.cast(key, tl.uint32) ^ (high * 0x2545F491))
    return one, _mixed(one ^ 0x6A09E667)


@triton.jit
def _float(bits):  # type: ignore[no-untyped-def]
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def load_state(field, tops, at, inside, FORMAT: tl.constexpr, SIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """A field of the rule: fp32."""
    if FORMAT == 0:
        return tl.load(field + at, inside, other=0.0)
    elif FORMAT == 1:
        upper = tl.load(field + at, inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
        return (upper << 16).to(tl.float32, bitcast=True)
    else:
        code = tl.load(field + at, inside, other=0)
        top = tl.load(tops + at // SHARED, inside, other=0).to(tl.int32)
        if SIGNED:
            code = code.to(tl.int8, bitcast=True).to(tl.int32)
            found = _float(tl.maximum((top << 4) + (15 - 127) + tl.abs(code), 0) << 19)
            # Not a minus, which would make zero of a negative zero.
            return tl.where(code == 0, 0.0, tl.where(code < 0, found * -1.0, found))
        else:
            code = code.to(tl.int32)
            found = _float(tl.maximum((top << 3) + (7 - 255) + code, 0) << 20)
            return tl.where(code == 0, 0.0, found)


@triton.jit
def _top(cut, tops, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The exponent of each block, kept and for all of its elements."""
    most = tl.max(tl.reshape(cut, [BLOCK // SHARED, SHARED]), 1) >> WIDTH
    which = tl.program_id(0).to(tl.int64) * (BLOCK // SHARED) + tl.arange(0, BLOCK // SHARED)
    tl.store(tops + which, most.to(tl.uint8), which * SHARED < count)
    return tl.reshape(tl.broadcast_to(most[:, None], [BLOCK // SHARED, SHARED]), [BLOCK])


@triton.jit
def store_state(  # type: ignore[no-untyped-def]
    field, tops, x, noise, at, inside, count, FORMAT: tl.constexpr, SIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """`noise`: uint32."""
    raw = x.to(tl.int32, bitcast=True)
    bits = raw & 0x7FFFFFFF
    nan = bits > 0x7F800000
    if FORMAT == 0:
        tl.store(field + at, x, inside)
    elif FORMAT == 1:
        wide = raw.to(tl.uint32, bitcast=True)
        cut = (wide >> 16) + (((wide & 0xFFFF) + (noise & 0xFFFF)) >> 16)
        cut = tl.where(nan, (wide >> 16) | 0x40, cut)
        tl.store(field + at, cut.to(tl.uint16).to(tl.bfloat16, bitcast=True), inside)
    elif SIGNED:
        cut = tl.where(nan, (bits >> 19) | 8, (bits + (noise & 0x7FFFF).to(tl.int32)) >> 19)
        cut = tl.where(inside, cut, 0)
        least = (_top(cut, tops, count, 4, BLOCK) << 4) + (15 - 126)
        smallest = _float(tl.maximum(least, 0) << 19)
        share = ((noise >> 8) & 0xFFFFFF).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
        seldom = (smallest * share < _float(bits)).to(tl.int32)
        code = tl.where((bits >> 19) >= least, cut - least + 1, seldom)
        code = tl.where(raw < 0, -code, code)
        tl.store(field + at, code.to(tl.int8).to(tl.uint8, bitcast=True), inside)
    else:
        cut = tl.where(nan, (bits >> 20) | 4, (bits + (noise & 0xFFFFF).to(tl.int32)) >> 20)
        cut = tl.where(inside, cut, 0)
        below = (_top(cut, tops, count, 3, BLOCK) << 3) + (7 - 255)
        code = tl.minimum(tl.maximum(cut - below, 1), 255)
        tl.store(field + at, tl.where(bits == 0, 0, code).to(tl.uint8), inside)


@triton.jit
def load_master(weight, kept, at, inside, MASTER: tl.constexpr):  # type: ignore[no-untyped-def]
    if MASTER == 0:
        return tl.load(weight + at, inside, other=0.0)
    elif MASTER == 1:
        upper = tl.load(weight + at, inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
        lower = tl.load(kept + at, inside, other=0).to(tl.int32)
        return ((upper << 16) + lower).to(tl.float32, bitcast=True)
    elif MASTER == 3:
        upper = tl.load(weight + at, inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
        lower = tl.load(kept + at, inside, other=0).to(tl.int32)
        return (((upper << 8) + lower) << 8).to(tl.float32, bitcast=True)
    else:
        return tl.load(kept + at, inside, other=0.0)


@triton.jit
def store_master(weight, kept, p, noise, at, inside, MASTER: tl.constexpr):  # type: ignore[no-untyped-def]
    if MASTER == 0:
        tl.store(weight + at, p, inside)
    elif MASTER == 1:
        bits = p.to(tl.int32, bitcast=True)
        upper = (bits + 0x8000) >> 16
        rest = bits - (upper << 16)
        nan = p != p
        upper = tl.where(nan, (bits >> 16) | 0x40, upper)
        rest = tl.where(nan, 0, rest)
        tl.store(weight + at, upper.to(tl.int16).to(tl.bfloat16, bitcast=True), inside)
        tl.store(kept + at, rest.to(tl.int16), inside)
    elif MASTER == 3:
        bits = p.to(tl.uint32, bitcast=True)
        nan = p != p
        cut = (bits >> 8) + (((bits & 0xFF) + (noise >> 24)) >> 8)
        upper = (cut + 0x80) >> 8
        rest = (cut - (upper << 8)).to(tl.int32)
        upper = tl.where(nan, (bits >> 16) | 0x40, upper)
        tl.store(weight + at, upper.to(tl.uint16).to(tl.bfloat16, bitcast=True), inside)
        tl.store(kept + at, tl.where(nan, 0, rest).to(tl.int8), inside)
    else:
        tl.store(weight + at, p.to(tl.float16), inside)
        tl.store(kept + at, p, inside)
