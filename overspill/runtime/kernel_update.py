"""Updates by our own rules, on pieces of flat memory, by whoever is fastest: kernels/executors.py."""

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from overspill.errors import ModelError
from overspill.kernels import codecs, cpu
from overspill.kernels.elements import Elements
from overspill.kernels.executors import Executor, executor_for
from overspill.kernels.reference import Rule, check_fields
from overspill.runtime.addressing import Addressing
from overspill.runtime.collect import Collector
from overspill.runtime.generation import as_flat
from overspill.runtime.masters import Masters
from overspill.runtime.pages import Pages, arrays_of
from overspill.runtime.ranks import Meeting
from overspill.runtime.ring import Page
from overspill.runtime.updates import OnHost, Share
from overspill.specs import KERNEL_PIECE, PageSpec, ParamSpec, PartSpec
from overspill.units.unit import Unit

VIEWS = "_overspill_views"


class KernelUpdate:
    """One rule for all parameters. Counts steps per parameter; what else it knows is in the pages."""

    def __init__(
        self, rule: Rule, units: Sequence[Unit], pages: Pages, masters: Masters, collector: Collector | None
    ) -> None:
        self._rule = rule
        self.check_step = functools.partial(check_fields, rule)
        formats = {page.format.name for unit in pages.model.units for page in unit.pages}
        self._executors = {format: executor_for(rule, pages.device, format) for format in sorted(formats)}
        self._collector = collector if collector is not None and collector.divided else None
        if collector is not None:
            collector.gives[Meeting.STATE] = self._share
        self.fields: tuple[str, ...] | None = rule.fields
        self._units = units
        self._first = [0, *itertools.accumulate(len(unit.params) for unit in units)]
        """The number of each unit's first parameter."""
        self._pages = pages
        self._masters = masters
        self._steps: Counter[tuple[int, int]] = Counter()
        self._pending: dict[tuple[int, int], int] = {}
        """The number of the step whose update is due, or was last: also where it turns out to be skipped, and does not
        count."""
        self._addressing = Addressing(units, pages, masters, self._number)
        self._aside: dict[tuple[int, int], Mapping[str, Any]] = {}
        """States of parameters that were trained before and are frozen now."""

    def due(self, unit: int, params: Sequence[int], count: int = 1) -> None:
        self._steps.update({(unit, param): count for param in params})
        if count > 0:
            self._pending.update({(unit, param): self._steps[unit, param] for param in params})

    def run(self, unit: int, page: int, shares: Sequence[Share]) -> None:
        memory = self._pages.make(unit, page)
        executor = self._executors[self._pages.spec(unit, page).format.name]
        left = shares
        if executor.quick is not None:
            left = self._addressing.launch((unit, page), memory, shares, executor.quick)
        for share in left:
            if share.skip is not None and not executor.fused and bool(share.skip):
                # Where the device is the host, which knows it; else it waits, as it does for plain torch in any case.
                continue
            self._on_arrays((unit, page), memory, share, executor)

    def _number(self, unit: int, param: int) -> tuple[int, int]:
        """Of the step whose update is due; and, by it, the key for chance."""
        step = self._pending[unit, param]
        return step, codecs.key_of(self._first[unit] + param, step)

    def _on_arrays(self, place: Page, memory: Tensor, share: Share, executor: Executor) -> None:
        (unit, page), part, param = place, share.part, share.due.param
        (step, key), format = self._number(unit, param), self._pages.spec(unit, page).format.name
        kept, *arrays = self._cached(unit, page, part, memory)
        self._masters.current(unit, part, kept)
        rest = kept if (unit, param) in self._masters else None
        weight = self.weight(unit, part)
        for begin, end, gradient, factors in _gradients(share, executor):
            on = Elements(
                codecs.cut(weight, begin, end),
                None if rest is None else codecs.cut(rest, begin, end),
                gradient,
                factors,
                codecs.pieces(format, arrays, begin, end),
                format,
                part.begin + begin,
                key,
                share.skip,
            )
            executor.run(on, share.hypers, step)
        self._masters.edits.updated(unit, part)

    def weight(self, unit: int, part: PartSpec) -> Tensor:
        """A part's weights on the device."""
        return self._units[unit].elements(part.param, part.begin, part.end)

    def suits_cores(self, unit: int, part: PartSpec) -> bool:
        """Whether the native library works on such weights, and nobody can have edited them unseen."""
        place, dtype = (unit, part.param), self._units[unit].spec.params[part.param].dtype
        kept = torch.bfloat16 if place in self._masters else torch.float32
        return dtype == kept and not self._masters.edits.is_watched(place, part)

    def run_on_host(self, page: tuple[int, int], parts: Sequence[OnHost], states: Tensor, how: cpu.How) -> None:
        """As `run`, of a page whose states are in host memory, like its weights and gradients."""
        unit, spec = page[0], self._pages.spec(*page)
        for on in parts:
            param, part = on.share.due.param, on.share.part
            kept, *arrays = arrays_of(spec, part, states)
            rest = kept if (unit, param) in self._masters else None
            step, key = self._number(unit, param)
            elements = Elements(on.weight, rest, on.gradient, on.factors, arrays, spec.format.name, part.begin, key)
            cpu.RULES[self._rule.name](elements, on.share.hypers, step, how)

    def _pieces(self, unit: int, page: int, part: PartSpec, memory: Tensor) -> Iterator[tuple[int, int, list[Tensor]]]:
        """(first, last + 1, arrays) of some elements of a part at a time: widening them takes memory."""
        spec = self._pages.spec(unit, page)
        _, *arrays = arrays_of(spec, part, memory)
        for begin in range(0, part.numel, KERNEL_PIECE):
            end = min(begin + KERNEL_PIECE, part.numel)
            yield begin, end, codecs.pieces(spec.format.name, arrays, begin, end)

    def _cached(self, unit: int, page: int, part: PartSpec, memory: Tensor) -> list[Tensor]:
        """A part's arrays. Memory of pages that live on the device is the same again and again, and so are slots of the
        ring, which many pages of one layout pass through."""
        passes, spec = self._pages.home(unit, page) is not None, self._pages.spec(unit, page)
        memory = self._pages.ring.memory((unit, page)) if passes else memory
        known: dict[tuple[str, int, int, int], list[Tensor]] = getattr(memory, VIEWS, {})
        key = (spec.format.name, spec.elements, part.element, part.numel)
        if key not in known:
            known[key] = arrays_of(spec, part, memory)
            # There, so that they end with the memory.
            setattr(memory, VIEWS, known)
        return known[key]

    # --- from outside, while nothing is in flight

    def outline(self, unit: int, param: int) -> dict[str, Any]:
        """As torch has it; nothing where the parameter never had a step."""
        steps, spec = self._steps[unit, param], self._units[unit].spec.params[param]
        if not steps:
            return dict(self._aside.get((unit, param), {}))
        whole = torch.empty_strided(spec.shape, spec.stride, dtype=torch.float32, device="meta")
        # fp32 and on the host whatever the user's defaults are.
        count = torch.tensor(float(steps), dtype=torch.float32, device="cpu")
        return ({"step": count} if self._rule.counts else {}) | dict.fromkeys(self._rule.fields, whole)

    def read(self, unit: int, param: int, keys: Sequence[str] | None = None) -> dict[str, Any]:
        found = self.outline(unit, param)
        found = found if keys is None else {key: found[key] for key in keys}
        wanted = {i: key for i, key in enumerate(self._rule.fields) if key in found and self._steps[unit, param]}
        for i, key in wanted.items():
            found[key] = torch.empty_like(found[key], device="cpu")
            apart = self._collector
            whole = apart.whole(Meeting.STATE, (unit, param), i) if apart is not None else self._share(unit, param, i)
            as_flat(found[key]).copy_(whole)
        return found

    def _share(self, unit: int, param: int, which: int) -> Tensor:
        """What this rank has of one of the rule's arrays for a parameter."""
        span = self._units[unit].spec.params[param].owned
        out = torch.zeros(span.room, dtype=torch.float32, device="cpu")
        for page, part in _parts(self._pages.model.units[unit].pages, param):
            at, format = span.locate(part.begin), self._pages.spec(unit, page).format.name
            for begin, end, arrays in self._pieces(unit, page, part, self._pages.read(unit, page)):
                out[at + begin : at + end].copy_(codecs.load(format, self._rule.fields, arrays)[which])
        return out

    def write(self, unit: int, values: Mapping[int, Mapping[str, Any]]) -> None:
        specs, laid_out = self._units[unit].spec.params, dict[int, list[Tensor | None]]()
        for param, state in values.items():
            self.check(unit, param, state)
            laid_out[param] = _laid_out(self._rule, specs[param], state)
        for i, page in enumerate(self._pages.model.units[unit].pages):
            memory = self._pages.read(unit, i)
            for part in page.parts:
                given = laid_out.get(part.param) or [None] * len(self._rule.fields)
                for begin, end, arrays in self._pieces(unit, i, part, memory):
                    first, number = part.begin + begin, self._first[unit] + part.param
                    fields = [
                        torch.full((end - begin,), self._rule.initial, dtype=torch.float32, device=memory.device)
                        if value is None
                        else as_flat(value)[first : part.begin + end].to(memory.device)
                        for value in given
                    ]
                    exact = page.format.name == "exact"
                    noise = (
                        None if exact else codecs.chance(first, end - begin, codecs.key_of(number, 0), memory.device)
                    )
                    codecs.keep(page.format.name, self._rule.fields, arrays, noise, fields)
            self._pages.write(unit, i, memory)
        for param in range(len(self._units[unit].params)):
            state = values.get(param, {})
            if self._units[unit].spec.params[param].trainable:
                self._steps[unit, param] = _count(self._rule, state)
            else:
                self._aside[unit, param] = state

    def check(self, unit: int, param: int, state: Mapping[str, Any]) -> None:
        spec = self._units[unit].spec.params[param]
        unknown = state.keys() - {"step", *self._rule.fields}
        if any(state[key] is not None for key in unknown):
            raise ModelError(
                f"expected states {sorted(self._rule.fields)} for {spec.name!r}, found {sorted(unknown)}; load states "
                "of the same optimizer with the same settings, or prepare with kernels='torch'"
            )
        for name in self._rule.fields:
            value = state.get(name)
            if value is not None and tuple(value.shape) != spec.shape:
                raise ModelError(
                    f"expected {name!r} of shape {spec.shape} for {spec.name!r}, found {tuple(value.shape)}; load the "
                    "states of the same model"
                )


