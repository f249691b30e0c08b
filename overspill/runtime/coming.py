"""Gradients that autograd just made, until those of a unit are looked after together.

Note [Together]: to look after one gradient takes the host a few dozen microseconds, most of them because nothing that
is needed for it is in the processor's caches. Several in a row take a fraction of that each, and one kernel copies them
all. So those of a unit wait for the last of them, as long as they are a small share of the device's budget. Meanwhile
`p.grad` is what autograd made; so a parameter with hooks of the user's own, which may look at that, does not wait.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from overspill.runtime.generation import Generation
from overspill.runtime.lazy import Early
from overspill.runtime.parts import Parts
from overspill.trace import own_time

SHARE = 100
"""Of the device's budget, what may wait is one part in so many."""


class Keeper(Protocol):
    """Who looks after gradients: the engine."""

    parts: Parts
    early: Early

    def hand_out(self, p: nn.Parameter, generation: Generation) -> None: ...


class Coming:
    """The gradients of one unit that wait."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._expected = [sum(p.requires_grad for p in unit.params) for unit in keeper.parts.units]
        self._most = keeper.parts.budget.device // SHARE
        self._unit = 0
        self._found: list[tuple[int, Tensor]] = []
        """(parameter, gradient)"""
        self._nbytes = 0
        self._watched = -1
        """The backward pass at whose end nothing will wait any more."""

    def add(self, unit: int, param: int, gradient: Tensor) -> bool:
        """Whether it may wait."""
        hooks = self._keeper.parts.units[unit].params[param]._post_accumulate_grad_hooks
        if len(hooks) > 1 or not self._keeper.parts.made.grads.may_wait(unit, param, gradient):
            return False
        task = torch._C._current_graph_task_id()
        if unit != self._unit or task != self._watched:
            # Of another unit, or of a backward pass that ended with an error.
            self.take()
            self._unit = unit
        if task != self._watched:
            self._watched = task
            Variable._execution_engine.queue_callback(self._end)
        self._found.append((param, gradient))
        self._nbytes += gradient.nbytes
        if len(self._found) == self._expected[unit] or self._nbytes > self._most:
            self.take()
        return True

    def take(self) -> None:
        """Nothing waits any more."""
        if not self._found:
            return
        found, self._found, self._nbytes = self._found, [], 0
        keeper, unit, rooms = self._keeper, self._unit, self._keeper.parts.made.grads.rooms
        params, specs = keeper.parts.units[unit].params, keeper.parts.units[unit].spec.params
        assert rooms is not None, "only what has room waits"
        # What is done to parameters here is no use of them.
        with torch._C.DisableTorchFunctionSubclass():
            # Somebody may have taken one away, or put another one there.
            still = [(param, gradient) for param, gradient in found if params[param].grad is gradient]
            for (param, _), value in zip(still, rooms.move_in_together(unit, still), strict=True):
                keeper.hand_out(params[param], Generation(unit, param, specs[param], value))
        for param, _ in found:
            keeper.early.arrived(unit, param)

    def _end(self) -> None:
        """Of a backward pass."""
        self._watched = -1
        with own_time:
            self.take()
