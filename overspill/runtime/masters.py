"""The fp32 masters of 16-bit parameters: reading and writing them whole. edits.py notices when weights are edited."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from overspill.kernels import masters
from overspill.runtime.collect import Collector
from overspill.runtime.edits import Edits, Place
from overspill.runtime.generation import as_flat
from overspill.runtime.pages import Pages, kept_of
from overspill.runtime.ranks import Meeting
from overspill.specs import KERNEL_PIECE, PartSpec
from overspill.units.local import is_wrapper, part_for
from overspill.units.unit import Unit


class Masters:
    """Knows which parameters have masters and where their pages are. Weights must be on the device when asked for."""

    def __init__(self, units: Sequence[Unit], pages: Pages, collector: Collector | None = None) -> None:
        self._units = units
        self._pages = pages
        self._collector = collector if collector is not None and collector.divided else None
        if collector is not None:
            collector.gives[Meeting.MASTER] = self._share
        self._parts: dict[Place, list[tuple[int, PartSpec]]] = {}
        for u, unit in enumerate(pages.model.units):
            self._parts |= {(u, i): [] for i, p in enumerate(unit.params) if p.master}
            for i, page in enumerate(unit.pages):
                for part in page.parts:
                    if unit.params[part.param].master:
                        self._parts[u, part.param].append((i, part))
        self.edits = Edits(units, self._parts)
        self._places = {id(self._param(place)): place for place in self._parts}
        self.factor: Callable[[], Tensor] | None = None
        """Under fp16, what undoes the scale of the loss."""

    def __contains__(self, place: object) -> bool:
        return place in self._parts

    def _param(self, place: Place) -> nn.Parameter:
        return self._units[place[0]].params[place[1]]

    # --- for an update

    def current(self, unit: int, part: PartSpec, kept: Tensor) -> None:
        """Before a part is updated: what is kept of it goes with its weights."""
        place = (unit, part.param)
        if place not in self._parts:
            return
        if part is self._parts[place][0][1]:
            self.edits.look_at_bytes(place)
        if (unit, part.param, part.begin) in self.edits.stale:
            self.edits.stale.discard((unit, part.param, part.begin))
            masters.forget(self._units[unit].elements(part.param, part.begin, part.end), kept)

    # --- from outside, while no update of the unit is pending

    def read(self, place: Place) -> Tensor:
        """A copy of a parameter's masters: fp32, of its shape, in host memory."""
        spec = self._units[place[0]].spec.params[place[1]]
        out = torch.empty_strided(spec.shape, spec.stride, dtype=torch.float32, device="cpu")
        flat = as_flat(out)
        for begin, piece in self.pieces(place):
            flat[begin : begin + piece.numel()].copy_(piece)
        return out

    def pieces(self, place: Place) -> Iterator[tuple[int, Tensor]]:
        """A parameter's masters piece by piece, in memory order: (first element, fp32 [n])."""
        if self._collector is not None:
            yield 0, self._collector.whole(Meeting.MASTER, place)
        else:
            yield from self._own(place)

    def _share(self, unit: int, param: int, which: int) -> Tensor:
        """What this rank has of a parameter's masters."""
        span = self._units[unit].spec.params[param].owned
        out = torch.zeros(span.room, dtype=torch.float32, device=self._pages.device)
        for begin, piece in self._own((unit, param)):
            at = span.locate(begin)
            out[at : at + piece.numel()].copy_(piece)
        return out

    def _own(self, place: Place) -> Iterator[tuple[int, Tensor]]:
        self.edits.look_at_version(place)
        self.edits.look_at_bytes(place)
        u, param = place
        for page, part in self._parts[place]:
            weight = self._units[u].elements(param, part.begin, part.end)
            kept = kept_of(self._pages.spec(u, page), part, self._pages.read(u, page))
            stale = (u, param, part.begin) in self.edits.stale
            for begin in range(0, part.numel, KERNEL_PIECE):
                own = weight[begin : begin + KERNEL_PIECE]
                rest = kept[begin : begin + KERNEL_PIECE].to(weight.device)
                yield part.begin + begin, own.float() if stale else masters.join(own, rest)

    def accept(self, p: nn.Parameter, value: Tensor) -> bool:
        """Give a parameter a value of higher precision than its own; False if it has no master."""
        place = self._places.get(id(p))
        if place is None or is_wrapper(p) != is_wrapper(value):
            return False
        self.write(place, part_for(p, value))
        return True

    def unscaled(self, gradient: Tensor) -> Tensor:
        """A gradient that autograd made, without the scale of the loss: fp32 then, as gradients beside masters are."""
        return gradient if self.factor is None else gradient.float() * self.factor()

    def write(self, place: Place, value: Tensor) -> None:
        """Replace a parameter's masters, as exactly as they are kept; `value` has its shape."""
        u, param = place
        spec = self._units[u].spec.params[param]
        laid_out = torch.empty_strided(spec.shape, spec.stride, dtype=torch.float32, device=self._pages.device)
        flat = as_flat(laid_out.copy_(value))
        for page, part in self._parts[place]:
            memory = self._pages.read(u, page)
            weight = self._units[u].elements(param, part.begin, part.end)
            _split(flat[part.begin : part.end], weight, kept_of(self._pages.spec(u, page), part, memory))
            self._pages.write(u, page, memory)
        self.edits.replaced(place)


def _split(master: Tensor, weight: Tensor, kept: Tensor) -> None:
    """Into weights on the device and a page that may be in host memory."""
    for begin in range(0, weight.numel(), KERNEL_PIECE):
        own, rest = (array[begin : begin + KERNEL_PIECE] for array in (weight, kept))
        here = rest if rest.device == own.device else torch.empty_like(rest, device=own.device)
        masters.split(master[begin : begin + KERNEL_PIECE], own, here)
        if here is not rest:
            rest.copy_(here)
