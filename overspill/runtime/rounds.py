"""Backward passes over ranks: what arrived in one, and how the ranks come together at its end and at a step.

Note [End of a backward pass]: gradients are reduced unit by unit, as those of a unit are complete. What is left when a
backward pass is over (units of which a parameter was not used) is reduced then. The ranks also tell each other which
parameters got a gradient at all: one that this rank did not use, but another did, has a gradient here too, as if its
own had been zero. A rank that has no backward pass while others do takes part when it comes to `step()`.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from overspill.errors import RankError
from overspill.program import Flush, Join, Kind
from overspill.runtime.backward import in_backward
from overspill.runtime.gradient_bytes import GradientBytes
from overspill.runtime.handle import GradHandle, gradient_of
from overspill.runtime.parts import Parts
from overspill.runtime.ranks import Meeting, Point
from overspill.runtime.residency import Residency
from overspill.runtime.updates import as_text
from overspill.units.local import local_of, wrapped
from overspill.units.unit import Unit

Place = tuple[int, int]


class Rounds:
    """See Note [End of a backward pass]."""

    def __init__(self, units: Sequence[Unit], parts: Parts, residency: Residency) -> None:
        assert parts.made.ranks is not None, "only over ranks"
        self._units = units
        self._executor = parts.executor
        assert parts.made.grads.reduced is not None, "only over ranks"
        self._grads = parts.made.grads
        self._reduced = parts.made.grads.reduced
        self._ranks = parts.made.ranks
        self._residency = residency
        self._zero = parts.executor.program.model.sharding.zero
        self._places = [(u, i) for u, unit in enumerate(units) for i, p in enumerate(unit.params) if p.requires_grad]
        self._arrived: set[Place] = set()
        self._watched = -1
        """The backward pass whose end is waited for."""
        self._steps = 0
        self._held = 0
        """How many `no_sync` contexts are open."""
        self._reduced.synced = lambda: not self._held or self._zero >= 2
        assert parts.made.collector is not None, "only over ranks"
        parts.made.collector.gives[Meeting.GRADIENT] = partial(_share, units, self._grads.bytes)
        self._ranks.phase, self._ranks.held = self._phase, residency.held
        self._ranks.joins |= {
            Meeting.GATHER: self._join,
            Meeting.REDUCE: self._join,
            Meeting.OVER: lambda point: self._exchange(),
        }

    def _phase(self) -> str:
        return f"{'backward' if in_backward() else self._residency.phase}, step {self._steps}"

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    def begin(self) -> None:
        """A forward begins. If something is left of a backward pass, that was interrupted by an error: it may belong to
        gradients that were dropped since, so it must not be averaged with what the next pass brings. Where it was
        interrupted on some ranks only, the others would step on less than all gave: that is refused on all."""
        left = self._arrived or self._executor.state.arrived
        if left and not in_backward():
            self._ranks.meet(Meeting.BROKEN)
            self._executor(Flush(forget=True))
            self._reduced.forget()
            self._arrived.clear()
            self._watched = -1

    def arrived(self, unit: int, param: int) -> None:
        """Autograd made a gradient."""
        if not self._reduced.synced():
            return
        self._arrived.add((unit, param))
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._watched):
            self._watched = task
            Variable._execution_engine.queue_callback(self.end)

    def _join(self, point: Point) -> None:
        self._ranks.settled(point)
        kind = Kind.GATHER if point.kind == Meeting.GATHER else Kind.REDUCE
        self._executor.join(Join(kind, point.unit, self._residency.held()))

    def end(self) -> None:
        """A backward pass is over, or a step begins."""
        held = [generation for generation in self._grads.bytes.current() if generation.local]
        if not self._arrived and not self._executor.state.arrived and not held:
            return
        for generation in held:
            self._arrived.add((generation.unit, generation.param))
            self._reduced.put_held(generation)
        while self._executor.state.arrived:
            self._executor(Flush())
        if self._ranks.agree(self._over):
            self._claim(self._arrived)
        elif self._arrived:
            self._exchange()
        self._arrived.clear()
        self._reduced.unclaimed.clear()
        self._watched = -1

    def _over(self) -> tuple[Point, ...]:
        return (Point(Meeting.OVER, 0, _hash(self._arrived)),) if self._arrived else ()

    def _exchange(self) -> None:
        """Which parameters got a gradient on some rank; those that did not here get what the others brought."""
        mine = sorted(self._arrived)
        found = self._ranks.comm.exchange([list(place) for place in mine])
        self._arrived.clear()
        self._claim({(u, i) for places in found for u, i in places})

    def _claim(self, union: set[Place]) -> None:
        """What others brought, of parameters that got a gradient on some rank."""
        for unit, param in sorted(union & self._reduced.unclaimed.keys()):
            p, held = self._units[unit].params[param], gradient_of(self._units[unit].params[param])
            generation = self._reduced.adopt(unit, param, (self._units[unit].spec.params[param], held))
            if generation is not held:
                p.grad = None
                p.grad = wrapped(p, GradHandle([generation], self._grads, self._executor.lanes.device))
        self._reduced.unclaimed.clear()

    def meet_to_step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """All ranks are about to step, with the same hyperparameters: what one has no gradient for may have come from
        another."""
        self.end()
        self._ranks.meet(Meeting.STEP, self._steps, _hyperparameters(groups))

    def step(self, due: Iterable[Place]) -> None:
        """All ranks step, on gradients of the same parameters."""
        self._ranks.meet(Meeting.STEP, self._steps, 1 + _hash(due))
        self._steps += 1

    def meet_to_close(self, unit: int) -> None:
        self._ranks.meet(Meeting.CLOSE, unit)

    def close(self) -> None:
        """No rank leaves before all have what they need from it."""
        self._ranks.meet(Meeting.CLOSE, len(self._units))
        self._executor.finish()
        self._ranks.comm.close()


def _hyperparameters(groups: Iterable[Mapping[str, Any]]) -> int:
    return zlib.crc32(repr([sorted(as_text(group).items()) for group in groups]).encode())


def _hash(places: Iterable[Place]) -> int:
    return zlib.crc32(repr(sorted(places)).encode())


def _share(units: Sequence[Unit], held: GradientBytes, unit: int, param: int, which: int) -> Tensor:
    """What this rank has of a gradient that another one looks at."""
    gradient = units[unit].params[param].grad
    handle = None if gradient is None else local_of(gradient)
    if not isinstance(handle, GradHandle) or handle.generation.span is None:
        raise RankError(
            f"expected the gradient of {units[unit].spec.params[param].name!r} on all ranks, because another one looks "
            f"at it, found {'none' if handle is None else 'your own'} here; do the same to gradients on every rank"
        )
    return held.share(handle.generation)
