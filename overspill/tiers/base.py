"""What every tier has in common: slots, and five things to do with them."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for `nbytes` bytes in a tier; `offset` counts from the start of the arena or of the file."""

    tier: str
    nbytes: int
    offset: int
    file: int = 0

    def piece(self, begin: int, nbytes: int) -> "Slot":
        """Some of its bytes; on a disk they begin at a multiple of a block, as every slot does."""
        assert begin >= 0 and begin + nbytes <= self.nbytes, f"{nbytes} bytes at {begin} are not in {self}"
        return Slot(self.tier, nbytes, self.offset + begin, self.file)


class Tier(Protocol):
    """Where bytes live. `load` and `store` take 1-D contiguous uint8 tensors on cpu or cuda."""

    name: str

    def reserve(self, nbytes: int) -> Slot:
        """Hand out a place; TierError when the capacity is exceeded."""

    def load(self, slot: Slot, out: Tensor) -> None:
        """Fill `out` (uint8, at most slot.nbytes) with the first bytes of the slot."""

    def store(self, slot: Slot, src: Tensor) -> None:
        """Overwrite the first bytes of the slot with `src` (uint8, at most slot.nbytes); the others stay."""

    def used(self) -> int:
        """Bytes taken by slots, padding between them included."""

    def close(self) -> None:
        """Give everything back. May be called twice."""


def check_bytes(tier: str, slot: Slot, tensor: Tensor) -> None:
    """Assert that `tensor` may be moved from or to `slot` by the tier of this name."""
    assert slot.tier == tier, f"a slot of tier {slot.tier!r} was given to tier {tier!r}"
    assert tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous(), (
        f"expected a 1-D contiguous uint8 tensor, found {tensor.dtype} of shape {tuple(tensor.shape)}"
    )
    assert tensor.numel() <= slot.nbytes, f"{tensor.numel()} bytes do not fit a slot of {slot.nbytes}"


def no_room(tier: str, capacity: int, used: int, asked: int) -> str:
    """The message for a slot that does not fit."""
    return (
        f"expected at most {capacity} bytes on the {tier} tier, found that {used} are used and {asked} more asked for; "
        f"give it at least {used + asked} bytes"
    )
