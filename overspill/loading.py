"""Where the values of a model come from when it does not hold them itself: a weights folder, or its initialisers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from overspill.checkpoint.naming import Recipe, recipes
from overspill.checkpoint.tensorfile import Entry, Reader, entries_of
from overspill.errors import ModelError
from overspill.kernels.masters import fingerprint
from overspill.runtime.adopt import PIECE, OwnValues, Source
from overspill.runtime.building import builder_of, read_built
from overspill.runtime.generation import as_flat
from overspill.specs import ParamSpec
from overspill.units.initial import Initialiser, materialise_buffers

if TYPE_CHECKING:
    from overspill.comm import Comm

log = logging.getLogger("overspill")

DTYPES = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
Named = Sequence[tuple[ParamSpec, nn.Parameter]]


def source_of(
    model: nn.Module, weights: str | PathLike[str] | None, there: tuple[torch.device, int], comm: Comm | None = None
) -> Source:
    """What fills this model: the folder, its initialisers where it is on the meta device, or its own values; over ranks
    the same on all of them. Buffers on the meta device get their values here. `there`: a device, and the bytes that it
    has for values in the making."""
    device, _ = there
    values = Values(model, *there)
    source: Folder | Values = values if weights is None else Folder(model, weights, values)
    holds = comm is None or _holds(model, weights, comm)
    if weights is not None or any(buffer.is_meta for buffer in model.buffers()):
        materialise_buffers(model, device, source.buffers() if holds else _unset_buffers(model, device))
    if comm is None:
        return source
    for buffer in model.buffers():
        buffer.data = _broadcast(buffer.data, device, comm)
    return SameValues(source, holds, device, comm)


def _unset_buffers(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Room for what the first rank will send."""
    named = model.named_buffers(remove_duplicate=False)
    return {name: torch.zeros_like(buffer, device=device) for name, buffer in named if buffer.is_meta}


def _holds(model: nn.Module, weights: str | PathLike[str] | None, comm: Comm) -> bool:
    """Whether this rank knows the values of the weights: those of a folder are read by the first rank only."""
    if weights is not None:
        return comm.place == 0
    on_meta = comm.exchange(any(p.is_meta for p in model.parameters()))
    if on_meta[0] and not all(on_meta):
        raise ModelError(
            f"expected the model's weights on all ranks, on the first, or on none (all on the meta device), found them "
            f"on ranks {[r for r, meta in zip(comm.world_ranks, on_meta, strict=True) if not meta]} only; build the "
            "model with its weights on the first rank"
        )
    return all(on_meta) or not on_meta[comm.place]


def _broadcast(value: Tensor, device: torch.device, comm: Comm) -> Tensor:
    """The first rank's, on the value's own device."""
    there = value.to(device).contiguous()
    comm.broadcast(there.view(-1))
    return there.view(value.shape).to(value.device)


class SameValues:
    """Makes all ranks start from the same values: those of the first, where they are not equal, or not there."""

    def __init__(self, source: Source, holds: bool, device: torch.device, comm: Comm) -> None:
        self._source = source
        self._holds = holds
        self._device = device
        self._comm = comm
        self._equal = True
        self._told = False
        self._dtypes: dict[str, torch.dtype] = {}

    def begin(self, params: Named) -> None:
        if self._holds:
            self._source.begin(params)
        told = self._comm.exchange(self._holds)
        mine = [self._print(spec, p, all(told)) for spec, p in params] if self._holds else None
        heard = self._comm.exchange(mine)
        self._equal = all(each == heard[0] for each in heard)
        self._dtypes = {spec.name: DTYPES[kind] for (spec, _), (kind, *_) in zip(params, heard[0], strict=True)}
        if not self._equal and not self._told and all(each is not None for each in heard):
            self._told = True
            log.warning("the weights differ from rank to rank: those of rank %d are taken", self._comm.world_ranks[0])

    def _print(self, spec: ParamSpec, p: nn.Parameter, compared: bool) -> list[Any]:
        """The dtype of a parameter's values and, if all ranks have some, what changes if any of them does."""
        kind, found = str(self._source.read(spec, p, 0, 0).dtype), torch.zeros(2, dtype=torch.int64, device="cpu")
        for begin in range(0, spec.numel if compared and self._comm.ranks > 1 else 0, PIECE):
            value = self._source.read(spec, p, begin, min(begin + PIECE, spec.numel)).contiguous()
            found += fingerprint(_halves(value)).cpu() * (begin + 1)
        return [kind, *found.tolist()]

    def read(self, spec: ParamSpec, p: nn.Parameter, begin: int, end: int) -> Tensor:
        if self._equal:
            return self._source.read(spec, p, begin, end)
        value = torch.empty(end - begin, dtype=self._dtypes[spec.name], device=self._device)
        if self._holds:
            value.copy_(self._source.read(spec, p, begin, end))
        self._comm.broadcast(value)
        return value

    def end(self, params: Named) -> None:
        if self._holds:
            self._source.end(params)


def _halves(value: Tensor) -> Tensor:
    """Any values as 16-bit ones, for a fingerprint."""
    wide = value.to(torch.int16) if value.element_size() == 1 else value
    return wide.view(torch.int16)


