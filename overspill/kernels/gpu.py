"""The update rules as Triton kernels: the bits of kernels/reference.py, in one pass over a part of a page.

Every operation has one rounding, as the reference says (its Note [Roundings]): fused products are made in fp64,
division and root are IEEE's, nothing is contracted, and scalars are computed on the host and handed in. What a gradient
is multiplied with (an undone loss scale, a clip factor) is read from device memory, so that no step waits for it.

Imported only where there is a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from overspill.kernels.reference import Hypers, need_field

BLOCK = 1024
OWN, LOW, WHOLE = 0, 1, 2
"""How a weight's master is kept: it is its own; bf16 and what is kept of the lower bits; fp16 beside the whole."""


@dataclass(frozen=True, slots=True)
class Elements:
    """What an update works on: flat, all of the same length."""

    weight: Tensor
    kept: Tensor | None
    """Of the master, beside a 16-bit weight."""
    gradient: Tensor
    """As it is kept: fp32, or of 16 bits."""
    factors: Sequence[Tensor]
    """fp32 [1] on the device: what the gradient is multiplied with, one after the other; at most two."""
    fields: Sequence[Tensor]


@triton.jit
def _fused(a, b, c):  # type: ignore[no-untyped-def]
    """a + b * c, rounded once."""
    return (b.to(tl.float64) * c.to(tl.float64) + a.to(tl.float64)).to(tl.float32)


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


