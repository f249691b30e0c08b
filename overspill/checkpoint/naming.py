"""Which tensors of a weights folder make which parameter of a model.

Mostly the names are equal. Transformers also reads folders in which they are not: a base model's without the prefix of
the model that holds it, older names, experts one by one that the model keeps in one tensor. It has the rules for that;
here they are asked for and applied to one parameter at a time.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from overspill.checkpoint.tensorfile import Entry

Read = Callable[[Entry], Tensor]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one parameter, or a few together, come out of a folder."""

    entries: tuple[Entry, ...]
    convert: Callable[[Read], Mapping[str, Tensor]] | None = None
    """Gives tensors by the model's names; None: the one entry is the tensor."""


def recipes(model: nn.Module, entries: Mapping[str, Entry]) -> dict[str, Recipe]:
    """By the model's names: how each tensor that the folder has comes out of it. What fits no name is left out."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    found = {name: Recipe((entry,)) for name, entry in entries.items() if name in names}
    rest = [entry for name, entry in entries.items() if name not in names]
    if rest and _is_stock(model):
        found = {**_converted(model, names, rest), **found}
    return found


def _is_stock(model: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def _converted(model: Any, names: set[str], entries: Iterable[Entry]) -> dict[str, Recipe]:
    try:
        from transformers import conversion_mapping
        from transformers import core_model_loading as rules
    except ImportError:
        # Before version 5 Transformers had no such rules, but for the prefix.
        return {f"{model.base_model_prefix}.{e.name}": Recipe((e,)) for e in entries}
    mapping = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, rules.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, rules.WeightConverter)]
    sources = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known = dict.fromkeys(names, True)
    found: dict[str, Recipe] = {}
    gathered: dict[str, list[tuple[str, Entry]]] = {}
    for entry in sorted(entries, key=lambda e: rules.dot_natural_key(e.name)):
        name, pattern = rules.rename_source_key(entry.name, renamings, converters, model.base_model_prefix, known)
        if name not in names:
            continue
        if pattern is None:
            found[name] = Recipe((entry,))
        else:
            gathered.setdefault(name, []).append((pattern, entry))
    for name, parts in gathered.items():
        recipe = _merged(model, name, sources[parts[0][0]], parts)
        targets = sources[parts[0][0]].target_patterns
        first = next((t for t in targets if t in name), "")
        for target in targets:
            other = name.replace(first, target) if first else name
            found[other if other in names else name] = recipe
    return found


def _merged(model: Any, name: str, converter: Any, parts: list[tuple[str, Entry]]) -> Recipe:
    def convert(read: Read) -> Mapping[str, Tensor]:
        fresh = copy.deepcopy(converter)
        for pattern, entry in parts:
            fresh.add_tensor(name, entry.name, pattern, read(entry))
        made = fresh.convert(name, model=model, config=model.config)
        return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}

    return Recipe(tuple(entry for _, entry in parts), convert)