class Values:
    """Parameters that hold their values, in memory or on disk, and those on the meta device, which are initialised."""

    def __init__(self, model: nn.Module, device: torch.device, room: int) -> None:
        self._own = OwnValues()
        on_meta = any(p.is_meta for p in model.parameters())
        self._initialiser = Initialiser(model, device, room) if on_meta else None
        self._made: dict[str, Tensor] = {}

    def buffers(self) -> dict[str, Tensor]:
        return {}

    def begin(self, params: Named) -> None:
        empty = [(spec.name, p) for spec, p in params if p.is_meta]
        if empty:
            assert self._initialiser is not None, "a parameter went to meta while the model was prepared"
            self._made = self._initialiser.fill(empty)

    def read(self, spec: ParamSpec, p: nn.Parameter, begin: int, end: int) -> Tensor:
        if builder_of(p) is not None:
            return read_built(p, begin, end)
        value = p if spec.name not in self._made else nn.Parameter(self._made[spec.name], requires_grad=False)
        return self._own.read(spec, value, begin, end)

    def end(self, params: Named) -> None:
        self._made = {}
        for _, p in params:
            builder = builder_of(p)
            if builder is not None:
                builder.release(p)


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""What floating parameters are read from. Numbers of other kinds mean something together with scales only."""


def _check_floats(name: str, recipe: Recipe, weights: Any) -> None:
    for entry in recipe.entries:
        if entry.dtype not in FLOATS:
            raise ModelError(
                f"expected {name!r} in {', '.join(str(dtype) for dtype in FLOATS)}, found {entry.dtype} in "
                f"{str(weights)!r} (quantised weights?); give a folder with the weights as floating numbers"
            )


class Folder:
    """A folder of safetensors: every byte is read once, straight from its file. What it lacks is initialised."""

    def __init__(self, model: nn.Module, weights: str | PathLike[str], values: Values) -> None:
        entries = entries_of(weights)
        self._model = model
        self._reader = Reader()
        self._recipes = recipes(model, entries)
        self._aliases: dict[int, list[str]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            self._aliases.setdefault(id(p), []).append(name)
        self._values = values
        self._whole: dict[str, Tensor] = {}
        self._check(weights, entries)

    def buffers(self) -> dict[str, Tensor]:
        named = self._model.named_buffers(remove_duplicate=False)
        return {name: self._tensor(name).to(b.dtype) for name, b in named if name in self._recipes}

    def begin(self, params: Named) -> None:
        self._values.begin([(spec, p) for spec, p in params if self._name(spec, p) is None])

    def read(self, spec: ParamSpec, p: nn.Parameter, begin: int, end: int) -> Tensor:
        name = self._name(spec, p)
        if name is None:
            return self._values.read(spec, p, begin, end)
        recipe, straight = self._recipes[name], spec.stride == torch.empty(spec.shape, device="meta").stride()
        if recipe.convert is None and straight:
            return self._piece(recipe.entries[0], begin, end)
        if name not in self._whole:
            self._whole[name] = self._tensor(name)
        laid_out = torch.empty_strided(spec.shape, spec.stride, dtype=self._whole[name].dtype, device="cpu")
        return as_flat(laid_out.copy_(self._whole[name]))[begin:end]

    def end(self, params: Named) -> None:
        self._values.end(params)
        for spec, p in params:
            self._whole.pop(self._name(spec, p) or "", None)

    def _name(self, spec: ParamSpec, p: nn.Parameter) -> str | None:
        """The name, of those that a tied parameter has, under which the folder has it."""
        return next((n for n in (spec.name, *self._aliases.get(id(p), ())) if n in self._recipes), None)

    def _piece(self, entry: Entry, begin: int, end: int) -> Tensor:
        out = torch.empty(end - begin, dtype=entry.dtype, device="cpu")
        self._reader.read(entry, begin * entry.dtype.itemsize, out.view(torch.uint8))
        return out

    def _entire(self, entry: Entry) -> Tensor:
        return self._piece(entry, 0, torch.Size(entry.shape).numel()).view(entry.shape)

    def _tensor(self, name: str) -> Tensor:
        recipe = self._recipes[name]
        if recipe.convert is None:
            return self._entire(recipe.entries[0])
        made = dict(recipe.convert(self._entire))
        # What came out for other parameters waits for them.
        self._whole.update(
            {key: value for key, value in made.items() if key != name and self._recipes.get(key) is recipe}
        )
        return made[name]

    def _check(self, weights: Any, entries: Mapping[str, Entry]) -> None:
        shapes = {name: p.shape for name, p in self._model.named_parameters(remove_duplicate=False)}
        for name, shape in shapes.items():
            recipe: Recipe | None = self._recipes.get(name)
            if recipe is not None and recipe.convert is None and recipe.entries[0].shape != tuple(shape):
                raise ModelError(
                    f"expected {name!r} of shape {tuple(shape)}, found {recipe.entries[0].shape} in {str(weights)!r}; "
                    "build the model with the configuration that the weights were saved with"
                )
            if recipe is not None and self._model.get_parameter(name).is_floating_point():
                _check_floats(name, recipe, weights)
        missing = [names[0] for names in self._aliases.values() if not any(n in self._recipes for n in names)]
        if len(missing) == len(self._aliases):
            raise ModelError(
                f"expected weights of this model in {str(weights)!r}, found none of its parameters: it has "
                f"{', '.join(sorted(entries)[:3])}, the model {', '.join(missing[:3])}; give the folder of this model"
            )
        if missing:
            log.warning(
                "%d parameters are not in %s and are initialised anew: %s",
                len(missing),
                weights,
                ", ".join(missing[:8]),
            )
        used = {entry.name for recipe in self._recipes.values() for entry in recipe.entries}
        unused = sorted(entries.keys() - used)
        if unused:
            log.warning("%d tensors of %s are not used: %s", len(unused), weights, ", ".join(unused[:8]))