@triton.jit
def _master(weight, kept, at, inside, MASTER: tl.constexpr):  # type: ignore[no-untyped-def]
    if MASTER == 0:
        return tl.load(weight + at, inside, other=0.0)
    elif MASTER == 1:
        upper = tl.load(weight + at, inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
        lower = tl.load(kept + at, inside, other=0).to(tl.int32)
        return ((upper << 16) + lower).to(tl.float32, bitcast=True)
    else:
        return tl.load(kept + at, inside, other=0.0)


@triton.jit
def _keep(weight, kept, p, at, inside, MASTER: tl.constexpr):  # type: ignore[no-untyped-def]
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
    else:
        tl.store(weight + at, p.to(tl.float16), inside)
        tl.store(kept + at, p, inside)


@triton.jit
def _adam(  # type: ignore[no-untyped-def]
    weight, kept, gradient, first, second, m_, v_, most_, count,
    shrink, decay, lerp, less, beta2, rest2, size, root, eps,
    MASTER: tl.constexpr, FACTORS: tl.constexpr, MAXIMIZE: tl.constexpr, DECAY: tl.constexpr,
    NEAR: tl.constexpr, AMSGRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = _gradient(gradient, first, second, at, inside, FACTORS, MAXIMIZE)
    p = _master(weight, kept, at, inside, MASTER)
    m = tl.load(m_ + at, inside, other=0.0)
    v = tl.load(v_ + at, inside, other=0.0)
    if DECAY == 1:
        p = p * shrink
    if DECAY == 2:
        g = _fused(g, p, decay)
    m = _toward(m, g, lerp, less, NEAR)
    v = _fused(v * beta2, g * rest2, g)
    tl.store(m_ + at, m, inside)
    tl.store(v_ + at, v, inside)
    if AMSGRAD:
        v = tl.maximum(tl.load(most_ + at, inside, other=0.0), v, propagate_nan=tl.PropagateNan.ALL)
        tl.store(most_ + at, v, inside)
    below = tl.div_rn(tl.sqrt_rn(v), root) + eps
    p = p + tl.div_rn(m * size, below)
    _keep(weight, kept, p, at, inside, MASTER)


@triton.jit
def _sgd(  # type: ignore[no-untyped-def]
    weight, kept, gradient, first, second, buffer, count, decay, momentum, fresh, less_lr,
    MASTER: tl.constexpr, FACTORS: tl.constexpr, MAXIMIZE: tl.constexpr, DECAY: tl.constexpr,
    MOMENTUM: tl.constexpr, BEGIN: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = _gradient(gradient, first, second, at, inside, FACTORS, MAXIMIZE)
    p = _master(weight, kept, at, inside, MASTER)
    if DECAY:
        g = _fused(g, p, decay)
    if MOMENTUM:
        if BEGIN:
            b = g
        else:
            b = _fused(tl.load(buffer + at, inside, other=0.0) * momentum, g, fresh)
        tl.store(buffer + at, b, inside)
        if NESTEROV:
            g = _fused(g, b, momentum)
        else:
            g = b
    p = _fused(p, g, less_lr)
    _keep(weight, kept, p, at, inside, MASTER)


@triton.jit
def _adagrad(  # type: ignore[no-untyped-def]
    weight, kept, gradient, first, second, total_, count, decay, less_lr, eps,
    MASTER: tl.constexpr, FACTORS: tl.constexpr, MAXIMIZE: tl.constexpr, DECAY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = _gradient(gradient, first, second, at, inside, FACTORS, MAXIMIZE)
    p = _master(weight, kept, at, inside, MASTER)
    if DECAY:
        g = _fused(g, p, decay)
    total = _fused(tl.load(total_ + at, inside, other=0.0), g, g)
    tl.store(total_ + at, total, inside)
    p = p + tl.div_rn(g * less_lr, tl.sqrt_rn(total) + eps)
    _keep(weight, kept, p, at, inside, MASTER)


def adam(on: Elements, h: Hypers, step: int) -> None:
    """As reference._adam."""
    lr, (beta1, beta2), decay = float(h["lr"]), map(float, h["betas"]), float(h["weight_decay"])
    if h["amsgrad"]:
        need_field("max_exp_avg_sq", on.fields, 3)
    m, v = on.fields[:2]
    size, root = lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
    scalars = (1 - lr * decay, decay, 1 - beta1, (1 - beta1) - 1, beta2, 1 - beta2, -size, root, float(h["eps"]))
    kind = 0 if not decay else 1 if h.get("decoupled_weight_decay") else 2
    most = on.fields[2] if h["amsgrad"] else v
    _launch(_adam, on, h, (m, v, most), scalars, DECAY=kind, NEAR=1 - beta1 < 0.5, AMSGRAD=bool(h["amsgrad"]))


def sgd(on: Elements, h: Hypers, step: int) -> None:
    """As reference._sgd."""
    lr, momentum, decay = float(h["lr"]), float(h["momentum"]), float(h["weight_decay"])
    if momentum:
        need_field("momentum_buffer", on.fields, 1)
    buffer = on.fields[0] if on.fields else on.weight
    scalars = (decay, momentum, 1 - float(h["dampening"]), -lr)
    flags = {"MOMENTUM": bool(momentum), "BEGIN": step == 1, "NESTEROV": bool(h["nesterov"])}
    _launch(_sgd, on, h, (buffer,), scalars, DECAY=bool(decay), **flags)


def adagrad(on: Elements, h: Hypers, step: int) -> None:
    """As reference._adagrad."""
    decay, lr = float(h["weight_decay"]), float(h["lr"]) / (1 + (step - 1) * float(h["lr_decay"]))
    _launch(_adagrad, on, h, (on.fields[0],), (decay, -lr, float(h["eps"])), DECAY=bool(decay))


RULES = {"adam": adam, "sgd": sgd, "adagrad": adagrad}


def _launch(
    kernel: Any, on: Elements, h: Hypers, fields: tuple[Tensor, ...], scalars: tuple[float, ...], **flags: Any
) -> None:
    count, kept = on.weight.numel(), on.kept
    if not count:
        return
    master = OWN if kept is None else LOW if kept.dtype == torch.int16 else WHOLE
    first, second = (*on.factors, on.weight, on.weight)[:2]
    kernel[(triton.cdiv(count, BLOCK),)](
        on.weight,
        on.weight if kept is None else kept,
        on.gradient,
        first,
        second,
        *fields,
        count,
        *scalars,
        MASTER=master,
        FACTORS=len(on.factors),
        MAXIMIZE=bool(h["maximize"]),
        **flags,
        BLOCK=BLOCK,
        enable_fp_fusion=False,
    )
