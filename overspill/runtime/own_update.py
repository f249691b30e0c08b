"""Runs the user's own optimizer on one page at a time, with the hyperparameters that held at `step()`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from overspill.errors import ModelError
from overspill.kernels.masters import join, split
from overspill.runtime.collect import Collector
from overspill.runtime.generation import as_flat
from overspill.runtime.masters import Masters
from overspill.runtime.pages import Pages, kept_of
from overspill.runtime.states import OwnStates
from overspill.runtime.updates import Share
from overspill.specs import PartSpec
from overspill.units.local import is_wrapper
from overspill.units.states import stand_in
from overspill.units.unit import Unit


class OwnUpdate:
    """The user's optimizer: on the user's own parameters, or on fp32 stand-ins where those are masters' roundings."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        units: Sequence[Unit],
        pages: Pages,
        masters: Masters,
        collector: Collector | None,
    ) -> None:
        self._runner = stand_in(optimizer, [])
        self._units = units
        self._pages = pages
        self._masters = masters
        self._states = OwnStates(pages, collector)
        self.fields: tuple[str, ...] | None = None
        self.outline = self._states.outline
        self.read = self._states.read
        self.check = self._states.check
        self.write = self._states.write

    def check_step(self, hypers: Mapping[str, Any]) -> None:
        """Only the optimizer itself knows."""

    def due(self, unit: int, params: Sequence[int], count: int = 1) -> None:
        """The optimizer counts its steps itself."""

    def run(self, unit: int, page: int, shares: Sequence[Share]) -> None:
        groups: list[dict[str, Any]] = []
        used: list[tuple[Share, nn.Parameter]] = []
        for share in shares:
            if not groups or groups[-1]["of"] is not share.hypers:
                groups.append({**share.hypers, "params": [], "of": share.hypers})
            used.append((share, self._parameter(unit, page, share.part)))
            groups[-1]["params"].append(used[-1][1])
        asked = [group.pop("of") for group in groups]
        self._step(groups, used, (unit, page))
        for hypers, group in zip(asked, groups, strict=True):
            _refuse_changed_group(type(self._runner).__name__, hypers, group)
        for share, p in used:
            self._round(unit, page, share.part, p)

    def _parameter(self, unit: int, page: int, part: PartSpec) -> nn.Parameter:
        """The user's own parameter; or a stand-in with its masters, or with a part of it."""
        spec = self._units[unit].spec.params[part.param]
        entire, weight = part.numel == spec.numel, self._units[unit].elements(part.param, part.begin, part.end)
        if (unit, part.param) in self._masters:
            kept = self._kept(unit, page, part)
            self._masters.current(unit, part, kept)
            weight = join(weight, kept)
        elif entire and not is_wrapper(self._units[unit].params[part.param]):
            return self._units[unit].params[part.param]
        return nn.Parameter(weight.as_strided(spec.shape, spec.stride) if entire else weight)

    def _kept(self, unit: int, page: int, part: PartSpec) -> Tensor:
        return kept_of(self._pages.spec(unit, page), part, self._pages.make(unit, page))

    def _round(self, unit: int, page: int, part: PartSpec, used: nn.Parameter) -> None:
        """What the optimizer made of the masters goes back into weight and page."""
        if (unit, part.param) in self._masters:
            weight = self._units[unit].elements(part.param, part.begin, part.end)
            split(as_flat(used.detach()), weight, self._kept(unit, page, part))
            self._masters.edits.updated(unit, part)

    def _step(
        self, groups: list[dict[str, Any]], used: list[tuple[Share, nn.Parameter]], where: tuple[int, int]
    ) -> None:
        """One step of the user's optimizer on parameters that are made plain for its duration."""
        unit, page = where
        runner = self._runner
        runner.param_groups = groups
        runner.state.clear()
        kept = [(p, type(p), p.grad) for _, p in used]
        for share, p in used:
            # torch picks its fast paths by exact type, so the parameter must be a plain one here.
            p.__class__ = nn.Parameter
            p.grad = None
            p.grad = share.whole()
            state = self._states.lend(unit, page, share.part)
            if state:
                runner.state[p] = state
        counts = _counts(runner)
        try:
            runner.step()
        finally:
            for p, cls, grad in kept:
                p.grad = None
                p.grad = grad
                p.__class__ = cls
        for share, p in used:
            self._states.take_back(unit, page, share.part, runner.state.get(p, {}))
        _refuse_changed_group(type(runner).__name__, counts, _counts(runner))
        runner.state.clear()
        runner.param_groups = []


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
