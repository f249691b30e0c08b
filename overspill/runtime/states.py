"""Optimizer states in their homes, page by page.

A page's bytes are one region per parameter; a region holds that parameter's state tensors one after the other. Where
each tensor lies is known once the optimizer has made it. Scalars (step counts) stay with the engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from overspill.errors import ModelError
from overspill.program import Kind, Op
from overspill.runtime.executor import Handler
from overspill.runtime.lanes import Work
from overspill.specs import TierName, UnitSpec, align, dense_stride
from overspill.tiers import Slot, Tier
from overspill.units.states import SMALL


@dataclass(frozen=True, slots=True)
class Field:
    """Where one state tensor lies in its page."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def of(self, page: Tensor) -> Tensor:
        nbytes = _elements(self.shape) * self.dtype.itemsize
        flat = page[self.offset : self.offset + nbytes].view(self.dtype)
        return torch.as_strided(flat, self.shape, self.stride, flat.storage_offset())


def _elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


class States:
    """All optimizer states of one model. `slots[unit][page]` is None where they live on the device."""

    def __init__(
        self,
        units: Sequence[UnitSpec],
        slots: Sequence[Sequence[Slot | None]],
        tiers: Mapping[TierName, Tier],
        device: torch.device,
    ) -> None:
        self._units = units
        self._slots = slots
        self._tiers = tiers
        self.device = device
        self._known: dict[tuple[int, int], dict[str, Any]] = {}
        self._staged: dict[tuple[int, int], Tensor] = {}
        self._filled: set[tuple[int, int]] = set()

    def handlers(self) -> dict[Kind, Handler]:
        return {Kind.STATE_FETCH: self._fetch, Kind.STATE_STORE: self._store}

    def home(self, unit: int, page: int) -> tuple[Tier, Slot] | None:
        slot = self._slots[unit][page]
        return None if slot is None else (self._tiers[slot.tier], slot)  # type: ignore[index]

    # --- for the update of a page that is on the device

    def lend(self, unit: int, param: int, page: int) -> dict[str, Any]:
        """A parameter's state as its optimizer keeps it, over the staged page."""
        known = self._known.get((unit, param), {})
        staged = self._staged.get((unit, page))
        return {k: v.of(_there(staged)) if isinstance(v, Field) else v for k, v in known.items()}

    def take_back(self, unit: int, param: int, page: int, state: Mapping[str, Any]) -> None:
        """Keep what the optimizer left; tensors that live elsewhere go into the staged page."""
        if self.home(unit, page) is None:
            self._known[unit, param] = dict(state)
            return
        nbytes = self._units[unit].pages[page].state_bytes
        if (unit, page) not in self._staged:
            self._staged[unit, page] = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        staged = self._staged[unit, page]
        offset, known = self._region(unit, param, page), {}
        end = offset + self._units[unit].params[param].state_bytes
        for key, value in state.items():
            known[key] = value
            if not isinstance(value, Tensor) or value.numel() <= SMALL:
                continue
            field = Field(offset, tuple(value.shape), dense_stride(value.shape, value.stride()), value.dtype)
            offset += align(value.nbytes)
            if offset > end:
                raise ModelError(_too_large(self._units[unit].params[param].name, state))
            known[key] = field
            place = field.of(staged)
            if place.data_ptr() != value.data_ptr():
                place.copy_(value)
        self._known[unit, param] = known

    def _region(self, unit: int, param: int, page: int) -> int:
        spec = self._units[unit]
        return sum(p.state_bytes for p in spec.params[spec.pages[page].first : param])

    # --- ops

    def _fetch(self, op: Op) -> Work:
        home, key = self.home(op.unit, op.item), (op.unit, op.item)
        assert home is not None, "only a state that lives elsewhere is fetched"
        if key not in self._filled:
            # Nothing to fetch yet; the page is made when the optimizer has made its states, beside no other copy.
            return _nothing
        page = torch.empty(op.nbytes, dtype=torch.uint8, device=self.device)
        self._staged[key] = page
        return lambda: home[0].load(home[1], page)

    def _store(self, op: Op) -> Work:
        home, page = self.home(op.unit, op.item), self._staged.get((op.unit, op.item))
        assert home is not None, "only a state that lives elsewhere is stored"
        if page is None:
            # No parameter of the page has ever had a gradient.
            return _nothing
        self._filled.add((op.unit, op.item))
        return lambda: home[0].store(home[1], page)

    def drop(self, unit: int, page: int) -> None:
        self._staged.pop((unit, page), None)

    # --- from outside, while nothing is in flight

    def read(self, unit: int, param: int) -> dict[str, Any]:
        """Copies of one parameter's state; tensors that live elsewhere come as host tensors."""
        known = self._known.get((unit, param), {})
        page = self._page_of(unit, param) if any(isinstance(v, Field) for v in known.values()) else None
        return {
            k: v.of(_there(page)).clone() if isinstance(v, Field) else v.clone() if isinstance(v, Tensor) else v
            for k, v in known.items()
        }

    def write(self, unit: int, values: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace the states of a unit's parameters (index -> state); an empty state forgets it."""
        for page, spec in enumerate(self._units[unit].pages):
            home = self.home(unit, page)
            if home is not None:
                self._staged[unit, page] = torch.zeros(spec.state_bytes, dtype=torch.uint8, device=self.device)
            for param in range(spec.first, spec.last):
                self.take_back(unit, param, page, values.get(param, {}))
            if home is not None:
                self._filled.add((unit, page))
                home[0].store(home[1], self._staged.pop((unit, page)))
                if self.device.type == "cuda":
                    torch.cuda.current_stream(self.device).synchronize()

    def _page_of(self, unit: int, param: int) -> Tensor:
        pages = self._units[unit].pages
        page = next(i for i, spec in enumerate(pages) if spec.first <= param < spec.last)
        home = self.home(unit, page)
        assert home is not None, "a field is a place in a page that lives elsewhere"
        out = torch.empty(pages[page].state_bytes, dtype=torch.uint8)
        home[0].load(home[1], out)
        return out


def _there(page: Tensor | None) -> Tensor:
    assert page is not None, "the page is not staged on the device"
    return page


def _nothing() -> None: ...


def _too_large(name: str, state: Mapping[str, Any]) -> str:
    sizes = {k: tuple(v.shape) for k, v in state.items() if isinstance(v, Tensor)}
    return (
        f"expected the optimizer to keep for {name!r} what its first step on a small tensor showed, found more: "
        f"{sizes}; a state that grows from step to step, or with a parameter's values, cannot be placed ahead"
    )
