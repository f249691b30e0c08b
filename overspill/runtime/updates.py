"""Runs the user's own optimizer on one page at a time, with the hyperparameters that held at `step()`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from overspill.errors import ModelError
from overspill.program import Kind, Op
from overspill.runtime.executor import Handler
from overspill.runtime.gradients import Generation, Gradients, as_bytes
from overspill.runtime.lanes import Work
from overspill.runtime.states import States
from overspill.units.states import stand_in
from overspill.units.unit import Unit


@dataclass(frozen=True, slots=True)
class Due:
    """One parameter's part of a step: the generation it took and how many of its changes count."""

    param: int
    generation: Generation
    changes: int


@dataclass(frozen=True, slots=True)
class Job:
    """What one parameter group asked of one unit at `step()`."""

    hypers: Mapping[str, Any]
    due: tuple[Due, ...]


def snapshot(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters as they are now; schedulers change them, a tensor learning rate even in place."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}


class Updates:
    """Pending updates of all units, and the ops that carry them out."""

    def __init__(self, optimizer: torch.optim.Optimizer, units: Sequence[Unit], grads: Gradients, states: States):
        self._runner = stand_in(optimizer, [])
        self._units = units
        self._grads = grads
        self._states = states
        self._pending: dict[int, tuple[Job, ...]] = {}
        self._staged: dict[tuple[int, int], dict[int, Tensor]] = {}

    def handlers(self) -> dict[Kind, Handler]:
        return {Kind.PAGE_GRADS: self._fetch, Kind.UPDATE: self._update, Kind.PAGE_DROP: self._drop}

    def put(self, unit: int, jobs: tuple[Job, ...]) -> None:
        assert unit not in self._pending, "an older update of the unit must be drained before the next is due"
        self._pending[unit] = jobs
        # Weights saved for a backward are out of date from now on, and autograd shall say so, as after a plain step.
        due = [self._units[unit].params[d.param] for job in jobs for d in job.due]
        torch.autograd.graph.increment_version(due)

    def _of_page(self, op: Op) -> list[tuple[Mapping[str, Any], list[Due]]]:
        page = self._units[op.unit].spec.pages[op.item]
        jobs = self._pending.get(op.unit, ())
        parts = [(job.hypers, [d for d in job.due if page.first <= d.param < page.last]) for job in jobs]
        return [(hypers, due) for hypers, due in parts if due]

    def _fetch(self, op: Op) -> Work:
        """Bring the page's gradients to the device; those that are there already are copied."""
        staged: dict[int, Tensor] = {}
        loads: list[Work] = []

        def load() -> None:
            for each in loads:
                each()

        for _, due in self._of_page(op):
            for d in due:
                value = staged[d.param] = d.generation.empty(self._states.device)
                loads.append(self._load(d.generation, value))
        self._staged[op.unit, op.item] = staged
        return load

    def _load(self, generation: Generation, value: Tensor) -> Work:
        home = self._grads.home(generation.unit, generation.param)
        here = generation.value
        if generation.zero:
            return lambda: _zero(value)
        if here is not None:
            return lambda: _copy(value, here)
        assert home is not None, f"the gradient of {generation.spec.name} has no bytes"
        return lambda: home[0].load(home[1], as_bytes(value))

    def _update(self, op: Op) -> Work:
        return lambda: self._run(op)

    def _run(self, op: Op) -> None:
        parts, unit = self._of_page(op), self._units[op.unit]
        if op.item == len(unit.spec.pages) - 1:
            del self._pending[op.unit]
        if parts:
            self._run_parts(op, parts)

    def _run_parts(self, op: Op, parts: list[tuple[Mapping[str, Any], list[Due]]]) -> None:
        unit, staged = self._units[op.unit], self._staged.get((op.unit, op.item), {})
        groups, gradients = [], {}
        for hypers, due in parts:
            groups.append({**hypers, "params": [unit.params[d.param] for d in due]})
            for d in due:
                gradients[d.param] = self._gradient(d, staged)
        self._step(op, groups, gradients)
        for (hypers, _), group in zip(parts, groups, strict=True):
            _refuse_changed_group(type(self._runner).__name__, hypers, group)

    def _gradient(self, due: Due, staged: Mapping[int, Tensor]) -> Tensor:
        """The gradient with the changes that were made before `step()`."""
        generation, value = due.generation, staged.get(due.param)
        if value is None and generation.zero:
            value = generation.empty(self._states.device).zero_()
        if value is not None:
            for change in generation.todo[: due.changes]:
                change(value)
            return value
        assert generation.value is not None, f"the gradient of {generation.spec.name} is not on the device"
        for change in generation.todo[: due.changes]:
            change(generation.value)
        del generation.todo[: due.changes]
        return generation.value

    def _step(self, op: Op, groups: list[dict[str, Any]], gradients: Mapping[int, Tensor]) -> None:
        """One step of the user's optimizer on the user's own parameters, made plain for its duration."""
        unit, page = self._units[op.unit], op.item
        runner = self._runner
        runner.param_groups = groups
        runner.state.clear()
        kept = {i: (unit.params[i], type(unit.params[i]), unit.params[i].grad) for i in gradients}
        with torch.inference_mode(False), torch.no_grad():
            for i, (p, _, _) in kept.items():
                # torch picks its fast paths by exact type, so the parameter must be a plain one here.
                p.__class__ = nn.Parameter
                p.grad = None
                p.grad = gradients[i]
                state = self._states.lend(op.unit, i, page)
                if state:
                    runner.state[p] = state
            counts = _counts(runner)
            try:
                runner.step()
            finally:
                for p, cls, grad in kept.values():
                    p.grad = None
                    p.grad = grad
                    p.__class__ = cls
            for i, (p, _, _) in kept.items():
                self._states.take_back(op.unit, i, page, runner.state.get(p, {}))
        _refuse_changed_group(type(runner).__name__, counts, _counts(runner))
        runner.state.clear()
        runner.param_groups = []

    def _drop(self, op: Op) -> Work:
        def drop() -> None:
            self._staged.pop((op.unit, op.item), None)
            self._states.drop(op.unit, op.item)

        return drop


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source)


def _zero(t: Tensor) -> None:
    t.zero_()


def _counts(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Numbers that an optimizer keeps on itself; flags (torch's own check devices once) are none."""
    return {f"self.{k}": v for k, v in vars(optimizer).items() if type(v) in (int, float)}


def _refuse_changed_group(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """An optimizer that keeps running values in its groups couples all parameters: unit by unit would be wrong."""
    for key in (after.keys() | before.keys()) - {"params"}:
        value = before.get(key)
        if after.get(key) is not value and not _equal(after.get(key), value):
            raise ModelError(
                f"expected {name} to leave its group values alone during a step, found {key!r} changed from {value} to "
                f"{after.get(key)}; an optimizer that counts steps for all couples all parameters and cannot run "
                "unit by unit"
            )


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    return bool(a == b)
