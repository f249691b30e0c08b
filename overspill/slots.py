"""What a page takes where it passes: a slot of the device's ring, or staging memory for the host's cores."""

from collections.abc import Sequence

import torch

from overspill.specs import ModelSpec, Placement, align

CORES_STAGED = 6
"""Pages that may be with the host's cores: one that is updated, others on their way down or up."""
FACTORS_STAGED = 512
"""Bytes for the numbers that the gradient of a part is multiplied with."""


def ring_slot_bytes(model: ModelSpec, placements: Sequence[Placement], wide: bool = False) -> int:
    """What passes through the device for one page, at most: of its state and its gradients what lives elsewhere.
    `wide`: where gradients are fp32 though the plan has room for less."""
    most = 0
    for unit, placement in zip(model.units, placements, strict=True):
        for page in unit.pages:
            grads = sum(align(torch.float32.itemsize * part.numel) for part in page.parts) if wide else page.grad_bytes
            state = page.state_bytes if placement.state != "device" else 0
            most = max(most, state + (max(grads, page.grad_bytes) if placement.grad != "device" else 0))
    return most


def cores_used(threads: int) -> int:
    """How many of so many threads update pages: the loop, the thread of pages and that of the cores go on meanwhile."""
    return max(1, threads - 3)


def staged_bytes(model: ModelSpec) -> int:
    """What one page's weights, gradients and factors take at most, where the host's cores update it."""
    most, wide = 0, torch.float32.itemsize
    for unit in model.units:
        for page in unit.pages:
            pairs = [(part.numel, unit.params[part.param].dtype.itemsize) for part in page.parts]
            sizes = (align(numel * item) + align(numel * wide) + FACTORS_STAGED for numel, item in pairs)
            most = max(most, sum(sizes))
    return align(most, 4096)  # whole pages of the host's memory
