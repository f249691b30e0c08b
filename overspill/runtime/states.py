"""What the user's own optimizer keeps, in the pages' homes.

A page's bytes hold, behind its arrays, one region per parameter; a region holds that parameter's state tensors one
after the other. Where each tensor lies is known once the optimizer has made it. Scalars (step counts) stay here, and
so does everything where states live on the device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from overspill.errors import ModelError
from overspill.runtime.pages import Pages
from overspill.specs import PartSpec, align, dense_stride
from overspill.units.states import SMALL


@dataclass(frozen=True, slots=True)
class Field:
    """Where one state tensor lies in its page."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def of(self, page: Tensor) -> Tensor:
        nbytes = torch.Size(self.shape).numel() * self.dtype.itemsize
        flat = page[self.offset : self.offset + nbytes].view(self.dtype)
        return torch.as_strided(flat, self.shape, self.stride, flat.storage_offset())


class OwnStates:
    """The states that the user's optimizer makes, parameter by parameter."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._known: dict[tuple[int, int], dict[str, Any]] = {}
        self._places = {
            (u, part.param): (i, part)
            for u, unit in enumerate(pages.model.units)
            for i, page in enumerate(unit.pages)
            for part in page.parts
        }

    # --- for the update of a page that is on the device

    def lend(self, unit: int, param: int, page: int) -> dict[str, Any]:
        """A parameter's state as its optimizer keeps it, over the page's bytes."""
        known = self._known.get((unit, param), {})
        return {k: v.of(self._pages.make(unit, page)) if isinstance(v, Field) else v for k, v in known.items()}

    def take_back(self, unit: int, page: int, part: PartSpec, state: Mapping[str, Any]) -> None:
        """Keep what the optimizer left; tensors that live elsewhere go into the page's bytes."""
        if self._pages.home(unit, page) is None:
            self._known[unit, part.param] = dict(state)
        else:
            self._keep(unit, part, state, self._pages.make(unit, page))

    def _keep(self, unit: int, part: PartSpec, state: Mapping[str, Any], memory: Tensor) -> None:
        spec = self._pages.model.units[unit].params[part.param]
        offset, known = part.region, {}
        for key, value in state.items():
            known[key] = value
            if not _large(value):
                continue
            field = Field(offset, tuple(value.shape), dense_stride(value.shape, value.stride()), value.dtype)
            offset += align(value.nbytes)
            if offset > part.region + spec.state_bytes:
                raise ModelError(_too_large(spec.name, state))
            known[key] = field
            place = field.of(memory)
            if place.data_ptr() != value.data_ptr():
                place.copy_(value)
        self._known[unit, part.param] = known

    # --- from outside, while nothing is in flight

    def outline(self, unit: int, param: int) -> dict[str, Any]:
        """One parameter's state with its larger tensors on the meta device."""
        known = self._known.get((unit, param), {})
        return {k: _outlined(v) for k, v in known.items()}

    def read(self, unit: int, param: int, keys: Sequence[str] | None = None) -> dict[str, Any]:
        """Copies of one parameter's state; tensors that live elsewhere come as host tensors."""
        known = self._known.get((unit, param), {})
        known = known if keys is None else {key: known[key] for key in keys}
        inside = any(isinstance(v, Field) for v in known.values())
        page = self._pages.read(unit, self._places[unit, param][0]) if inside else torch.empty(0)
        return {
            k: v.of(page).clone() if isinstance(v, Field) else v.clone() if isinstance(v, Tensor) else v
            for k, v in known.items()
        }

    def write(self, unit: int, values: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace the states of a unit's parameters (index -> state); an empty state forgets it."""
        # What is frozen has no place in a page, but may have a state from before.
        self._known |= {(unit, param): dict(state) for param, state in values.items()}
        for i, page in enumerate(self._pages.model.units[unit].pages):
            elsewhere = self._pages.home(unit, i) is not None
            memory = self._pages.read(unit, i) if elsewhere else None
            for part in page.parts:
                given = values.get(part.param, {})
                state = {k: v if elsewhere and _large(v) else _on(self._pages.device, k, v) for k, v in given.items()}
                self._known[unit, part.param] = state
                if memory is not None:
                    self._keep(unit, part, state, memory)
            if memory is not None:
                self._pages.write(unit, i, memory)


def _large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > SMALL


def _on(device: torch.device, key: str, value: Any) -> Any:
    """torch's rule for states that are loaded: on the parameter's device, but a step count stays where it is."""
    return value.to(device) if isinstance(value, Tensor) and key != "step" else value


def _outlined(value: Any) -> Any:
    if isinstance(value, Field):
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
    if isinstance(value, Tensor):
        return value.to("meta") if value.numel() > SMALL else value.clone()
    return value


def _too_large(name: str, state: Mapping[str, Any]) -> str:
    sizes = {k: tuple(v.shape) for k, v in state.items() if isinstance(v, Tensor)}
    return (
        f"expected the optimizer to keep for {name!r} what its first step on a small tensor showed, found more: "
        f"{sizes}; a state that grows from step to step, or with a parameter's values, cannot be placed ahead"
    )
