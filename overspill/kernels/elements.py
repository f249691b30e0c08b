"""What an update works on, whoever carries it out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Elements:
    """Flat and contiguous arrays of one device, all of the same length."""

    weight: Tensor
    """fp32; or of 16 bits, with `kept`."""
    kept: Tensor | None
    """What is kept of the masters beside the weights: see masters.py."""
    gradient: Tensor
    """fp32, or of 16 bits."""
    factors: Sequence[Tensor]
    """fp32 [1] of the same device: what the gradient is multiplied with, one after the other; at most two."""
    arrays: Sequence[Tensor]
    """What is kept of the rule's fields: see codecs.py."""
    format: str = "exact"
    first: int = 0
    """Where the first element is in its parameter; like `key` for chance."""
    key: int = 0
    """The key for chance, of the parameter and the step: codecs.key_of."""
    skip: Tensor | None = None
    """fp32 [] of the same device: where it is not zero nothing is done. For executors that are `fused`."""

    @property
    def fields(self) -> Sequence[Tensor]:
        return self.arrays[::2] if self.format == "compact" else self.arrays

    @property
    def tops(self) -> Sequence[Tensor]:
        """The exponents of blocks, where there are any."""
        return self.arrays[1::2] if self.format == "compact" else ()


GRAIN = 16
"""Elements, and bytes of addresses: Triton has other kernels for what is no multiple of it."""


class Addresses(NamedTuple):
    """As Elements on a GPU, but only where they are: views of them take longer to make than a kernel to launch."""

    weight: int
    kept: int | None
    gradient: int
    factors: tuple[int, ...]
    arrays: tuple[int, ...]
    numel: int
    dtypes: tuple[torch.dtype, torch.dtype | None, torch.dtype]
    """The dtypes of weights, of what is kept, of gradients."""
    format: str
    first: int
    key: int
    skip: int | None = None

    def joined(self, other: "Addresses") -> "Addresses | None":
        """With others that lie right behind these in every array; None: they do not, or are of another kind, or chance
        knows elements by their numbers, or one of them is better off alone, for it would slow the others down."""
        alike = (self.factors, self.dtypes, self.format, self.skip) == (
            other.factors,
            other.dtypes,
            other.format,
            other.skip,
        )
        if not alike or self.format != "exact" or self.numel % GRAIN or other.numel % GRAIN:
            return None
        pairs = zip(self._places(), other._places(), strict=True)
        behind = all(one + self.numel * size == next for (one, size), (next, _) in pairs)
        return self._replace(numel=self.numel + other.numel) if behind else None

    def _places(self) -> list[tuple[int, int]]:
        """(address, bytes of an element) of every array, where states are exact."""
        weight, kept, gradient = self.dtypes
        found = [(self.weight, weight.itemsize), (self.gradient, gradient.itemsize)]
        if self.kept is not None and kept is not None:
            found.append((self.kept, kept.itemsize))
        return found + [(array, torch.float32.itemsize) for array in self.arrays]
