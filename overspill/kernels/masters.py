"""fp32 masters beside 16-bit weights.

Note [Exact masters]: a bf16 weight is the upper half of an fp32 number. The master is rounded to it half up (away from
zero at ties), and what is kept is the signed 16-bit difference of the two bit patterns, so that weight and difference
give the master back exactly, infinities and denormals included; NaN stays NaN. Rounding half to even would make a
difference of +32768 possible, which does not fit. An fp16 weight is no prefix of its master, so there the whole master
is kept, and the weight is rounded as torch does it. Where states are compact, 8 bits are kept of the 16: codecs.py.
"""

import torch
from torch import Tensor

from overspill.kernels.codecs import join8, split8

KEPT: dict[torch.dtype, torch.dtype] = {torch.bfloat16: torch.int16, torch.float16: torch.float32}
"""Compute dtype -> dtype of what is kept beside each weight. A weight of another dtype is its own master."""

HALF = 0x8000
QUIET = 0x40
"""The bit of a bf16 NaN's upper half that keeps it a NaN whatever was cut off."""


def join(weight: Tensor, kept: Tensor) -> Tensor:
    """The masters: fp32 [n], new, from weights bf16 or fp16 [n] and what was kept [n]."""
    if kept.dtype == torch.float32:
        return kept.clone()
    if kept.dtype == torch.int8:
        return join8(weight, kept)
    return weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(kept).view(torch.float32)


def split(master: Tensor, weight: Tensor, kept: Tensor, noise: Tensor | None = None) -> None:
    """Round masters fp32 [n] into `weight` bf16 or fp16 [n], and keep in `kept` [n] what is needed to join them. Only 8
    bits are kept by chance, with `noise`, or else what is nearest."""
    if kept.dtype == torch.float32:
        weight.copy_(master)
        kept.copy_(master)
        return
    if kept.dtype == torch.int8:
        upper, rest = split8(master, torch.full_like(master, 0x80, dtype=torch.int64) if noise is None else noise)
        weight.copy_(upper)
        kept.copy_(rest)
        return
    bits, nan = master.view(torch.int32), master.isnan()
    upper = bits.add(HALF).bitwise_right_shift_(16)
    # One more array of this length is all that it takes.
    rest = upper.bitwise_left_shift(16)
    kept.copy_(torch.sub(bits, rest, out=rest).masked_fill_(nan, 0))
    quiet = torch.bitwise_right_shift(bits, 16, out=rest).bitwise_or_(QUIET)
    weight.view(torch.int16).copy_(torch.where(nan, quiet, upper, out=upper))


def forget(weight: Tensor, kept: Tensor) -> None:
    """The weights are the masters now, as after an edit of the weights."""
    if kept.dtype == torch.float32:
        kept.copy_(weight)
    else:
        kept.zero_()


def fingerprint(weight: Tensor) -> Tensor:
    """Two sums that change if any of the 16-bit weights [n] does: int64 [2]."""
    bits = weight.view(torch.int16)
    total = torch.zeros(2, dtype=torch.int64, device=weight.device)
    for begin in range(0, bits.numel(), _PIECE):
        piece = bits[begin : begin + _PIECE].to(torch.int64)
        order = torch.arange(begin + 1, begin + 1 + piece.numel(), device=weight.device)
        total += torch.stack([piece.sum(), order.mul_(_ODD).mul_(piece).sum()])
    return total


_PIECE = 1 << 18
"""Elements at a time: two arrays of 8 bytes for each of them are all that it takes."""
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""An odd multiplier, so that no two places weigh the same; sums wrap around."""
