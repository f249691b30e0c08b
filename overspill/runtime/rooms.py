"""One piece of device memory for all gradients of a unit, from the first that comes until the last is let go.

Note [Gradients in one piece]: autograd takes memory for each gradient where it finds some, between activations, and a
lazy update lets it go much later. What is free then is many small holes; large activations fit none of them, and the
allocator takes more and more, until at the end of the budget it gives all holes back to the driver and begins anew,
every step. In pieces as large as units, what is free stays in large pieces.
"""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from overspill.runtime.generation import FLAT, Generation
from overspill.runtime.loans import Loans
from overspill.specs import ParamSpec, Placement, UnitSpec
from overspill.tiers import streams
from overspill.units.unit import Unit

PIECES = {"cuda"}
"""Kinds of devices on which it is done: without a GPU large gradients have a mapping each."""
ROOM = "_overspill_room"


class _Room:
    def __init__(self, nbytes: int, device: torch.device, loans: Loans, stream: int) -> None:
        self._loans, self._nbytes = loans, 0
        loans.add_gradients(nbytes)
        self._nbytes = nbytes
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.stream = stream
        """The stream it was allocated for: others may write to it behind what that one did with this memory before."""
        self._as: dict[torch.dtype, Tensor] = {}
        self.taken: set[int] = set()

    def __del__(self) -> None:
        self._loans.remove_gradients(self._nbytes)

    def of(self, dtype: torch.dtype) -> Tensor:
        """All of it, as an array."""
        if dtype not in self._as:
            self._as[dtype] = self._memory.view(dtype)
        return self._as[dtype]


class _Place(NamedTuple):
    """Of a parameter's gradient in its unit's piece."""

    begin: int
    """The first element."""
    shape: Sequence[int]
    stride: Sequence[int]
    dtype: torch.dtype | None
    """The dtype that it must have; None: it has none, see `_has_place`."""


def _has_place(p: ParamSpec) -> bool:
    """Not where it is planned wider than autograd makes it, for a sum: that has memory of its own."""
    return p.trainable and p.grad_item == p.dtype.itemsize


def bytes_in_rooms(units: Sequence[UnitSpec], placements: Sequence[Placement]) -> int:
    """Of all gradients that live on the device and have places."""
    here = (u for u, placement in zip(units, placements, strict=True) if placement.grad == "device")
    return sum(p.grad_bytes * p.grads for u in here for p in u.params if _has_place(p))


def before_it_goes(value: Tensor) -> None:
    """The current stream is behind all uses of a gradient. When that is let go, its memory is the stream's again for
    which it was allocated: that one comes behind them too."""
    room: _Room | None = value.__dict__.get(ROOM)
    if room is not None:
        streams.follow(value.device, room.stream, streams.current(value.device))


class Rooms:
    """Gradients move in as they come."""

    def __init__(self, units: Sequence[Unit], device: torch.device) -> None:
        self._device = device
        self.loans = Loans()
        self._places: list[list[_Place]] = []
        self._sizes: list[int] = []
        for unit in units:
            places, end = [], 0
            for p in unit.spec.params:
                places.append(_Place(end // p.dtype.itemsize, p.shape, p.stride, p.dtype if _has_place(p) else None))
                end += p.grad_bytes if _has_place(p) else 0
            self._places.append(places)
            self._sizes.append(end)
        self._rooms: dict[int, weakref.ref[_Room]] = {}
        """The last one of each unit, as long as it has gradients in it."""

    def move_in(self, generation: Generation) -> bool:
        """A gradient that lives on the device, if it is as wide as planned."""
        value = generation.value
        if value is None or not self.has_room(generation.unit, generation.param, value):
            return False
        generation.value = self._place(generation.unit, generation.param).copy_(value)
        return True

    def has_room(self, unit: int, param: int, value: Tensor) -> bool:
        if value.device != self._device or self._device.type not in PIECES:
            return False
        planned = self._places[unit][param].dtype
        if planned is None:
            return False
        if value.dtype != planned:
            self.loans.end("a gradient is of another width than planned, and not counted")
            return False
        return True

    def move_in_together(self, found: Sequence[tuple[int, int, Tensor]], stream: int) -> list[Tensor]:
        """Gradients that have room: (unit, parameter, bytes), which a stream made, perhaps another one than the current
        one."""
        places = [self._place(unit, param) for unit, param, _ in found]
        if places:
            here = streams.current(self._device)
            streams.follow(self._device, here, stream)
            torch._foreach_copy_(places, [value for *_, value in found])
            # Their memory is that stream's again.
            streams.follow(self._device, stream, here)
        return places

    def announce(self, unit: int, param: int) -> int:
        """A gradient will come: whoever has lent its memory may give it back meanwhile. How many bytes are wanted for
        it."""
        nbytes = self._sizes[unit] if self._last(unit, param) is None else 0
        self.loans.want(nbytes)
        return nbytes

    def _last(self, unit: int, param: int) -> _Room | None:
        """The room that a gradient has a place in; None: it needs a new one."""
        last = self._rooms[unit]() if unit in self._rooms else None
        return None if last is None or param in last.taken else last

    def _place(self, unit: int, param: int) -> Tensor:
        """Where a gradient lives from now on."""
        begin, shape, stride, dtype = self._places[unit][param]
        assert dtype is not None, "it has room"
        room = self._last(unit, param) or self._new(unit)
        streams.follow(self._device, streams.current(self._device), room.stream)
        room.taken.add(param)
        array = room.of(dtype)
        found = array.as_strided(shape, stride, begin)
        # The room is kept as long as one of its gradients is.
        found.__dict__.update({ROOM: room, FLAT: (array, begin)})
        return found

    def _new(self, unit: int) -> _Room:
        self.loans.stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        room = _Room(self._sizes[unit], self._device, self.loans, streams.current(self._device))
        self._rooms[unit] = weakref.ref(room)
        return room
