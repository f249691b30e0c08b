"""Ops on weights: fetch, store, gather, release, open.

Note [Versions of what is away]: autograd saves weights with their version and looks whether it is the same when
backward uses them. So the versions of a unit that leaves the device move far ahead, and back when the unit is opened: a
graph that nobody asks the unit for (runtime/hooks.py finds all but those that Python cannot see) is refused by autograd
as one whose weights were modified, instead of reading freed memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from overspill.program import Kind, Op
from overspill.runtime.executor import Handler
from overspill.runtime.lanes import Work
from overspill.specs import TierName
from overspill.tiers import Tier
from overspill.units.local import move_versions
from overspill.units.unit import Unit

if TYPE_CHECKING:
    from overspill.comm import Comm

AHEAD = 1 << 30
"""How far versions move: further than any training changes a weight in place, and not beyond 32 bits."""


class Weights:
    """Moves the flat buffers of units between the device and their homes."""

    def __init__(self, units: Sequence[Unit], tiers: Mapping[TierName, Tier], comm: Comm | None = None) -> None:
        self._units = units
        self._tiers = tiers
        self._comm = comm
        self._ahead: set[int] = set()
        """Units whose versions are moved."""
        for index, unit in enumerate(units):
            if unit.home is not None:
                self._move_versions(index, AHEAD)

    def handlers(self) -> dict[Kind, Handler]:
        return {
            Kind.FETCH: self._fetch,
            Kind.STORE: self._store,
            Kind.GATHER: self._gather,
            Kind.RELEASE: self._release,
            Kind.OPEN: self._open,
        }

    def move_in(self, unit: int) -> None:
        """A unit that is here lives here from now on."""
        assert self._units[unit].here and unit not in self._ahead, "only a unit that is open can stay"
        self._units[unit].home = None

    def _home(self, unit: Unit) -> Tier:
        assert unit.home is not None, f"unit {unit.spec.name} lives on the device and cannot move"
        return self._tiers[unit.home.tier]  # type: ignore[index]

    def _fetch(self, op: Op) -> Work:
        unit = self._units[op.unit]
        tier = self._home(unit)
        unit.grow()
        return lambda: unit.load(tier)

    def _store(self, op: Op) -> Work:
        unit = self._units[op.unit]
        tier = self._home(unit)
        assert unit.here, f"unit {unit.spec.name} is to be written home but is not on the device"
        return lambda: unit.store(tier)

    def _gather(self, op: Op) -> Work:
        unit, comm = self._units[op.unit], self._comm
        assert comm is not None, "only over ranks"
        assert unit.here, f"unit {unit.spec.name} is to be gathered but is not on the device"
        flat, stripes = unit.flat, unit.spec.stripes

        def gather() -> None:
            for stripe in stripes:
                bounds = [(b - stripe.begin) // stripe.dtype.itemsize for b in stripe.bounds]
                comm.gather(flat[stripe.begin : stripe.end].view(stripe.dtype), bounds)

        return gather

    def _release(self, op: Op) -> Work:
        unit = self._units[op.unit]

        def release() -> None:
            # A unit that was given back to a plain model has left already.
            if unit.here:
                unit.shrink()
                self._move_versions(op.unit, AHEAD)

        return release

    def _open(self, op: Op) -> Work:
        unit = self._units[op.unit]
        assert unit.here, f"unit {unit.spec.name} is to be opened but its bytes are not on the device"
        return lambda: self._move_versions(op.unit, -AHEAD)

    def _move_versions(self, index: int, by: int) -> None:
        """See Note [Versions of what is away]."""
        if (index in self._ahead) == (by > 0):
            return
        self._ahead ^= {index}
        move_versions(self._units[index].params, by)
