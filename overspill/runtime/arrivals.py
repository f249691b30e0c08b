"""Which units have all their gradients of the last backward pass before `step()`, for updates that begin there.

Somebody must say which backward pass is the last: all are, but those inside of `no_sync()`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from overspill.runtime.broken import Passes
from overspill.tiers import streams
from overspill.units.unit import Unit


class Arrivals:
    """Counts the gradients of each unit."""

    def __init__(self, units: Sequence[Unit], groups: list[dict[str, Any]], device: torch.device) -> None:
        self._units = units
        self._device = device
        self._streams: dict[int, set[int]] = {}
        """Which made the gradients of each unit, and used its weights for that."""
        place = {id(p): u for u, unit in enumerate(units) for p in unit.params}
        self.members: dict[int, list[tuple[int, list[nn.Parameter]]]] = {}
        """Unit -> (group, its parameters in that unit)."""
        for g, group in enumerate(groups):
            own: dict[int, list[nn.Parameter]] = {}
            for p in group["params"]:
                if p.requires_grad:
                    own.setdefault(place[id(p)], []).append(p)
            for unit, params in own.items():
                self.members.setdefault(unit, []).append((g, params))
        self._missing: dict[int, set[int]] = {}
        self._held = 0
        """How many `no_sync` contexts are open."""
        self.passes = Passes()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    def complete(self, unit: int, param: int) -> bool:
        """A gradient is there, with all that this backward pass adds to it: whether it is the last of its unit."""
        if self._held or unit not in self.members:
            return False
        if unit not in self._missing:
            # Also those that no step takes: their gradients come from the same pass.
            self._missing[unit] = {i for i, p in enumerate(self._units[unit].spec.params) if p.trainable}
        self._missing[unit].discard(param)
        self._streams.setdefault(unit, set()).add(streams.current(self._device))
        return not self._missing[unit]

    def broke_off(self) -> bool:
        """Whether a backward pass broke off: what it brought may be dropped, or added to, and so counts for nothing. It
        is told once."""
        found = self.passes.broke_off()
        if found:
            self.forget()
        return found

    @property
    def some(self) -> bool:
        """Whether gradients have come since the last step, in a pass that may be the last before the next one."""
        return bool(self._missing)

    def wait(self, unit: int) -> None:
        """What the current stream is given next comes behind all that makes the gradients of a unit. (At the end of a
        backward pass autograd does so itself.)"""
        here = streams.current(self._device)
        for other in self._streams.get(unit, ()):
            streams.follow(self._device, here, other)

    def forget(self) -> None:
        """The next pass belongs to another step."""
        self._missing.clear()
        self._streams.clear()
        self.passes.forget()
