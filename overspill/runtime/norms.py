"""Norms of gradients, kept with each until it changes."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from overspill.errors import OptionError
from overspill.program import Key, Kind
from overspill.runtime.collect import Collector
from overspill.runtime.executor import Executor
from overspill.runtime.generation import Generation

TOGETHER = {"cuda"}
"""Kinds of devices on which those of several gradients are taken together: elsewhere it would be slower."""


class Book(Protocol):
    """Who knows the bytes of gradients: gradient_bytes.py."""

    current: Callable[[], list[Generation]]

    def share(self, generation: Generation) -> Tensor: ...
    def at_hand(self, generation: Generation) -> Tensor: ...


class Norms:
    """Of all gradients of one model."""

    def __init__(self, book: Book, executor: Executor, collector: Collector | None) -> None:
        self._book = book
        self._executor = executor
        self._collector = collector
        self._device = executor.lanes.device

    def of(self, generations: Sequence[Generation], order: float = 2.0) -> list[Tensor]:
        """Of the gradients' current values; cached, because for one that lives elsewhere it is dear. Who asks for one
        will ask for the others: those that are divided over ranks are all looked at together."""
        asked = [g for g in generations if g.span is not None]
        if asked and not order >= 0:
            raise OptionError(
                f"expected a norm of order 0 or more, or infinity, of gradients that ranks divide, found {order}; use "
                "norm_type=2.0"
            )
        if self._collector is not None and not all(_is_known(g, order) for g in asked):
            current = [g for g in self._book.current() if g.span is not None]
            every = current if {*map(id, asked)} <= {*map(id, current)} else asked
            shares = [self._norm(g, order) for g in every]
            for g, share, norm in zip(every, shares, self._collector.norms(shares, order), strict=True):
                g.whole_norms[order] = (norm, share)
        if self._device.type in TOGETHER and any(g.span is None and order not in g.norms for g in generations):
            also = self._book.current() if len(generations) == 1 else ()
            _norm_together(self._executor, [g for g in (*also, *generations) if g.span is None], order)
        return [g.whole_norms[order][0] if g.span is not None else self._norm(g, order) for g in generations]

    def _norm(self, generation: Generation, order: float) -> Tensor:
        """Of what this rank has."""
        if order not in generation.norms or generation.lent:
            changed = generation.zero or generation.todo
            value = self._book.share(generation) if changed else self._book.at_hand(generation)
            found = torch._foreach_norm([value], order)[0] if changed else generation.norm(value, order)
            generation.norms[order] = found
            generation.raw_norm = found if order == 2.0 and not changed else generation.raw_norm
        return generation.norms[order]

    def raw(self, generation: Generation) -> Tensor:
        """Of its bytes as they came, whatever changes wait for them; of what this rank has of them."""
        if generation.raw_norm is None and not generation.zero:
            generation.raw_norm = generation.norm(self._book.at_hand(generation))
        return torch.zeros((), device=self._device) if generation.raw_norm is None else generation.raw_norm


def _is_known(generation: Generation, order: float) -> bool:
    """Whether the norm of all of it is known."""
    return order in generation.whole_norms and generation.whole_norms[order][1] is generation.norms.get(order)


def _norm_together(executor: Executor, generations: Sequence[Generation], order: float) -> None:
    """Those that are on the device and as they came: a few kernels for all of them."""
    alike: dict[tuple[torch.dtype, int], list[Generation]] = {}
    for g in {id(g): g for g in generations}.values():
        plain = not (g.lent or g.zero or g.todo or order in g.norms)
        if plain and g.value is not None and g.value.device == executor.lanes.device:
            alike.setdefault((g.dtype, id(g.factor)), []).append(g)
    for found in alike.values():
        if len(found) > 1:
            for unit in {g.unit for g in found}:
                executor.wait(Key(Kind.REDUCE, unit))
            for g, norm in zip(found, Generation.norms_of(found, order), strict=True):
                g.norms[order] = norm
                g.raw_norm = norm if order == 2.0 else g.raw_norm
