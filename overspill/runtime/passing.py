"""Gradients on their way: the ops that add to them, take their norms, and carry them home and back."""

from collections.abc import Callable

import torch
from torch import Tensor

from overspill.program import Kind, Op
from overspill.runtime.executor import Handler
from overspill.runtime.generation import Generation, as_bytes
from overspill.runtime.gradient_bytes import GradientBytes
from overspill.runtime.lanes import Work, nothing


class Passing:
    """Which gradients the events of the program speak of."""

    def __init__(self, bytes: GradientBytes, device: torch.device) -> None:
        self._bytes = bytes
        self._device = device
        self._arriving: dict[tuple[int, int], Generation] = {}
        """The gradient that an event speaks of, until it is sent home."""
        self._coming: dict[tuple[int, int], Callable[[Tensor], object]] = {}
        self.leaving: dict[tuple[int, int], Generation] = {}
        """Gradients that were sent home and are still on the device."""
        self.reduced: Callable[[int], None] = lambda unit: None
        """Told when what the compute lane does next comes after the reduction of a unit."""

    def handlers(self) -> dict[Kind, Handler]:
        return {
            Kind.GRAD_FETCH: self._fetch,
            Kind.GRAD_ADD: self._add,
            Kind.GRAD_NORM: self._norm,
            Kind.GRAD_STORE: self._store,
            Kind.GRAD_DROP: self._drop,
        }

    def expect(self, generation: Generation, contribution: Callable[[Tensor], object] | None = None) -> None:
        """The events that follow speak of this gradient, and of what is to be added to it."""
        key = (generation.unit, generation.param)
        if contribution is not None or self._bytes.home(*key) is not None:
            self._arriving[key] = generation
        if contribution is not None:
            self._coming[key] = contribution

    def _fetch(self, op: Op) -> Work:
        generation = self._arriving[op.unit, op.item]
        home = self._bytes.home_of(generation)
        assert home is not None, "only a gradient that lives elsewhere is fetched"
        value = generation.empty(self._device)
        generation.value = value
        return lambda: home[0].load(home[1], as_bytes(value))

    def _add(self, op: Op) -> Work:
        key = (op.unit, op.item)
        generation, contribution = self._arriving[key], self._coming.pop(key)
        if self._bytes.home(*key) is None:
            del self._arriving[key]

        def add() -> None:
            self.reduced(op.unit)
            generation.add(contribution)
            self._bytes.make_room(generation)

        return add

    def _norm(self, op: Op) -> Work:
        generation = self._arriving[op.unit, op.item]

        def norm() -> None:
            self.reduced(op.unit)
            assert generation.value is not None, "a gradient is normed while it is on the device"
            generation.raw_norm = generation.norms[2.0] = generation.norm(generation.value)

        return norm

    def _store(self, op: Op) -> Work:
        generation = self._arriving.pop((op.unit, op.item))
        self._bytes.move_home(generation)
        home = self._bytes.home(op.unit, op.item)
        self.leaving[op.unit, op.item], value = generation, generation.value
        assert value is not None and home is not None, "only a gradient that is here and lives elsewhere is stored"
        return lambda: home[0].store(home[1], as_bytes(value))

    def _drop(self, op: Op) -> Work:
        generation = self.leaving.pop((op.unit, op.item), None)
        return nothing if generation is None else lambda: setattr(generation, "value", None)
