"""The update rules as Triton kernels: the bits of kernels/reference.py, in one pass over neighbours in a page.

Every operation has one rounding, as the reference says (its Note [Roundings]): what it fuses is, and nothing else,
division and root are IEEE's, and scalars are computed on the host and handed in. What a gradient is multiplied with (an
undone loss scale, a clip factor) is read from device memory, so that no step waits for it; so is, under fp16, whether
anything is to be done at all.

Note [Launches]: Triton looks at all arguments of a launch to find out which of its kernels fits them, which takes
longer than the launch. Which one fits depends on types, and on whether pointers and lengths are multiples of 16: where
all of them are, and such a kernel was launched before, it is known, and addresses are enough.

Imported only where there is a GPU.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from overspill.kernels.elements import GRAIN, Addresses, Elements
from overspill.kernels.gpu_states import (
    FORMATS,
    LOW,
    OWN,
    SHORT,
    WHOLE,
    chance,
    load_master,
    load_state,
    store_master,
    store_state,
)
from overspill.kernels.numbers import NUMBERS
from overspill.kernels.reference import Hypers

BLOCK = 1024
KEPT_AS = {torch.int16: LOW, torch.int8: SHORT}


@triton.jit
def _fused(a, b, c):  # type: ignore[no-untyped-def]
    """a + b * c, rounded once."""
    return tl.fma(b, c, a)


@triton.jit
def _toward(a, b, weight, less, NEAR: tl.constexpr):  # type: ignore[no-untyped-def]
    """a + weight * (b - a), from the nearer end; `less`: weight - 1."""
    if NEAR:
        return _fused(a, b - a, weight)
    else:
        return _fused(b, b - a, less)


@triton.jit
def _gradient(gradient, first, second, at, inside, FACTORS: tl.constexpr, MAXIMIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    g = tl.load(gradient + at, inside, other=0.0).to(tl.float32)
    if FACTORS > 0:
        g = g * tl.load(first)
    if FACTORS > 1:
        g = g * tl.load(second)
    if MAXIMIZE:
        g = g * -1.0  # a minus would make zero of a negative zero
    return g


@triton.jit(do_not_specialize=["place", "key"])
def _adam(  # type: ignore[no-untyped-def]
    weight, kept, gradient, first, second, skip, m_, v_, most_, m_top, v_top, most_top, count, place, key,
    shrink, decay, lerp, less, beta2, rest2, size, root, eps,
    MASTER: tl.constexpr, FORMAT: tl.constexpr, FACTORS: tl.constexpr, SKIPS: tl.constexpr, MAXIMIZE: tl.constexpr,
    DECAY: tl.constexpr, NEAR: tl.constexpr, AMSGRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if SKIPS:  # noqa: SIM102 - Triton decides only this one when it compiles
        if tl.load(skip) != 0.0:
            return
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = _gradient(gradient, first, second, at, inside, FACTORS, MAXIMIZE)
    p = load_master(weight, kept, at, inside, MASTER)
    one, two = chance(place, key, at)
    m = load_state(m_, m_top, at, inside, FORMAT, True)
    v = load_state(v_, v_top, at, inside, FORMAT, False)
    if DECAY == 1:
        p = p * shrink
    if DECAY == 2:
        g = _fused(g, p, decay)
    m = _toward(m, g, lerp, less, NEAR)
    v = _fused(v * beta2, g * rest2, g)
    store_state(m_, m_top, m, one, at, inside, count, FORMAT, True, BLOCK)
    store_state(v_, v_top, v, two, at, inside, count, FORMAT, False, BLOCK)
    if AMSGRAD:
        v = tl.maximum(load_state(most_, most_top, at, inside, FORMAT, False), v, propagate_nan=tl.PropagateNan.ALL)
        if FORMAT == 1:
            store_state(most_, most_top, v, one >> 16, at, inside, count, FORMAT, False, BLOCK)
        else:
            store_state(most_, most_top, v, one >> 12, at, inside, count, FORMAT, False, BLOCK)
    below = tl.div_rn(tl.sqrt_rn(v), root) + eps
    p = p + tl.div_rn(m * size, below)
    store_master(weight, kept, p, two, at, inside, MASTER)


@triton.jit(do_not_specialize=["place", "key"])
def _sgd(  # type: ignore[no-untyped-def]
    weight, kept, gradient, first, second, skip, buffer, top, count, place, key, decay, momentum, fresh, less_lr,
    MASTER: tl.constexpr, FORMAT: tl.constexpr, FACTORS: tl.constexpr, SKIPS: tl.constexpr, MAXIMIZE: tl.constexpr,
    DECAY: tl.constexpr, MOMENTUM: tl.constexpr, BEGIN: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if SKIPS:  # noqa: SIM102 - Triton decides only this one when it compiles
        if tl.load(skip) != 0.0:
            return
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = _gradient(gradient, first, second, at, inside, FACTORS, MAXIMIZE)
    p = load_master(weight, kept, at, inside, MASTER)
    if DECAY:
        g = _fused(g, p, decay)
    one, two = chance(place, key, at)
    if MOMENTUM:
        if BEGIN:
            b = g
        else:
            b = _fused(load_state(buffer, top, at, inside, FORMAT, True) * momentum, g, fresh)
        store_state(buffer, top, b, one, at, inside, count, FORMAT, True, BLOCK)
        if NESTEROV:
            g = _fused(g, b, momentum)
        else:
            g = b
    p = _fused(p, g, less_lr)
    store_master(weight, kept, p, two, at, inside, MASTER)


@triton.jit(do_not_specialize=["place", "key"])
def _adagrad(  # type: ignore[no-untyped-def]
    weight, kept, gradient, first, second, skip, total_, top, count, place, key, decay, less_lr, eps,
    MASTER: tl.constexpr, FORMAT: tl.constexpr, FACTORS: tl.constexpr, SKIPS: tl.constexpr, MAXIMIZE: tl.constexpr,
    DECAY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if SKIPS:  # noqa: SIM102 - Triton decides only this one when it compiles
        if tl.load(skip) != 0.0:
            return
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = _gradient(gradient, first, second, at, inside, FACTORS, MAXIMIZE)
    p = load_master(weight, kept, at, inside, MASTER)
    if DECAY:
        g = _fused(g, p, decay)
    one, two = chance(place, key, at)
    total = _fused(load_state(total_, top, at, inside, FORMAT, False), g, g)
    store_state(total_, top, total, one, at, inside, count, FORMAT, False, BLOCK)
    p = p + tl.div_rn(g * less_lr, tl.sqrt_rn(total) + eps)
    store_master(weight, kept, p, two, at, inside, MASTER)


@dataclass(frozen=True, slots=True)
class _Call:
    """A rule's kernel for some hyperparameters."""

    kernel: Any
    room: int
    """How many fields it takes."""
    scalars: tuple[float, ...]
    flags: tuple[Any, ...]
    """Its constants, in its order, from MAXIMIZE to BLOCK."""


