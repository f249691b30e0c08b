"""Kernels run on a GPU, or on the CPU by Triton's interpreter, which is slow: there with fewer numbers."""

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
kernels = pytest.mark.interpreted
"""For tests of kernels alone: they run in both."""


def fewer(count: int) -> int:
    """Elements; a multiple of 16 stays one."""
    return count % 16 + count // 9 // 16 * 16 if INTERPRETED else count
