"""What the user's own optimizer keeps, in the pages' homes.

A page's bytes hold, behind its arrays, one region per part; a region holds that part's state tensors one after the
other. Where each tensor lies is known once the optimizer has made it. Scalars (step counts) stay here, and so does
everything where states live on the device. A part is a whole parameter, or one of the ranges that a rank owns of it:
those are parameters of one dimension to the optimizer, and their states are put together when somebody looks at them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from overspill.errors import ModelError
from overspill.runtime.collect import Collector
from overspill.runtime.generation import as_flat
from overspill.runtime.pages import Pages
from overspill.runtime.ranks import Meeting
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
    """The states that the user's optimizer makes, part by part."""

    def __init__(self, pages: Pages, collector: Collector | None) -> None:
        self._pages = pages
        self._collector = collector if collector is not None and collector.divided else None
        self._known: dict[tuple[int, int, int], dict[str, Any]] = {}
        """(unit, parameter, first element) -> state"""
        self._aside: dict[tuple[int, int], dict[str, Any]] = {}
        """States of parameters that were trained before and are frozen now."""
        self._told: dict[tuple[int, int], dict[str, Any]] = {}
        """What states other ranks say that a parameter has."""
        self._places: dict[tuple[int, int], list[tuple[int, PartSpec]]] = {}
        for u, unit in enumerate(pages.model.units):
            for i, page in enumerate(unit.pages):
                for part in page.parts:
                    self._places.setdefault((u, part.param), []).append((i, part))
        if collector is not None:
            collector.gives[Meeting.STATE] = self._share
            collector.describes, collector.told = self._describe, self._tell

    # --- for the update of a page that is on the device

    def lend(self, unit: int, page: int, part: PartSpec) -> dict[str, Any]:
        """A part's state as its optimizer keeps it, over the page's bytes."""
        known = self._known.get((unit, part.param, part.begin), {})
        return {k: v.of(self._pages.make(unit, page)) if isinstance(v, Field) else v for k, v in known.items()}

    def take_back(self, unit: int, page: int, part: PartSpec, state: Mapping[str, Any]) -> None:
        """Keep what the optimizer left; tensors that live elsewhere go into the page's bytes."""
        if self._pages.home(unit, page) is None:
            self._known[unit, part.param, part.begin] = dict(state)
        else:
            self._keep(unit, part, state, self._pages.make(unit, page))

    def _keep(self, unit: int, part: PartSpec, state: Mapping[str, Any], memory: Tensor) -> None:
        spec = self._pages.model.units[unit].params[part.param]
        offset, known = part.region, dict[str, Any]()
        for key, value in state.items():
            known[key] = value
            if not _large(value):
                continue
            field = Field(offset, tuple(value.shape), dense_stride(value.shape, value.stride()), value.dtype)
            offset += align(value.nbytes)
            if offset > part.region + part.region_bytes:
                raise ModelError(_too_large(spec.name, state))
            known[key] = field
            place = field.of(memory)
            if place.data_ptr() != value.data_ptr():
                place.copy_(value)
        self._known[unit, part.param, part.begin] = known

    # --- from outside, while nothing is in flight

    def _first(self, unit: int, param: int) -> dict[str, Any]:
        """Of a parameter's first part here; every part has the same kinds of states."""
        parts = self._places.get((unit, param))
        return self._known.get((unit, param, parts[0][1].begin), {}) if parts else self._aside.get((unit, param), {})

    def outline(self, unit: int, param: int) -> dict[str, Any]:
        """One parameter's state with its larger tensors on the meta device."""
        if self._collector is not None and (unit, param) not in self._aside:
            found = self._collector.described((unit, param)) or {}
            return {key: _made(value) for key, value in found.items()}
        return {k: _outlined(v) for k, v in self._first(unit, param).items()}

    def read(self, unit: int, param: int, keys: Sequence[str] | None = None) -> dict[str, Any]:
        """Copies of one parameter's state; tensors that live elsewhere come as host tensors."""
        if self._collector is not None and (unit, param) not in self._aside:
            return self._together(unit, param, keys)
        known = self._first(unit, param)
        known = known if keys is None else {key: known[key] for key in keys}
        inside = any(isinstance(v, Field) for v in known.values())
        page = self._pages.read(unit, self._places[unit, param][0][0]) if inside else torch.empty(0, device="cpu")
        return {
            k: v.of(page).clone() if isinstance(v, Field) else v.clone() if isinstance(v, Tensor) else v
            for k, v in known.items()
        }

    def check(self, unit: int, param: int, state: Mapping[str, Any]) -> None:
        spec = self._pages.model.units[unit].params[param]
        large = [value for value in state.values() if _large(value)]
        for page, part in self._places.get((unit, param), []):
            divided = part.numel != spec.numel
            wrong = [tuple(v.shape) for v in large if divided and tuple(v.shape) != spec.shape]
            if wrong:
                raise ModelError(
                    f"expected states of shape {spec.shape} for {spec.name!r}, found {wrong[0]}; load the states of "
                    "the same model"
                )
            sizes = (v.itemsize * (part.numel if divided else v.numel()) for v in large)
            if self._pages.home(unit, page) is not None and sum(map(align, sizes)) > part.region_bytes:
                raise ModelError(_too_large(spec.name, state))

    def write(self, unit: int, values: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace the states of a unit's parameters (index -> state); an empty state forgets it."""
        params = self._pages.model.units[unit].params
        # What is frozen has no place in a page, but may have a state from before.
        self._aside |= {(unit, i): dict(state) for i, state in values.items() if not params[i].trainable}
        for i, page in enumerate(self._pages.model.units[unit].pages):
            elsewhere = self._pages.home(unit, i) is not None
            memory = self._pages.read(unit, i) if elsewhere else None
            for part in page.parts:
                given = {k: self._piece(unit, part, v) for k, v in values.get(part.param, {}).items()}
                state = {k: v if elsewhere and _large(v) else _on(self._pages.device, k, v) for k, v in given.items()}
                self._known[unit, part.param, part.begin] = state
                if memory is not None:
                    self._keep(unit, part, state, memory)
            if memory is not None:
                self._pages.write(unit, i, memory)

    def _piece(self, unit: int, part: PartSpec, value: Any) -> Any:
        """What a part has of a state of its whole parameter."""
        spec = self._pages.model.units[unit].params[part.param]
        if not _large(value) or part.numel == spec.numel:
            return value
        laid_out = torch.empty_strided(spec.shape, spec.stride, dtype=value.dtype, device=value.device)
        return as_flat(laid_out.copy_(value))[part.begin : part.end].clone()

    # --- over ranks: each has the states of its own parts

    def _describe(self, unit: int, param: int) -> dict[str, Any] | None:
        """As plain data; None where this rank has none."""
        known, spec = self._first(unit, param), self._pages.model.units[unit].params[param]
        parts = self._places.get((unit, param), [])
        entire = bool(parts) and parts[0][1].numel == spec.numel
        return {k: _plain(v, None if entire else spec.shape) for k, v in known.items()} if parts and known else None

    def _tell(self, unit: int, param: int, found: dict[str, Any] | None) -> None:
        self._told[unit, param] = found or {}

    def _together(self, unit: int, param: int, keys: Sequence[str] | None) -> dict[str, Any]:
        collector, spec = self._collector, self._pages.model.units[unit].params[param]
        assert collector is not None, "only over ranks"
        outline = self.outline(unit, param)
        found: dict[str, Any] = {}
        for which, (key, value) in enumerate(outline.items()):
            if keys is not None and key not in keys:
                continue
            found[key] = value
            if isinstance(value, Tensor) and value.is_meta:
                flat = collector.whole(Meeting.STATE, (unit, param), which).cpu()
                stride = spec.stride if tuple(value.shape) == spec.shape else value.stride()
                found[key] = flat.as_strided(value.shape, stride).clone()
        return found

    def _share(self, unit: int, param: int, which: int) -> Tensor:
        """What this rank has of one of a parameter's states, by its number."""
        key, told = list(self._told[unit, param].items())[which]
        spec, dtype = self._pages.model.units[unit].params[param], _DTYPES[told["dtype"]]
        if self._pages.model.sharding.whole:
            out = torch.zeros(torch.Size(told["shape"]).numel(), dtype=dtype, device="cpu")
        else:
            out = torch.zeros(spec.owned.room, dtype=dtype, device="cpu")
        for page, part in self._places.get((unit, param), []):
            value = self._known.get((unit, param, part.begin), {}).get(key)
            if value is not None:
                value = value.of(self._pages.read(unit, page)) if isinstance(value, Field) else value
                at = 0 if self._pages.model.sharding.whole else spec.owned.locate(part.begin)
                out[at : at + value.numel()].copy_(as_flat(value))
        return out


_DTYPES = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


def _plain(value: Any, shape: Sequence[int] | None) -> dict[str, Any]:
    """Of a large tensor its form; if it belongs to a range, that of the parameter. Of all else the value."""
    if isinstance(value, Field) or _large(value):
        return {"large": True, "shape": list(value.shape if shape is None else shape), "dtype": str(value.dtype)}
    if isinstance(value, Tensor):
        return {"large": False, "shape": list(value.shape), "dtype": str(value.dtype), "value": value.tolist()}
    return {"large": False, "value": value}


def _made(told: Mapping[str, Any]) -> Any:
    if "dtype" not in told:
        return told["value"]
    dtype = _DTYPES[told["dtype"]]
    if told["large"]:
        return torch.empty(told["shape"], dtype=dtype, device="meta")
    return torch.tensor(told["value"], dtype=dtype, device="cpu").reshape(told["shape"])


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
        f"{sizes}; a state that grows from step to step, or with a parameter's values, cannot be placed ahead: "
        "use another optimizer"
    )
