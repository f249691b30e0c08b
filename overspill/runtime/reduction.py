"""Averages the gradients of a unit over ranks, stripe by stripe, as DistributedDataParallel does: each rank's own is
divided by the number of ranks, then they are summed. Each rank keeps what it owns of the sums (at stage 0: all)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from overspill.program import Key, Kind, Op
from overspill.runtime.executor import Executor, Handler
from overspill.runtime.generation import as_flat, full_dtype
from overspill.runtime.lanes import Work
from overspill.specs import ParamSpec, Sharding, Stripe, UnitSpec

if TYPE_CHECKING:
    from overspill.comm import Comm

Arrived = Callable[[int, dict[int, Tensor]], None]
"""(unit, sums by parameter) -> told when a reduction is handed out; the sums are there when it is done."""


@dataclass(frozen=True, slots=True)
class _Overlap:
    """Elements of a parameter that lie in a stripe: from `begin` of the parameter, at `at` of the stripe."""

    param: int
    begin: int
    end: int
    at: int


class Reduction:
    """Gradients that wait for their unit's others, and the op that averages them."""

    def __init__(self, specs: Sequence[UnitSpec], sharding: Sharding, comm: Comm, executor: Executor) -> None:
        self._specs = specs
        self._sharding = sharding
        self._comm = comm
        self._executor = executor
        self._device = executor.lanes.device
        self._local: dict[int, dict[int, Tensor]] = {}
        self._factors: dict[tuple[int, int], Tensor | None] = {}
        self._wide: set[int] = set()
        self._sending: dict[int, list[Tensor]] = {}
        """What a lane may still be reading or writing."""
        self.arrived: Arrived = lambda unit, sums: None

    def handlers(self) -> dict[Kind, Handler]:
        return {Kind.REDUCE: self._reduce}

    @property
    def shares(self) -> bool:
        """Whether ranks keep different elements of the sums."""
        return self._sharding.split("state") and self._sharding.size > 1

    @property
    def divides(self) -> bool:
        """Whether each rank has room for its own share of gradients only."""
        return self._sharding.split("grad") and self._sharding.size > 1

    def put(self, unit: int, param: int, value: Tensor, factor: Tensor | None) -> None:
        """This rank's gradient, whole; laid out as the parameter is. `factor` undoes the scale of what is narrow."""
        there, spec = self._local.setdefault(unit, {}), self._specs[unit].params[param]
        if param in there:
            value, factor = wide(there[param], spec, self._factors[unit, param]) + wide(value, spec, factor), None
        there[param], self._factors[unit, param] = value, factor

    def forget(self) -> None:
        """Nothing waits any more."""
        self._local.clear()
        self._factors.clear()
        self._wide.clear()

    def width(self, unit: int) -> int:
        """0: some are sums of several backward passes, which are wide; 1: none is."""
        params = self._specs[unit].params
        return int(all(value.dtype == params[i].dtype for i, value in self._local.get(unit, {}).items()))

    def widen(self, unit: int, width: int) -> None:
        """What all ranks agreed on."""
        if width == 0:
            self._wide.add(unit)

    def let_go(self, unit: int) -> None:
        """What the compute lane does next comes after the reduction of a unit."""
        self._sending.pop(unit, None)

    def _reduce(self, op: Op) -> Work:
        spec, local = self._specs[op.unit], self._local.pop(op.unit, {})
        widely = op.unit in self._wide or not all(v.dtype == spec.params[i].dtype for i, v in local.items())
        self._wide.discard(op.unit)
        if widely:
            local = {i: wide(v, spec.params[i], self._factors[op.unit, i]) for i, v in local.items()}
        for unit in self._sending:
            self._executor.wait(Key(Kind.REDUCE, unit))
        self._sending.clear()  # before the next one takes more
        sums = {i: self._room(p, widely) for i, p in enumerate(spec.params) if p.trainable}
        self._sending[op.unit] = [*local.values(), *sums.values()]
        self.arrived(op.unit, sums)

        def run() -> None:
            for stripe in spec.stripes:
                if stripe.trainable:
                    self._stripe(spec, stripe, local, sums)

        return run

    def _room(self, p: ParamSpec, wide: bool) -> Tensor:
        dtype = full_dtype(p) if wide else p.dtype
        return torch.zeros(p.owned.room, dtype=dtype, device=self._device)

    def _stripe(self, spec: UnitSpec, stripe: Stripe, local: dict[int, Tensor], sums: dict[int, Tensor]) -> None:
        overlaps = list(_overlaps(spec, stripe))
        item, dtype = stripe.dtype.itemsize, sums[overlaps[0].param].dtype
        whole = torch.zeros((stripe.end - stripe.begin) // item, dtype=dtype, device=self._device)
        for o in overlaps:
            if o.param in local:
                whole[o.at : o.at + o.end - o.begin].copy_(as_flat(local[o.param])[o.begin : o.end])
        whole.mul_(1 / self._comm.ranks)
        bounds = [(b - stripe.begin) // item for b in stripe.bounds]
        mine = self._comm.reduce(whole, bounds)
        first, last = bounds[self._comm.rank], bounds[self._comm.rank + 1]
        whole[first:last].copy_(mine)
        if not self._sharding.split("state"):
            self._comm.gather(whole, bounds)
            first, last = 0, whole.numel()
        for o in overlaps:
            low, high = max(o.at, first), min(o.at + o.end - o.begin, last)
            if low < high:
                at = spec.params[o.param].owned.locate(o.begin + low - o.at)
                sums[o.param][at : at + high - low].copy_(whole[low:high])


def wide(value: Tensor, spec: ParamSpec, factor: Tensor | None) -> Tensor:
    """A gradient as it counts: see generation.py, Note [Narrow and wide]."""
    found = value.to(full_dtype(spec))
    return found * factor if factor is not None and value.dtype != found.dtype else found


def _overlaps(spec: UnitSpec, stripe: Stripe) -> list[_Overlap]:
    found = []
    item = stripe.dtype.itemsize
    for i, p in enumerate(spec.params):
        low, high = max(p.offset, stripe.begin), min(p.offset + p.nbytes, stripe.end)
        if low < high:
            found.append(_Overlap(i, (low - p.offset) // item, (high - p.offset) // item, (low - stripe.begin) // item))
    return found
