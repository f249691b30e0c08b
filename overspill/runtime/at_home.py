"""Gradients as the host's cores get them: where they live, if that is host memory; else as they are on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from overspill.runtime.gradient_bytes import GradientBytes
from overspill.runtime.updates import Share, place_at
from overspill.tiers import HostTier


@dataclass(frozen=True, slots=True)
class ForCores:
    """A part's gradient, as its bytes are."""

    gradient: Tensor
    factors: Sequence[Tensor]
    """On the device: see Share.factors."""
    at_home: bool
    """Whether those are the bytes in its home, in host memory, of which no copy is needed."""


def for_cores(share: Share, bytes: GradientBytes, device: torch.device) -> ForCores | None:
    """Of an update whose gradients are computed, and at home if they live elsewhere. None: it takes more than a few
    factors, or the gradient is neither on the device nor in its home in host memory.

    What is at home may be read until the update of its unit is done: the next gradient waits for that before it is
    stored there (program/gradients.py), and one that is applied a step later has a home of its own.
    """
    factors, generation = share.factors(), share.due.generation
    if factors is None:
        return None
    # In this order: another gradient may claim the home meanwhile, and until it has, this one is still there.
    home = bytes.home_of(generation)
    if home is not None and bytes.is_at(generation):
        tier, slot = place_at(home, generation, share.part)
        if not isinstance(tier, HostTier):
            return None
        return ForCores(tier.tensor(slot).view(generation.dtype), factors, at_home=True)
    here = generation.value
    if here is None or here.device != device:
        return None
    return ForCores(generation.part(here, share.part.begin, share.part.end), factors, at_home=False)
