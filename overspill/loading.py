"""Where the values of a model come from when it does not hold them itself: a weights folder, or its initialisers."""

import logging
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from overspill.checkpoint.naming import Recipe, recipes
from overspill.checkpoint.tensorfile import Entry, Reader, entries_of
from overspill.errors import ModelError
from overspill.runtime.adopt import OwnValues, Source
from overspill.runtime.building import builder_of, read_built
from overspill.runtime.generation import as_flat
from overspill.specs import ParamSpec
from overspill.units.initial import Initialiser, materialise_buffers

log = logging.getLogger("overspill")

Named = Sequence[tuple[ParamSpec, nn.Parameter]]


def source_of(model: nn.Module, weights: str | PathLike[str] | None, device: torch.device) -> Source:
    """What fills this model: the folder, its initialisers where it is on the meta device, or its own values. Buffers
    on the meta device get their values here."""
    source: Folder | Values = Values(model) if weights is None else Folder(model, weights)
    if weights is not None or any(buffer.is_meta for buffer in model.buffers()):
        materialise_buffers(model, device, source.buffers())
    return source


class Values:
    """Parameters that hold their values, in memory or on disk, and those on the meta device, which are initialised."""

    def __init__(self, model: nn.Module) -> None:
        self._own = OwnValues()
        self._initialiser = Initialiser(model) if any(p.is_meta for p in model.parameters()) else None
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


class Folder:
    """A folder of safetensors: every byte is read once, straight from its file. What it lacks is initialised."""

    def __init__(self, model: nn.Module, weights: str | PathLike[str]) -> None:
        entries = entries_of(weights)
        self._model = model
        self._reader = Reader()
        self._recipes = recipes(model, entries)
        self._aliases: dict[int, list[str]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            self._aliases.setdefault(id(p), []).append(name)
        self._values = Values(model)
        self._whole: dict[str, Tensor] = {}
        self._check(weights, entries)

    def buffers(self) -> dict[str, Tensor]:
        names = [name for name, _ in self._model.named_buffers() if name in self._recipes]
        return {name: self._tensor(name) for name in names}

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
        laid_out = torch.empty_strided(spec.shape, spec.stride, dtype=self._whole[name].dtype)
        return as_flat(laid_out.copy_(self._whole[name]))[begin:end]

    def end(self, params: Named) -> None:
        self._values.end(params)
        for spec, p in params:
            self._whole.pop(self._name(spec, p) or "", None)

    def _name(self, spec: ParamSpec, p: nn.Parameter) -> str | None:
        """The name, of those that a tied parameter has, under which the folder has it."""
        return next((n for n in (spec.name, *self._aliases.get(id(p), ())) if n in self._recipes), None)

    def _piece(self, entry: Entry, begin: int, end: int) -> Tensor:
        out = torch.empty(end - begin, dtype=entry.dtype)
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
