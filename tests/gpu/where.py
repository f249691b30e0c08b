"""Kernels run on a GPU, or on the CPU by Triton's interpreter, which is slow: there with fewer numbers."""

import os
from dataclasses import replace

import pytest
from torch import Tensor

from overspill.kernels.elements import Elements

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
kernels = pytest.mark.interpreted
"""For tests of kernels alone: they run in both."""


def fewer(count: int) -> int:
    """Elements; a multiple of 16 stays one."""
    return count % 16 + count // 9 // 16 * 16 if INTERPRETED else count


def moved(on: Elements, device: str) -> Elements:
    """Copies, there."""

    def copy(x: Tensor) -> Tensor:
        return x.to(device, copy=True)

    return replace(
        on,
        weight=copy(on.weight),
        kept=None if on.kept is None else copy(on.kept),
        gradient=copy(on.gradient),
        factors=[copy(f) for f in on.factors],
        arrays=[copy(a) for a in on.arrays],
        skip=None if on.skip is None else copy(on.skip),
    )
