"""How a model's values come into their homes: unit by unit, so that never more than one is in two places."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from overspill.kernels.masters import join, split
from overspill.runtime.generation import as_flat
from overspill.runtime.pages import Home, Pages, kept_of
from overspill.specs import KERNEL_PIECE, ParamSpec, PartSpec
from overspill.units.layout import Layout
from overspill.units.local import local_of
from overspill.units.pages import in_order
from overspill.units.unit import Unit

PIECE = 2**22
"""Elements that are read at a time."""


class Source(Protocol):
    """Where values come from: the parameters themselves, files, initialisers. All ranks read the same, in the same
    order: what one of them has may be sent to the others as it is read."""

    def begin(self, params: Sequence[tuple[ParamSpec, nn.Parameter]]) -> None:
        """The values of one unit will be read."""

    def read(self, spec: ParamSpec, p: nn.Parameter, begin: int, end: int) -> Tensor:
        """Some elements of a parameter, in memory order: flat, of any floating dtype, on any device."""

    def end(self, params: Sequence[tuple[ParamSpec, nn.Parameter]]) -> None:
        """They have been, and will not be asked for again."""


class OwnValues:
    """The parameters hold their values themselves."""

    def begin(self, params: Sequence[tuple[ParamSpec, nn.Parameter]]) -> None: ...

    def read(self, spec: ParamSpec, p: nn.Parameter, begin: int, end: int) -> Tensor:
        value = local_of(p).detach()
        if value.stride() != spec.stride:
            value = torch.empty_strided(spec.shape, spec.stride, dtype=p.dtype, device=p.device).copy_(value)
        return as_flat(value)[begin:end]

    def end(self, params: Sequence[tuple[ParamSpec, nn.Parameter]]) -> None: ...


def adopt(layout: Layout, homes: Sequence[Home | None], pages: Pages, source: Source) -> list[Unit]:
    """Units with their weights, and pages with what is kept of the masters. If one fails, all are given back."""
    units: list[Unit] = []
    try:
        for index, spec in enumerate(pages.model.units):
            home = homes[index]
            unit = Unit(spec, layout.params[index], pages.device, home[1] if home else None)
            named = list(zip(spec.params, unit.params, strict=True))
            source.begin(named)
            with torch.no_grad(), torch.inference_mode(False):
                _fill(index, unit, pages, source)
            source.end(named)
            unit.adopt()
            units.append(unit)
            if home is not None:
                _move_out(unit, home)
    except BaseException:
        for index, unit in reversed(list(enumerate(units))):
            home = homes[index]
            if home is not None and not unit.here:
                unit.grow()
                unit.load(home[0])
            unit.give_back(_masters(index, unit, pages))
        raise
    return units


def _masters(index: int, unit: Unit, pages: Pages) -> dict[int, Tensor]:
    """What the trainable parameters came with, exactly."""
    whole: dict[int, Tensor] = {}
    for i, page in enumerate(unit.spec.pages if pages.model.format.master is not None else ()):
        memory = pages.read(index, i)
        for part in page.parts:
            spec, weight = unit.spec.params[part.param], unit.elements(part.param, part.begin, part.end)
            if not spec.master:
                continue
            kept = kept_of(page, part, memory)
            to = whole.setdefault(part.param, torch.empty_strided(spec.shape, spec.stride, device=weight.device))
            for at in range(0, part.numel, KERNEL_PIECE):
                own, rest = (array[at : at + KERNEL_PIECE] for array in (weight, kept))
                begin = part.begin + at
                as_flat(to)[begin : begin + own.numel()].copy_(join(own, rest.to(weight.device)))
    return whole


def _fill(index: int, unit: Unit, pages: Pages, source: Source) -> None:
    keep = _Keeping(index, unit, pages)
    # As pages come, each of which is written once. Not as those of this rank do: ranks read together.
    for param in in_order(unit.spec.params, pages.model.format):
        spec, p = unit.spec.params[param], unit.params[param]
        for begin in range(0, spec.numel, PIECE):
            end = min(begin + PIECE, spec.numel)
            value, weight = source.read(spec, p, begin, end), unit.elements(param, begin, end)
            if not spec.master:
                weight.copy_(value)
                continue
            # In small steps, each of which takes several copies on the device.
            for at in range(0, end - begin, KERNEL_PIECE):
                piece = value[at : at + KERNEL_PIECE].to(pages.device, torch.float32)
                kept = torch.empty(
                    piece.numel(), dtype=pages.model.format.named(spec.states).master, device=pages.device
                )
                split(piece, weight[at : at + KERNEL_PIECE], kept)
                keep(param, begin + at, kept)
    keep.flush()


class _Keeping:
    """Puts what is kept of the masters into pages, those that this rank has. What the fields hold before the first
    step is nothing but zeros, and those a home has by itself."""

    def __init__(self, index: int, unit: Unit, pages: Pages) -> None:
        self._index = index
        self._pages = pages
        self._parts: dict[int, list[tuple[int, PartSpec]]] = {}
        self._page, self._memory = -1, torch.empty(0, device="cpu")
        for i, page in enumerate(unit.spec.pages):
            for part in page.parts:
                if unit.spec.params[part.param].master:
                    self._parts.setdefault(part.param, []).append((i, part))

    def __call__(self, param: int, begin: int, kept: Tensor) -> None:
        """Elements of a parameter from `begin` on, in the order of the pages, which are written one by one."""
        for page, part in self._parts.get(param, ()):
            low, high = max(begin, part.begin), min(begin + kept.numel(), part.end)
            if low < high:
                self._open(page)
                own = kept_of(self._pages.spec(self._index, page), part, self._memory)
                own[low - part.begin : high - part.begin].copy_(kept[low - begin : high - begin])

    def _open(self, page: int) -> None:
        if page != self._page:
            assert page > self._page, f"page {page} would be written again, after page {self._page}"
            self.flush()
            spec = self._pages.spec(self._index, page)
            nbytes = spec.elements * spec.format.master_bytes
            self._page, self._memory = page, torch.zeros(nbytes, dtype=torch.uint8, device=self._pages.device)

    def flush(self) -> None:
        if self._page >= 0:
            self._pages.write(self._index, self._page, self._memory)


def _move_out(unit: Unit, home: Home) -> None:
    unit.store(home[0])
    if unit.flat.is_cuda:
        torch.cuda.current_stream(unit.flat.device).synchronize()
    unit.shrink()
