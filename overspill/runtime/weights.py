"""Ops on weights: fetch, store, release, open."""

from collections.abc import Mapping, Sequence

from overspill.program import Kind, Op
from overspill.runtime.executor import Handler
from overspill.runtime.lanes import Work
from overspill.specs import TierName
from overspill.tiers import Tier
from overspill.units.unit import Unit


class Weights:
    """Moves the flat buffers of units between the device and their homes."""

    def __init__(self, units: Sequence[Unit], tiers: Mapping[TierName, Tier]) -> None:
        self._units = units
        self._tiers = tiers

    def handlers(self) -> dict[Kind, Handler]:
        return {
            Kind.FETCH: self._fetch,
            Kind.STORE: self._store,
            Kind.RELEASE: self._release,
            Kind.OPEN: self._open,
        }

    def _home(self, unit: Unit) -> Tier:
        assert unit.home is not None, f"unit {unit.spec.name} lives on the device and cannot move"
        return self._tiers[unit.home.tier]  # type: ignore[index]

    def _fetch(self, op: Op) -> Work:
        unit = self._units[op.unit]
        tier, home, flat = self._home(unit), unit.home, unit.flat
        unit.grow()
        assert home is not None
        return lambda: tier.load(home, flat)

    def _store(self, op: Op) -> Work:
        unit = self._units[op.unit]
        tier, home, flat = self._home(unit), unit.home, unit.flat
        assert home is not None
        assert unit.here, f"unit {unit.spec.name} is to be written home but is not on the device"
        return lambda: tier.store(home, flat)

    def _release(self, op: Op) -> Work:
        return self._units[op.unit].shrink

    def _open(self, op: Op) -> Work:
        unit = self._units[op.unit]
        assert unit.here, f"unit {unit.spec.name} is to be opened but its bytes are not on the device"
        return _nothing


def _nothing() -> None: ...