_KERNELS: dict[str, tuple[Any, int]] = {"adam": (_adam, 3), "sgd": (_sgd, 1), "adagrad": (_adagrad, 1)}
"""Kernels by the name of the rule, with how many fields it takes."""


def _call(rule: str, h: Hypers, step: int, fields: Sequence[Any]) -> _Call:
    (kernel, room), told = _KERNELS[rule], NUMBERS[rule](h, step, fields)
    return _Call(kernel, room, told.scalars, (bool(h["maximize"]), *told.flags, BLOCK))


_compiled: dict[tuple[Any, ...], Any] = {}
"""Kernels for arguments that are as usual. See Note [Launches]."""


def _launched(rule: str, on: Elements, h: Hypers, step: int) -> None:
    """On arrays of any kind."""
    kept, nothing, call = on.kept, (on.weight,) * 3, _call(rule, h, step, on.fields)
    if not on.weight.numel():
        return
    first, second = (*on.factors, *nothing)[:2]
    skip = on.weight if on.skip is None else on.skip
    rest = (*(*on.fields, *nothing)[: call.room], *(*on.tops, *nothing)[: call.room])
    tensors = (on.weight, on.weight if kept is None else kept, on.gradient, first, second, skip, *rest)
    dtypes = (on.weight.dtype, None if kept is None else kept.dtype, on.gradient.dtype)
    at = Addresses(
        0, None, 0, (), (), on.weight.numel(), dtypes, on.format, on.first, on.key, None if on.skip is None else 0
    )
    constants, key = _constants(call, at, len(on.factors))
    known = call.kernel[_grid(at)](*tensors, *_numbers(call, at), *constants, enable_fp_fusion=False)
    if _is_usual(at, [t.data_ptr() for t in tensors]):
        _compiled[key] = known


def _quickly(rule: str, at: Addresses, h: Hypers, step: int) -> bool:
    """Where the kernel is known; False: it is not. See Note [Launches]."""
    compact, nothing = at.format == "compact", (at.weight,) * 3
    fields, tops = (at.arrays[::2], at.arrays[1::2]) if compact else (at.arrays, ())
    call = _call(rule, h, step, fields)
    constants, key = _constants(call, at, len(at.factors))
    known = _compiled.get(key)
    first, second = (*at.factors, *nothing)[:2]
    skip = at.weight if at.skip is None else at.skip
    rest = (*(*fields, *nothing)[: call.room], *(*tops, *nothing)[: call.room])
    # Numbers instead of tensors: Triton asks the driver about each of those.
    places = (at.weight, at.weight if at.kept is None else at.kept, at.gradient, first, second, skip, *rest)
    if known is None or not _is_usual(at, places):
        return False
    known[_grid(at)](*places, *_numbers(call, at), *constants)
    return True


def _constants(call: _Call, at: Addresses, factors: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The kernel's constants, and what tells compiled kernels apart."""
    kept = at.dtypes[1]
    master = OWN if kept is None else KEPT_AS.get(kept, WHOLE)
    constants = (master, FORMATS.index(at.format), factors, at.skip is not None, *call.flags)
    return constants, (call.kernel, torch.cuda.current_device(), constants, at.dtypes)


def _numbers(call: _Call, at: Addresses) -> tuple[float, ...]:
    # The key as a signed number, so that it is always of 32 bits.
    return (at.numel, at.first, at.key - (at.key >> 31 << 32), *call.scalars)


def _grid(at: Addresses) -> tuple[int, int, int]:
    return -(-at.numel // BLOCK), 1, 1


def _is_usual(at: Addresses, places: Sequence[int]) -> bool:
    """As Triton tells kernels apart. See Note [Launches]."""
    return at.numel % GRAIN == 0 and max(at.numel, at.first) < 1 << 31 and not any(place % GRAIN for place in places)


RULES = {name: functools.partial(_launched, name) for name in _KERNELS}
QUICK = {name: functools.partial(_quickly, name) for name in _KERNELS}
