"""The fp32 masters of 16-bit parameters: reading and writing them whole, and noticing edits of the weights.

Note [Edited weights]: a weight and what is kept beside it belong together. If the user writes to a weight, what is kept
is out of date, and the new value is the master from then on. Most writes move the parameter's version. Ways to its
memory that do not (`.data`, `.numpy()`) are mostly used to read, so a fingerprint of the weights is taken when such a
way is handed out, and compared before the next update. What is kept is forgotten for the whole parameter.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from overspill.kernels import masters
from overspill.runtime.generation import as_flat
from overspill.runtime.pages import Pages, arrays_of
from overspill.runtime.weights import AHEAD
from overspill.specs import PartSpec
from overspill.units.unit import Unit

Place = tuple[int, int]
"""(unit, parameter)"""


class Masters:
    """Knows which parameters have masters and where their pages are. Weights must be on the device when asked for."""

    def __init__(self, units: Sequence[Unit], pages: Pages) -> None:
        self._units = units
        self._pages = pages
        self._parts: dict[Place, list[tuple[int, PartSpec]]] = {}
        for u, unit in enumerate(pages.model.units):
            for i, page in enumerate(unit.pages):
                for part in page.parts:
                    if unit.params[part.param].dtype in masters.KEPT:
                        self._parts.setdefault((u, part.param), []).append((i, part))
        self._versions = {place: self._version(place) for place in self._parts}
        self._places = {id(self._param(place)): place for place in self._parts}
        self._prints: dict[Place, Tensor] = {}
        self._edited: set[tuple[int, int, int]] = set()
        """(unit, page, parameter) of parts whose kept bytes are out of date."""

    def __contains__(self, place: object) -> bool:
        return place in self._parts

    def _param(self, place: Place) -> nn.Parameter:
        return self._units[place[0]].params[place[1]]

    def _version(self, place: Place) -> int:
        """As it is while the weights are here: see weights.py, Note [Versions of what is away]."""
        return self._param(place)._version % AHEAD

    # --- edits: see Note [Edited weights]

    def handed_out(self, place: Place) -> None:
        """Somebody gets at the memory of a weight, and may write to it unseen."""
        if place in self._parts and place not in self._prints:
            self._prints[place] = masters.fingerprint(self._units[place[0]].elements(place[1]))

    def due(self, params: Sequence[Place]) -> None:
        """An update is due for these parameters: look for edits so far, and count the update as none."""
        for place in params:
            self._look_at_version(place)
        torch.autograd.graph.increment_version([self._param(place) for place in params])
        for place in params:
            self._renew(place)

    def _renew(self, place: Place) -> None:
        if place in self._parts:
            self._versions[place] = self._version(place)

    def _look_at_version(self, place: Place) -> None:
        if place in self._parts and self._version(place) != self._versions[place]:
            self._mark(place)

    def _look_at_bytes(self, place: Place) -> None:
        taken = self._prints.pop(place, None)
        if taken is not None and not torch.equal(taken, masters.fingerprint(self._units[place[0]].elements(place[1]))):
            self._mark(place)

    def _mark(self, place: Place) -> None:
        self._edited.update((place[0], page, place[1]) for page, _ in self._parts[place])

    # --- for an update

    def current(self, unit: int, page: int, part: PartSpec, kept: Tensor) -> None:
        """Before a part is updated: what is kept of it goes with its weights."""
        place = (unit, part.param)
        if place not in self._parts:
            return
        if part.begin == 0:
            self._look_at_bytes(place)
        if (unit, page, part.param) in self._edited:
            self._edited.discard((unit, page, part.param))
            masters.forget(self._units[unit].elements(part.param, part.begin, part.end), kept)

    # --- from outside, while no update of the unit is pending

    def read(self, place: Place, device: torch.device | str = "cpu") -> Tensor:
        """A copy of a parameter's masters: fp32, of its shape."""
        spec = self._units[place[0]].spec.params[place[1]]
        out = torch.empty_strided(spec.shape, spec.stride, dtype=torch.float32, device=device)
        flat = as_flat(out)
        for begin, piece in self.pieces(place):
            flat[begin : begin + piece.numel()].copy_(piece)
        return out

    def pieces(self, place: Place) -> Iterator[tuple[int, Tensor]]:
        """A parameter's masters piece by piece, in memory order: (first element, fp32 [n])."""
        self._look_at_version(place)
        self._look_at_bytes(place)
        (u, param), format = place, self._pages.model.format
        for page, part in self._parts[place]:
            weight = self._units[u].elements(param, part.begin, part.end)
            memory = self._pages.read(u, page)
            kept = arrays_of(format, self._pages.spec(u, page), part, memory)[0].to(weight.device)
            yield part.begin, weight.float() if (u, page, param) in self._edited else masters.join(weight, kept)

    def accept(self, p: nn.Parameter, value: Tensor) -> bool:
        """Give a parameter a value of higher precision than its own; False if it has no master."""
        place = self._places.get(id(p))
        if place is not None:
            self.write(place, value)
        return place is not None

    def write(self, place: Place, value: Tensor) -> None:
        """Replace a parameter's masters, exactly; `value` has its shape."""
        (u, param), format = place, self._pages.model.format
        spec = self._units[u].spec.params[param]
        laid_out = torch.empty_strided(spec.shape, spec.stride, dtype=torch.float32, device=self._pages.device)
        flat = as_flat(laid_out.copy_(value))
        for page, part in self._parts[place]:
            memory = self._pages.read(u, page)
            weight = self._units[u].elements(param, part.begin, part.end)
            _split(flat[part.begin : part.end], weight, arrays_of(format, self._pages.spec(u, page), part, memory)[0])
            self._pages.write(u, page, memory)
            self._edited.discard((u, page, param))
        torch.autograd.graph.increment_version([self._param(place)])
        self._renew(place)
        self._prints.pop(place, None)


def _split(master: Tensor, weight: Tensor, kept: Tensor) -> None:
    """Into weights on the device and a page that may be in host memory."""
    here = kept if kept.device == weight.device else torch.empty_like(kept, device=weight.device)
    masters.split(master, weight, here)
    if here is not kept:
        kept.copy_(here)
