"""The C library's memory: what torch's host tensors are made of."""

import contextlib
import ctypes
import os
from collections.abc import Iterator

from overspill.specs import KiB, MiB

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_SMALL = 64 * KiB
_LARGE = 32 * MiB


@contextlib.contextmanager
def freed_at_once() -> Iterator[None]:
    """Inside, tensors of 64 KiB and more are mapped one by one, so that their memory goes back when they do.

    glibc maps large allocations one by one at first, but after the first one is freed it takes those up to 32 MiB from
    its heap, where aligned ones leave gaps that fit nothing: a model that was built piece by piece in 128 MiB took
    460 MiB. Afterwards the values are those at which glibc would have arrived by itself.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or not hasattr(ctypes.CDLL(None), "mallopt"):
        yield  # the user has chosen, or it is another C library
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_MMAP_THRESHOLD, _SMALL)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _LARGE)
        mallopt(_TRIM_THRESHOLD, 2 * _LARGE)
