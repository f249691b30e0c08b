"""How a model's values come into their homes: unit by unit, so that never more than one is in two places."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from overspill.kernels.masters import KEPT, join, split
from overspill.runtime.generation import as_flat
from overspill.runtime.pages import Home, Pages, arrays_bytes, arrays_of
from overspill.specs import ParamSpec
from overspill.units.layout import Layout
from overspill.units.local import local_of
from overspill.units.unit import Unit

PIECE = 2**22
"""Elements that are read at a time."""


class Source(Protocol):
    """Where values come from: the parameters themselves, files, initialisers."""

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
                home[0].load(home[1], unit.flat)
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
            if spec.dtype in KEPT:
                kept = arrays_of(pages.model.format, page, part, memory)[0].to(weight.device)
                to = whole.setdefault(part.param, torch.empty_strided(spec.shape, spec.stride, device=weight.device))
                as_flat(to)[part.begin : part.end].copy_(join(weight, kept))
    return whole


def _fill(index: int, unit: Unit, pages: Pages, source: Source) -> None:
    format, with_master = pages.model.format, set()
    for i, page in enumerate(unit.spec.pages):
        if format.master is None:
            break
        memory = torch.zeros(arrays_bytes(format, page), dtype=torch.uint8, device=pages.device)
        for part in page.parts:
            spec, p = unit.spec.params[part.param], unit.params[part.param]
            if spec.dtype not in KEPT:
                continue
            with_master.add(part.param)
            kept = arrays_of(format, page, part, memory)[0]
            for begin in range(part.begin, part.end, PIECE):
                end = min(begin + PIECE, part.end)
                value = source.read(spec, p, begin, end).to(pages.device, torch.float32)
                split(value, unit.elements(part.param, begin, end), kept[begin - part.begin : end - part.begin])
        # What the fields hold before the first step is nothing but zeros, and those a home has by itself.
        pages.write(index, i, memory[: page.elements * format.master_bytes])
    for param, (spec, p) in enumerate(zip(unit.spec.params, unit.params, strict=True)):
        for begin in range(0, spec.numel if param not in with_master else 0, PIECE):
            end = min(begin + PIECE, spec.numel)
            unit.elements(param, begin, end).copy_(source.read(spec, p, begin, end))


def _move_out(unit: Unit, home: Home) -> None:
    home[0].store(home[1], unit.flat)
    if unit.flat.is_cuda:
        torch.cuda.current_stream(unit.flat.device).synchronize()
    unit.shrink()
