"""Notices when the user writes to 16-bit weights that have masters.

Note [Edited weights]: a weight and what is kept beside it belong together. If the user writes to a weight, what is kept
is out of date, and the new value is the master from then on. Most writes move the parameter's version. Ways to its
memory that do not (`.data`, `.numpy()`) are mostly used to read, so a fingerprint of the weights is taken when such a
way is handed out, compared before every update, and renewed after it while somebody still holds views. What is kept is
forgotten for the whole parameter.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from overspill.kernels.masters import fingerprint
from overspill.runtime.weights import AHEAD
from overspill.specs import PartSpec
from overspill.units.local import version_of
from overspill.units.unit import Unit

Place = tuple[int, int]
"""(unit, parameter)"""
Parts = Mapping[Place, Sequence[tuple[int, PartSpec]]]
"""The pages and parts of each parameter that has a master."""


class Edits:
    """Watches the weights that have masters, each rank those that it updates. `stale`: (unit, parameter, first element)
    of what is kept and out of date."""

    def __init__(self, units: Sequence[Unit], parts: Parts) -> None:
        self._units = units
        self._parts = parts
        self._versions = {place: self._version(place) for place in parts}
        self._prints: dict[Place, Tensor] = {}
        self.stale: set[tuple[int, int, int]] = set()

    def _param(self, place: Place) -> nn.Parameter:
        return self._units[place[0]].params[place[1]]

    def _version(self, place: Place) -> int:
        """As it is while the weights are here: see weights.py, Note [Versions of what is away]."""
        return version_of(self._param(place)) % AHEAD

    def handed_out(self, place: Place) -> None:
        """Somebody gets at the memory of a weight, and may write to it unseen."""
        if place in self._parts and place not in self._prints:
            self._prints[place] = self._print(place)

    def _print(self, place: Place) -> Tensor:
        """Of the weights that this rank updates."""
        unit = self._units[place[0]]
        prints = [fingerprint(unit.elements(place[1], part.begin, part.end)) for _, part in self._parts[place]]
        return torch.cat(prints) if prints else torch.empty(0, device="cpu")

    def due(self, params: Sequence[Place]) -> None:
        """An update is due for these parameters: look for edits so far, and count the update as none."""
        # Not by the door of each parameter: this is no use of them.
        with torch._C.DisableTorchFunctionSubclass():
            for place in params:
                self.look_at_version(place)
            torch.autograd.graph.increment_version([self._param(place) for place in params])
            for place in params:
                if place in self._parts:
                    self._versions[place] = self._version(place)

    def watches(self, unit: int) -> bool:
        """Whether weights of a unit are compared with what they were."""
        return any(place[0] == unit for place in tuple(self._prints))

    def is_watched(self, place: Place, part: PartSpec) -> bool:
        """Whether a part's weights may have been edited, or were."""
        return place in self._prints or (*place, part.begin) in self.stale

    def look_at_version(self, place: Place) -> None:
        if place in self._parts and self._version(place) != self._versions[place]:
            self._mark(place)

    def look_at_bytes(self, place: Place) -> None:
        taken, unit = self._prints.get(place), self._units[place[0]]
        if taken is None:
            return
        now = self._print(place)
        if not torch.equal(taken, now):
            self._mark(place)
        if unit.viewed:
            self._prints[place] = now
        else:
            del self._prints[place]

    def _mark(self, place: Place) -> None:
        self.stale.update((*place, part.begin) for _, part in self._parts[place])

    def updated(self, unit: int, part: PartSpec) -> None:
        """After a part is updated: whoever still has a way to the weights is watched from their new values on."""
        place = (unit, part.param)
        if place in self._prints and part is self._parts[place][-1][1]:
            self._prints[place] = self._print(place)

    def replaced(self, place: Place) -> None:
        """Weights and what is kept were written together: they are one again."""
        self.due([place])
        self.stale -= {(*place, part.begin) for _, part in self._parts[place]}
        self._prints.pop(place, None)
