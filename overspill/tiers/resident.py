"""The device itself as a home: where each rank keeps its share of weights that are put together for use."""

import torch
from torch import Tensor

from overspill.tiers.base import Slot, check_bytes


class DeviceTier:
    """Slots in device memory, one tensor each."""

    name = "device"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: list[Tensor] = []

    def reserve(self, nbytes: int) -> Slot:
        self._slots.append(torch.empty(nbytes, dtype=torch.uint8, device=self._device))
        return Slot(self.name, nbytes, 0, len(self._slots) - 1)

    def load(self, slot: Slot, out: Tensor) -> None:
        check_bytes(self.name, slot, out)
        out.copy_(self._slots[slot.file][slot.offset : slot.offset + out.numel()], non_blocking=True)

    def store(self, slot: Slot, src: Tensor) -> None:
        check_bytes(self.name, slot, src)
        self._slots[slot.file][slot.offset : slot.offset + src.numel()].copy_(src, non_blocking=True)

    def used(self) -> int:
        return sum(slot.numel() for slot in self._slots)

    def close(self) -> None:
        self._slots.clear()
