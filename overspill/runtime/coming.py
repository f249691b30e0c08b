"""Gradients that autograd just made, until those of a unit move into their room together.

Note [Together]: one kernel copies several gradients; to launch one for each takes the host a few dozen microseconds. So
those of a unit stay where autograd put them until the last of them is there, as long as they are a small share of all.
Nobody can tell: `p.grad` refers to their generation, and that to wherever the bytes are. What waits is measured with
the activations.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Variable

from overspill.runtime.generation import Generation
from overspill.runtime.rooms import Rooms
from overspill.tiers import streams
from overspill.trace import own_time
from overspill.units.unit import Unit

SHARE = 16
"""Of all gradients, what may wait is one part in so many."""


class Coming:
    """The gradients of one unit that wait."""

    def __init__(self, rooms: Rooms, units: Sequence[Unit]) -> None:
        self._rooms = rooms
        self._expected = [sum(p.trainable for p in unit.spec.params) for unit in units]
        self._most = sum(unit.spec.role_bytes("grad") for unit in units) // SHARE
        self._found: list[tuple[Generation, Tensor]] = []
        """Gradients that wait, with the bytes that came."""
        self._nbytes = 0
        self._key = (-1, -1, 0)
        """What those that wait have in common: the backward pass at whose end none will, the unit, the stream."""
        self._announced = 0
        """Bytes that will be asked for, for their room."""

    def add(self, generation: Generation, value: Tensor) -> bool:
        """Whether there is room for it."""
        if value.layout is not torch.strided or not self._rooms.has_room(generation.unit, generation.param, value):
            return False
        task = torch._C._current_graph_task_id()
        key = (task, generation.unit, streams.current(value.device))
        if key != self._key:
            self.take()
            if task not in (-1, self._key[0]):
                Variable._execution_engine.queue_callback(self._end)
            self._key = key
        if not self._found:
            self._announced = self._rooms.announce(generation.unit, generation.param)
        self._found.append((generation, value))
        self._nbytes += value.nbytes
        if task == -1 or len(self._found) == self._expected[generation.unit] or self._nbytes > self._most:
            self.take()
        return True

    def take(self) -> None:
        """Nothing waits any more."""
        found, self._found, self._nbytes = self._found, [], 0
        self._rooms.loans.want(-self._announced)
        self._announced = 0
        # Something may have been added to one, which has other bytes then.
        still = [(generation, value) for generation, value in found if generation.value is value]
        places = self._rooms.move_in_together([(g.unit, g.param, value) for g, value in still], self._key[2])
        for (generation, _), place in zip(still, places, strict=True):
            generation.value = place

    def _end(self) -> None:
        """Of a backward pass."""
        with own_time:
            self.take()
        self._key = (-1, -1, 0)
