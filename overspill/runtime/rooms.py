"""One piece of device memory for all gradients of a unit, from the first that comes until the last is let go.

Note [Gradients in one piece]: autograd takes memory for each gradient where it finds some, between activations, and a
lazy update lets it go much later. What is free then is many small holes; large activations fit none of them, and the
allocator takes more and more, until at the end of the budget it gives all holes back to the driver and begins anew,
every step. In pieces as large as units, what is free stays in large pieces.
"""

import itertools
import weakref
from collections.abc import Mapping, Sequence

import torch

from overspill.runtime.executor import Executor
from overspill.runtime.generation import Generation
from overspill.specs import align
from overspill.units.unit import Unit

PIECES = {"cuda"}
"""Kinds of devices on which it is done: without a GPU large gradients have a mapping each."""
ROOM = "_overspill_room"
GROUP = 0


class _Room:
    def __init__(self, offsets: Mapping[int, list[int]], nbytes: int, device: torch.device) -> None:
        self.offsets = offsets
        """Of each unit's gradients."""
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.taken: set[tuple[int, int]] = set()


class Rooms:
    """Gradients move in as they come."""

    def __init__(self, units: Sequence[Unit], executor: Executor) -> None:
        self._device = executor.lanes.device
        self._executor = executor
        self._sizes = [[p.grad_bytes if p.trainable else 0 for p in unit.spec.params] for unit in units]
        self._rooms: dict[int, weakref.ref[_Room]] = {}
        """The last one of each unit, as long as it has gradients in it."""

    def move_in(self, generation: Generation) -> bool:
        """A gradient that lives on the device, if it is as wide as planned."""
        spec, value, unit = generation.spec, generation.value, generation.unit
        if value is None or value.device != self._device or self._device.type not in PIECES:
            return False
        if align(value.nbytes) != spec.grad_bytes or value.dtype != spec.dtype:
            return False
        found = self._rooms[unit]() if unit in self._rooms else None
        room = found if found is not None and (unit, generation.param) not in found.taken else self._new(unit)
        room.taken.add((unit, generation.param))
        begin = room.offsets[unit][generation.param]
        piece = room.memory[begin : begin + value.nbytes].view(value.dtype)
        generation.value = piece.as_strided(spec.shape, spec.stride, piece.storage_offset()).copy_(value)
        # The room is kept as long as one of its gradients is.
        setattr(generation.value, ROOM, room)
        return True

    def _new(self, unit: int) -> _Room:
        offsets: dict[int, list[int]] = {}
        end = 0
        for member in self._together(unit):
            begins = list(itertools.accumulate(self._sizes[member], initial=end))
            offsets[member], end = begins[:-1], begins[-1]
        room = _Room(offsets, end, self._device)
        self._rooms |= dict.fromkeys(offsets, weakref.ref(room))
        return room

    def _together(self, unit: int) -> list[int]:
        """The units that share a room with this one."""
        group: list[int] = []
        for other, placement in enumerate(self._executor.program.placements):
            if other != unit and (placement.grad != "device" or not sum(self._sizes[other])):
                continue
            group.append(other)
            if sum(sum(self._sizes[member]) for member in group) >= GROUP:
                if unit in group:
                    return group
                group = []
        return group
