"""One piece of device memory for all gradients of a unit, from the first that comes until the last is let go.

Note [Gradients in one piece]: autograd takes memory for each gradient where it finds some, between activations, and a
lazy update lets it go much later. What is free then is many small holes; large activations fit none of them, and the
allocator takes more and more, until at the end of the budget it gives all holes back to the driver and begins anew,
every step. In pieces as large as units, what is free stays in large pieces.
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from overspill.runtime.generation import FLAT, Generation
from overspill.runtime.loans import Loans
from overspill.specs import align
from overspill.units.unit import Unit

PIECES = {"cuda"}
"""Kinds of devices on which it is done: without a GPU large gradients have a mapping each."""
ROOM = "_overspill_room"


class _Room:
    def __init__(self, nbytes: int, device: torch.device, loans: Loans) -> None:
        loans.add_gradients(nbytes)
        weakref.finalize(self, loans.remove_gradients, nbytes).atexit = False
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._as: dict[torch.dtype, Tensor] = {}
        self.taken: set[int] = set()

    def of(self, dtype: torch.dtype) -> Tensor:
        """All of it, as an array."""
        if dtype not in self._as:
            self._as[dtype] = self._memory.view(dtype)
        return self._as[dtype]


class Rooms:
    """Gradients move in as they come."""

    def __init__(self, units: Sequence[Unit], device: torch.device) -> None:
        self._device = device
        self.loans = Loans()
        self._offsets: list[list[int]] = []
        for unit in units:
            ends = [0]
            for p in unit.spec.params:
                ends.append(ends[-1] + (p.grad_bytes if p.trainable else 0))
            self._offsets.append(ends)
        self._rooms: dict[int, weakref.ref[_Room]] = {}
        """The last one of each unit, as long as it has gradients in it."""

    def move_in(self, generation: Generation) -> bool:
        """A gradient that lives on the device, if it is as wide as planned."""
        spec, value, unit = generation.spec, generation.value, generation.unit
        if value is None or value.device != self._device or self._device.type not in PIECES:
            return False
        if align(value.nbytes) != spec.grad_bytes or value.dtype != spec.dtype:
            self.loans.end("a gradient is of another width than planned, and not counted")
            return False
        found = self._rooms[unit]() if unit in self._rooms else None
        room = found if found is not None and generation.param not in found.taken else self._new(unit)
        room.taken.add(generation.param)
        begin = self._offsets[unit][generation.param] // spec.dtype.itemsize
        array = room.of(spec.dtype)
        generation.value = array.as_strided(spec.shape, spec.stride, begin).copy_(value)
        # The room is kept as long as one of its gradients is.
        setattr(generation.value, ROOM, room)
        setattr(generation.value, FLAT, (array, begin))
        return True

    def _new(self, unit: int) -> _Room:
        self.loans.stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        room = _Room(self._offsets[unit][-1], self._device, self.loans)
        self._rooms[unit] = weakref.ref(room)
        return room