def _count(rule: Rule, state: Mapping[str, Any]) -> int:
    """torch's SGD keeps no count, and needs none but whether there was a step."""
    if not rule.counts:
        return int(any(v is not None for v in state.values()))
    step = state.get("step", 0)
    return 0 if isinstance(step, Tensor) and step.is_meta else int(step)


def _laid_out(rule: Rule, spec: ParamSpec, state: Mapping[str, Any]) -> list[Tensor | None]:
    """The rule's arrays for one parameter, laid out as it is."""
    found = list[Tensor | None]()
    for name in rule.fields:
        value = state.get(name)
        laid_out = torch.empty_strided(spec.shape, spec.stride, dtype=torch.float32, device="cpu")
        found.append(None if value is None or value.is_meta else laid_out.copy_(value))
    return found


def _parts(pages: Sequence[PageSpec], param: int) -> list[tuple[int, PartSpec]]:
    return [(i, part) for i, page in enumerate(pages) for part in page.parts if part.param == param]


def _gradients(share: Share, executor: Executor) -> Iterator[tuple[int, int, Tensor, Sequence[Tensor]]]:
    """(first, last + 1, gradient, factors) of as many elements at a time as the executor takes."""
    count, as_kept = share.part.numel, share.as_kept() if executor.fused else None
    if as_kept is not None:
        yield 0, count, *as_kept
        return
    for begin in range(0, count, KERNEL_PIECE):
        end = min(begin + KERNEL_PIECE, count)
        yield begin, end, share.piece(begin, end), ()
