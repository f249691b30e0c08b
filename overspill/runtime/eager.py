"""update="eager": the update of a unit begins in the backward pass, as soon as its gradients are complete.

Nothing may change a gradient between that moment and `step()`, so there is no clipping by a norm of all. What would be
silently different from a plain loop is refused: another learning rate at `step()`, and any look at weights or states
before it, of which some are new already. After a backward pass that broke off (broken.py) the model is between two
steps: nobody may go on with it, but to load all of it anew, or to close it. One case torch refuses itself, as a weight
changed in place: a module that is used twice, once inside a re-entrant checkpoint, whose backward pass is one of its
own and ends before the other's.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from overspill.errors import StateError
from overspill.runtime.arrivals import Arrivals
from overspill.runtime.executor import LOADED, Executor, Mixed
from overspill.runtime.generation import Generation
from overspill.runtime.handle import gradient_of
from overspill.runtime.steps import Jobs
from overspill.runtime.updates import same_values, snapshot
from overspill.specs import human
from overspill.units.unit import Unit

log = logging.getLogger("overspill")

NAMED = 3
"""Units that a message names."""

Take = Callable[[int, list[dict[str, Any]]], bool]
"""(unit, groups with the unit's own parameters): its update is due, if that is possible now."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """What an update that has begun took."""

    gradients: list[tuple[nn.Parameter, Generation]]
    hypers: dict[int, dict[str, Any]]
    """Hyperparameters by group."""


class Eager:
    """Knows which updates have begun, and what they took."""

    def __init__(
        self,
        units: Sequence[Unit],
        arrivals: Arrivals,
        groups: list[dict[str, Any]],
        take: Take,
        executor: Executor,
    ) -> None:
        self.takes = self.waits = True
        self.strict = False
        self._executor = executor
        executor.hears = self._hear
        self._units = units
        self._groups = groups
        self._take = take
        self._arrivals = arrivals
        self._taken: dict[int, _Begun] = {}
        self.room = 0
        """Bytes that are planned for gradients; 0: for all of them."""
        self._waiting: dict[int, dict[int, int]] = {}
        """Unit -> parameters whose gradients are there, where updates have not begun, with their bytes."""
        self._nbytes = 0
        """Bytes of the gradients that wait."""
        self._warned = False

    def no_sync(self) -> AbstractContextManager[None]:
        return self._arrivals.no_sync()

    def check(self, units: Iterable[int] | None = None) -> None:
        """Refuse a look at units whose updates have begun before the step that they belong to; None: at any unit."""
        self._hear()
        found = next((u for u in (self._taken if units is None else units) if u in self._taken), None)
        if found is not None:
            raise StateError(
                "expected step() before the model, its states or a checkpoint are used with update='eager', found a "
                f"use of {self._units[found].spec.name!r}, whose update began in the backward pass; call step() first; "
                "put backward passes that are not the last before it into `with model.no_sync():`; or use "
                "update='lazy'"
            )

    def _hear(self) -> None:
        """What a backward pass left that broke off, once updates had begun, belongs to no step any more."""
        if not self._arrivals.broke_off():
            return
        found, taken = [repr(self._units[u].spec.name) for u in self._taken], bool(self._taken)
        self._forget()
        if not taken:
            return
        names = ", ".join(found[:NAMED]) + f" and {len(found) - NAMED} more" * (len(found) > NAMED)
        left = Mixed(
            f"that a backward pass broke off after updates of {names} had begun, with update='eager': the model is "
            "between two steps",
            closes=True,
        )
        with torch._C.DisableTorchFunctionSubclass():
            for p in (p for groups in self._arrivals.members.values() for _, own in groups for p in own):
                if gradient_of(p) is not None:
                    p.grad = None
        self._executor.mixed = dict.fromkeys(LOADED, left)

    def passing(self) -> None:
        self._arrivals.passes.begin()

    def arrived(self, unit: int, param: int) -> None:
        """A gradient is there, with all that this backward pass adds to it."""
        self._arrivals.passes.came()
        name = self._units[unit].spec.params[param].name
        self._count(unit, param)
        if unit in self._taken:
            raise StateError(
                f"expected one backward pass before step() with update='eager', found that another one adds to the "
                f"gradient of {name!r}, whose update has begun; put the backward passes that are not the last into "
                "`with model.no_sync():`, or use update='lazy'"
            )
        generation = gradient_of(self._units[unit].params[param])
        if generation is not None and generation.lent:
            raise StateError(
                f"expected nobody to hold views of gradients with update='eager', found some of that of {name!r}: "
                "changes through them would be lost; let them go, or use update='lazy'"
            )
        if self._arrivals.complete(unit, param):
            self._begin(unit)

    def _count(self, unit: int, param: int) -> None:
        """Gradients that are not let go, because their unit's are not complete, may take more than is planned."""
        if not self.room or self._warned:
            return
        there = self._waiting.setdefault(unit, {})
        if param not in there:
            there[param] = self._units[unit].spec.params[param].grad_bytes
            self._nbytes += there[param]
        if self._nbytes > self.room:
            self._warned = True
            log.warning(
                "%s of gradients wait for others of their units, and %s are planned: a parameter that gets no gradient "
                "(an expert that nobody chose, one that is not used), or a backward pass inside of no_sync() keeps "
                "them; say micro_batches, or use update='lazy', which plans for all",
                human(self._nbytes),
                human(self.room),
            )

    def _begin(self, unit: int) -> None:
        params = [p for _, own in self._arrivals.members[unit] for p in own]
        found = [(p, generation) for p in params if (generation := gradient_of(p)) is not None]
        if len(found) < len(params):
            # Some are tensors of the user's own, which may still be written to: with the step, as in lazy.
            return
        if self._take(unit, [{**self._groups[g], "params": own} for g, own in self._arrivals.members[unit]]):
            self._taken[unit] = _Begun(found, {g: snapshot(self._groups[g]) for g, _ in self._arrivals.members[unit]})
            self._nbytes -= sum(self._waiting.pop(unit, {}).values())
            for _, generation in found:
                generation.spent = True

    def zeroed(self) -> bool:
        """A step cannot be skipped: it has begun. What came before it has may be dropped."""
        self.check()
        self._forget()
        return False

    def exchange(self, jobs: Jobs, count: int) -> Jobs:
        """Not before here: a step that is refused has not come, and what has begun still belongs to it."""
        self._forget()
        return jobs

    def _forget(self) -> None:
        for begun in self._taken.values():
            for _, generation in begun.gradients:
                generation.spent = False
        self._taken.clear()
        self._waiting.clear()
        self._nbytes = 0
        self._arrivals.forget()

    def flush(self) -> Jobs:
        return {}

    def step(self) -> frozenset[int]:
        """The units whose updates have begun; their gradients and hyperparameters must still be those."""
        self._hear()
        for begun in self._taken.values():
            for g, hypers in begun.hypers.items():
                if not same_values(hypers, snapshot(self._groups[g])):
                    raise StateError(
                        "expected learning rates and other hyperparameters to change after step() with "
                        f"update='eager', found those of group {g} changed between backward and step(): updates have "
                        "begun with the old ones; change them after step(), or use update='lazy'"
                    )
            for p, generation in begun.gradients:
                if gradient_of(p) is not generation:
                    error = StateError(
                        "expected gradients to be left alone between backward and step() with update='eager', found "
                        f"that of {generation.spec.name!r} replaced: its update has begun with the old one; use "
                        "update='lazy'"
                    )
                    self._taken.clear()
                    self._executor.give_up(error)
                    raise error
        return frozenset(self._taken)
