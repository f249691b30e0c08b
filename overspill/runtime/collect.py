"""Puts together what is divided over ranks: one parameter's gradient, masters or states, whole; norms of all gradients.

All ranks take part, so all must agree first (ranks.py); one that did not ask gives its share and goes on.
"""

import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from overspill.program import Join, Key, Kind, Settle
from overspill.runtime.executor import Executor
from overspill.runtime.ranks import Meeting, Point, Ranks
from overspill.specs import Sharding, Span, UnitSpec

STATES_AT_MOST = 64
"""States of one parameter, as ranks number them; one number more stands for no state."""
DESCRIBED = STATES_AT_MOST - 1
"""Not one of a parameter's states, but what they are."""

Give = Callable[[int, int, int], Tensor]
"""(unit, parameter, which) -> this rank's share, as an array of what it owns."""


class Collector:
    """`gives[kind]` says what this rank has to give when others ask for something of this kind."""

    def __init__(self, specs: Sequence[UnitSpec], sharding: Sharding, ranks: Ranks, executor: Executor) -> None:
        self._specs = specs
        self._sharding = sharding
        self._ranks = ranks
        self._executor = executor
        self.gives: dict[Meeting, Give] = {}
        self.describes: Callable[[int, int], Any] = lambda unit, param: None
        self.told: Callable[[int, int, Any], None] = lambda unit, param, found: None
        for kind in (Meeting.GRADIENT, Meeting.MASTER, Meeting.STATE):
            ranks.joins[kind] = self._join

    @property
    def divided(self) -> bool:
        """Whether ranks own different elements."""
        return self._sharding.split("state") and self._sharding.size > 1

    def whole(
        self, kind: Meeting, place: tuple[int, int], which: int = 0, own: Callable[[], Tensor] | None = None
    ) -> Tensor:
        """All elements of one parameter's gradient, masters or state, in memory order. `own`: this rank's share, where
        it is not what others would be given."""
        unit, param = place
        self._ranks.meet(kind, unit, _packed(param, which))
        return self._collect(kind, place, which, own)

    def described(self, place: tuple[int, int]) -> Any:
        """What a rank that has a parameter's state says of it (plain data); None where none has it."""
        unit, param = place
        self._ranks.meet(Meeting.STATE, unit, _packed(param, DESCRIBED))
        return self._describe(unit, param)

    def _describe(self, unit: int, param: int) -> Any:
        heard = self._ranks.comm.exchange(self.describes(unit, param))
        found = next((each for each in heard if each is not None), None)
        self.told(unit, param, found)
        return found

    def _join(self, point: Point) -> None:
        param, which = _unpacked(point.item)
        if which == DESCRIBED:
            self._describe(point.unit, param)
        else:
            self._collect(point.kind, (point.unit, param), which)

    def _collect(
        self, kind: Meeting, place: tuple[int, int], which: int, given: Callable[[], Tensor] | None = None
    ) -> Tensor:
        unit, param = place
        spec = self._specs[unit].params[param]
        if kind in (Meeting.MASTER, Meeting.STATE) and unit in self._executor.state.pending:
            # One that asks has settled; one that is asked may have had no use for the unit since the last step.
            self._executor.join(Settle((unit,), self._ranks.held()))
        if kind == Meeting.MASTER:
            self._executor.join(Join(Kind.FETCH, unit, self._ranks.held()))
            self._executor.wait(Key(Kind.FETCH, unit))
        own = given() if given is not None else self.gives[kind](unit, param, which)
        if self._sharding.whole and kind == Meeting.STATE:
            return self._from_owner(unit, param, own)
        whole = torch.zeros(spec.numel, dtype=own.dtype, device=self._executor.lanes.device)
        for begin, end, at in spec.owned.places():
            whole[begin:end].copy_(own[at : at + end - begin])
        self._executor.finish_together()
        last, item = spec.offset + spec.nbytes, spec.dtype.itemsize
        for stripe in self._specs[unit].stripes:
            low, high = max(stripe.begin, spec.offset), min(stripe.end, last)
            if low < high:
                bounds = [(min(max(b, low), high) - low) // item for b in stripe.bounds]
                self._ranks.comm.gather(whole[(low - spec.offset) // item : (high - spec.offset) // item], bounds)
        return whole

    def _from_owner(self, unit: int, param: int, own: Tensor) -> Tensor:
        """One rank has all of it; a state need not have as many elements as its parameter."""
        offset = self._specs[unit].params[param].offset
        stripe = next((s for s in self._specs[unit].stripes if s.begin <= offset < s.end), None)
        self._executor.finish_together()
        if stripe is not None and own.numel():
            owner = max(r for r in range(self._sharding.size) if stripe.bounds[r] <= offset < stripe.bounds[r + 1])
            own = own.to(self._executor.lanes.device).contiguous()
            bounds = [own.numel() if r > owner else 0 for r in range(self._sharding.size + 1)]
            self._ranks.comm.gather(own, bounds)
        return own

    def norms(self, shares: Sequence[Tensor], order: float) -> list[Tensor]:
        """The norms of whole gradients from those of every rank's share, in one go; all ranks get the same bits."""
        if not shares:
            return []
        assert order >= 0, f"shares of a norm of order {order} do not add up"
        dtype = shares[0].dtype
        values = torch.stack([share.to(torch.float64) for share in shares])
        self._ranks.meet(Meeting.NORM, len(shares), zlib.crc32(struct.pack("<d", order)))
        self._executor.finish_together()
        comm = self._ranks.comm
        if order == float("inf"):
            found = comm.total(values, "max")
        elif order == 0:
            found = comm.total(values, "sum")
        else:
            found = comm.total(values**order, "sum") ** (1 / order)
        return list(found.to(dtype).unbind())


def array(span: Span, pieces: Callable[[int, int], Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An array of a span, put together from the pieces of its ranges."""
    out = torch.zeros(span.room, dtype=dtype, device=device)
    for begin, end, at in span.places():
        out[at : at + end - begin].copy_(pieces(begin, end))
    return out


def _packed(param: int, which: int) -> int:
    assert 0 <= which < STATES_AT_MOST, f"state {which} of a parameter has no number"
    return param * STATES_AT_MOST + which


def _unpacked(item: int) -> tuple[int, int]:
    return divmod(item, STATES_AT_MOST)
