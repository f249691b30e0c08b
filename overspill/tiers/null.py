"""A tier that keeps nothing, so that everything above tiers can be tested without bytes."""

from torch import Tensor

from overspill.specs import align
from overspill.tiers.base import Slot, check_bytes

_ALIGNMENT = 512


class NullTier:
    """Hands out slots without limit, moves nothing, and counts what it was asked to move."""

    def __init__(self, name: str = "null") -> None:
        self.name = name
        self.loaded = 0
        self.stored = 0
        self._used = 0

    def reserve(self, nbytes: int) -> Slot:
        """Hand out a place that does not exist."""
        offset = align(self._used, _ALIGNMENT)
        self._used = offset + nbytes
        return Slot(self.name, nbytes, offset)

    def load(self, slot: Slot, out: Tensor) -> None:
        """Leave `out` (uint8, at most slot.nbytes) as it is."""
        check_bytes(self.name, slot, out)
        self.loaded += out.numel()

    def store(self, slot: Slot, src: Tensor) -> None:
        """Drop `src` (uint8, at most slot.nbytes)."""
        check_bytes(self.name, slot, src)
        self.stored += src.numel()

    def used(self) -> int:
        """Bytes a real tier would have taken."""
        return self._used

    def close(self) -> None:
        """Nothing to give back."""
