"""update="delayed": what a step takes is applied one step later, beside the work of that step.

Note [One step later]: after `after` steps as usual, `step()` keeps what it took. The update of a unit begins in the
next backward pass, when that has made all of the unit's new gradients and needs its weights no more, and may go on
until the next forward pass needs them. So it is not waited for until then, though gradients may be clipped by the norm
of all: that is known since `step()`. A forward pass sees all updates but the last one. Gradients of two steps are kept
at a time. Where a step is skipped, by `zero_grad()` after a backward pass, updates that began in that pass go on, and
so all that was kept is applied: how many had begun is chance. Whatever looks at the model from outside (an evaluation,
a copy, a checkpoint, a state dict that is made or loaded) sees all updates; training goes on from there.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

from overspill.errors import StateError
from overspill.runtime.arrivals import Arrivals
from overspill.runtime.generation import Generation
from overspill.runtime.steps import Jobs
from overspill.runtime.updates import Job
from overspill.units.unit import Unit

Take = Callable[[int, list[Job]], bool]
"""(unit, what a step asked of it): its update is due, if that is possible now."""


class Delayed:
    """Keeps what the last step took, until it is due."""

    def __init__(
        self, units: Sequence[Unit], arrivals: Arrivals, after: int, take: Take, keep: Callable[[Generation], None]
    ) -> None:
        self.takes = False
        self.strict = self.waits = True
        self._keep = keep
        self._units = units
        self._after = after
        self._take = take
        self._arrivals = arrivals
        self._kept: Jobs = {}
        self._begun: set[int] = set()
        """Units whose updates began in the backward passes since the last step."""
        self._complete: set[int] = set()
        """Units whose updates began there, or would have: what is refused is the same in all steps, not only when hours
        of training are lost with that."""
        self._broke_off = False
        """Whether the last backward pass did."""

    def no_sync(self) -> AbstractContextManager[None]:
        return self._arrivals.no_sync()

    def check(self, units: Iterable[int] | None = None) -> None:
        """Refuse a look at units whose updates have begun, before the step that they wait for; None: at any unit."""
        if self._arrivals.broke_off():
            self._broke_off, self._complete = True, set(self._begun)
        if self._broke_off and units is None:
            # Its step can only be skipped, and whoever looks at all of the model applies what was kept.
            self._forget()
        found = next((u for u in (self._complete if units is None else units) if u in self._complete), None)
        if found is not None:
            raise StateError(
                "expected step() before the model, its states or a checkpoint are used with update='delayed', found a "
                f"use of {self._units[found].spec.name!r}, whose last update begins in the backward pass (from "
                f"step {self._after + 2} on; the same is refused before); call step() first, or optimizer.zero_grad() "
                "to skip it; put backward passes that are not the last before it into `with model.no_sync():`; or use "
                "update='lazy'"
            )

    def passing(self) -> None:
        self._arrivals.passes.begin()

    def arrived(self, unit: int, param: int) -> None:
        """A gradient is there, with all that this backward pass adds to it."""
        self._arrivals.passes.came()
        self._broke_off = False
        if unit in self._complete:
            raise StateError(
                "expected one backward pass before step() with update='delayed', found that another one adds to the "
                f"gradient of {self._units[unit].spec.params[param].name!r} (which cannot be done from step "
                f"{self._after + 2} on, and is refused before); put the backward passes that are not the "
                "last into `with model.no_sync():`, or use update='lazy'"
            )
        if not self._arrivals.complete(unit, param):
            return
        self._complete.add(unit)
        if unit in self._kept and self._take(unit, self._kept[unit]):
            _let_go(self._kept.pop(unit))
            self._begun.add(unit)

    def step(self) -> frozenset[int]:
        """The units whose updates have begun."""
        begun = frozenset(self._begun)
        self._forget()
        return begun

    def _forget(self) -> None:
        """The next pass belongs to another step."""
        self._begun.clear()
        self._complete.clear()
        self._broke_off = False
        self._arrivals.forget()

    def zeroed(self) -> bool:
        """See Note [One step later], on steps that are skipped."""
        skipped = self._arrivals.some or self._broke_off
        self._forget()
        return skipped

    def exchange(self, jobs: Jobs, count: int) -> Jobs:
        """Keep what a step takes; what is due now instead."""
        if count <= self._after:
            return jobs
        due, self._kept = self.flush(), jobs
        for todo in jobs.values():
            for job in todo:
                for taken in job.due:
                    taken.generation.kept = True
                    self._keep(taken.generation)
        return due

    def flush(self) -> Jobs:
        """What was kept is due."""
        due, self._kept = self._kept, {}
        for todo in due.values():
            _let_go(todo)
        return due


def _let_go(todo: Sequence[Job]) -> None:
    for job in todo:
        for taken in job.due:
            taken.generation.kept = False
