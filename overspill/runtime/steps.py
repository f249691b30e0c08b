"""What a step takes: for every unit the gradients that are there, with the hyperparameters of their groups."""

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from overspill.errors import ModelError
from overspill.program import Lane
from overspill.runtime.generation import Generation, check_bytes
from overspill.runtime.handle import GradHandle
from overspill.runtime.parts import Parts
from overspill.runtime.residency import Residency
from overspill.runtime.updates import Job, Taken, snapshot
from overspill.units.local import local_of, part_for
from overspill.units.unit import Unit

log = logging.getLogger("overspill")
Jobs = dict[int, list[Job]]
"""Unit -> what each group asks of it."""
HEARS_LATER = {"cuda"}
"""Where the host hears of skipped steps later, not to wait for the device."""


class Steps:
    """Takes the gradients in `p.grad`."""

    def __init__(self, units: Sequence[Unit], parts: Parts, residency: Residency) -> None:
        self._units = units
        self._parts = parts
        self._residency = residency
        self._told = False
        executor = parts.executor
        ours = executor.program.update_lane == Lane.UPDATE and parts.made.ranks is None
        self._hears_later = ours and executor.lanes.device.type in HEARS_LATER
        self.count = 0
        """Of steps, however their updates are done, and of those before the checkpoint that was loaded."""

    def jobs(self, groups: Iterable[dict[str, Any]], but: frozenset[int] = frozenset()) -> Jobs:
        """What a step asks of each unit, without some."""
        jobs: Jobs = {}
        taken = [(group, snapshot(group)) for group in groups]
        for _, hypers in taken:
            self._parts.made.update.check_step(hypers)
        for group, hypers in taken:
            with torch._C.DisableTorchFunctionSubclass():
                found = self._due(group["params"], but)
            for unit, due in found.items():
                jobs.setdefault(unit, []).append(Job(hypers, tuple(due)))
        return jobs

    def _due(self, params: list[nn.Parameter], but: frozenset[int]) -> dict[int, list[Taken]]:
        found: dict[int, list[Taken]] = {}
        for p in params:
            gradient = p.grad
            if gradient is None:
                continue
            unit, index = self._residency.place_of(p)
            if unit in but:
                continue
            spec = self._units[unit].spec.params[index]
            if not spec.trainable:
                raise ModelError(
                    f"expected no gradient for {spec.name!r}, which was frozen at prepare, found one; set "
                    "requires_grad before prepare, so that the plan has room for its gradient and state"
                )
            part = local_of(gradient)
            if isinstance(part, GradHandle) and (part.generation.unit, part.generation.param) == (unit, index):
                generation = self._taken(part.generation)
            else:
                # The user's own tensor, or another parameter's gradient: either may change before the update runs.
                if not isinstance(part, GradHandle):
                    self._say_unscaled(spec.name)
                generation = self._parts.made.grads.take(unit, index, part_for(p, gradient.detach().clone()))
            found.setdefault(unit, []).append(Taken(index, generation, generation.changes))
        return found

    def _say_unscaled(self, name: str) -> None:
        """Once: what a Function's own backward puts into `p.grad` looks like this, and has the loss's scale."""
        if self._parts.scale is not None and not self._told:
            self._told = True
            log.warning(
                "the gradient of %r is a tensor of yours: under precision='fp16' it is taken as it is, not divided by "
                "the loss scale; where an autograd.Function puts it there by itself, use precision='bf16'",
                name,
            )

    def _taken(self, generation: Generation) -> Generation:
        check_bytes(generation)
        generation.stepped = True
        if not generation.kept:
            return generation.taken()
        # The step before took it too, and what that took is not applied yet: this one takes its value as it is now.
        grads = self._parts.made.grads
        return grads.take(generation.unit, generation.param, grads.bytes.share(generation).clone())

    def hear(self) -> None:
        """Under fp16: whether the last step was skipped."""
        if self._parts.scale is not None:
            self._parts.scale.hear()

    def judged(self, jobs: Jobs) -> Jobs:
        """What is to be done of it: under fp16 nothing where gradients are not finite; the loss scale moves. See
        scaling.py, Note [Skipped on the device]."""
        scale, grads, ranks = self._parts.scale, self._parts.made.grads, self._parts.made.ranks
        if scale is None:
            return jobs
        norms = [grads.bytes.norms.raw(due.generation) for todo in jobs.values() for job in todo for due in job.due]
        skip = torch.stack(norms).isfinite().all().logical_not()
        if ranks is not None:
            skip = skip.new_tensor(not ranks.comm.everyone(not bool(skip)))
        scale.forget()
        verdict = scale.judge(skip.float())
        grads.factor = scale.factor
        if self._hears_later:
            return {u: [dataclasses.replace(job, verdict=verdict) for job in todo] for u, todo in jobs.items()}
        scale.hear()
        return {} if verdict.skipped else jobs
