"""The door of this folder: what a data-parallel rank can do together with the others."""

import array
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from overspill.comm.groups import Group, add_in_order, describe
from overspill.comm.watch import Watch
from overspill.comm.witness import Seat

MOST_VALUES = 23
_ROW = MOST_VALUES + 1
_MEET, _VOTE, _EXCHANGE = 1, 2, 3
_CALLS = {_MEET: "a meeting", _VOTE: "a vote", _EXCHANGE: "an exchange"}


class Comm:
    """All data-parallel ranks: `replicas` groups of `size` ranks each; see Note [three conversations].

    Made by `connect`. `place` is `replica * size + rank`, and `world_ranks[place]` is torch's global rank of it.
    `sent` counts the elements that this rank sends, at the call, by kind: gather, reduce, replicate, broadcast.
    """

    # Note [three conversations]
    # ~~~~~~~~~~~~~~~~~~~~~~~~~~
    # Collectives match by order: two threads that share a group must take turns in the same order on every rank, which
    # nothing can promise. So there are three conversations with groups of their own, and each may have its own thread:
    # - data: gather, reduce, broadcast;
    # - totals: total;
    # - control: meet, everyone, exchange.
    # Inside each of them every rank makes the same calls in the same order.

    def __init__(self, seat: Seat, size: int, groups: "Groups", watch: Watch, hang_up: Callable[[], None]) -> None:
        self.place = seat.place
        self.world_ranks = seat.world_ranks
        self.ranks = len(seat.world_ranks)
        self.size = size
        self.rank = seat.place % size
        self.replicas = self.ranks // size
        self.locals = 0
        self.sent: Counter[str] = Counter()
        self._groups = groups
        self._watch = watch
        self._hang_up = hang_up
        self._mine, self._all = array.array("q", bytes(8 * _ROW)), array.array("q", bytes(8 * _ROW * self.ranks))
        self._mine_tensor = torch.frombuffer(self._mine, dtype=torch.int64)  # int64 [24], host
        self._all_tensor = torch.frombuffer(self._all, dtype=torch.int64)  # int64 [24 * ranks], host

    # ---- data

    def gather(self, whole: Tensor, bounds: Sequence[int]) -> None:
        """Fill in the pieces of the others; mine is in place. `whole` is 1-D and contiguous, of any type."""
        self._check(whole, bounds)
        self._count("gather", (bounds[self.rank + 1] - bounds[self.rank]) * (self.size - 1))
        self._groups.shard.gather(whole.detach(), bounds)

    def reduce(self, whole: Tensor, bounds: Sequence[int]) -> Tensor:
        """My piece of the sum over all ranks, as a new tensor of the same type.

        Summed over the shard group, then over the replicate group; rounded once in each.
        """
        self._check(whole, bounds)
        self._count("reduce", whole.numel() - (bounds[self.rank + 1] - bounds[self.rank]))
        mine = self._groups.shard.reduce(whole.detach(), bounds)
        across = self._groups.replicate
        if across is None:
            return mine
        # A sum and a gather of parts send less than whole pieces to everyone would, and the bits are the same.
        parts = [mine.numel() * part // self.replicas for part in range(self.replicas + 1)]
        own = slice(parts[across.rank], parts[across.rank + 1])
        length = own.stop - own.start
        self._count("replicate", mine.numel() - length + length * (self.replicas - 1))
        mine[own] = across.reduce(mine, parts)
        across.gather(mine, parts)
        return mine

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite it, in place, with that of place 0; over the first shard group, then over the replicate groups."""
        self._check(tensor.view(-1) if tensor.is_contiguous() else tensor, ())
        flat = tensor.detach().view(-1)
        across = self._groups.replicate
        if across is None or across.rank == 0:
            self._count("broadcast", flat.numel() * (self.size - 1) * (self.rank == 0))
            self._groups.shard.broadcast(flat, 0)
        if across is not None:
            self._count("broadcast", flat.numel() * (self.replicas - 1) * (across.rank == 0))
            across.broadcast(flat, 0)

    # ---- totals

    def total(self, values: Tensor, op: Literal["sum", "max"]) -> Tensor:
        """A small vector over the shard group; every rank gets the same bits, because all add in the order of ranks."""
        flat = values.detach().contiguous().view(-1).cpu()
        whole = torch.empty(self.size * flat.numel(), dtype=flat.dtype, device="cpu")
        rows = whole.view(self.size, flat.numel())
        rows[self.rank] = flat
        self._raise_failure()
        self._groups.totals.gather(whole, range(0, whole.numel() + 1, flat.numel() or 1))
        result = add_in_order(rows) if op == "sum" else rows.amax(0)
        return result.view(values.shape).to(values.device)

    # ---- control

    def meet(self, values: Sequence[int], where: str) -> list[tuple[int, ...]]:
        """Offer a few ints (at most 23), get everyone's, by place. `where` is said in messages."""
        return self._offer(_MEET, values, where)

    def everyone(self, flag: bool) -> bool:
        """Whether all places say so."""
        return all(row[0] for row in self._offer(_VOTE, (int(flag),), self._watch.where))

    def exchange(self, thing: Any) -> list[Any]:
        """Everyone's `thing`, by place; small, and made of what JSON knows."""
        data = json.dumps(thing).encode()
        lengths = [row[0] for row in self._offer(_EXCHANGE, (len(data),), self._watch.where)]
        most = max(lengths)
        mine = torch.frombuffer(bytearray(data.ljust(most)), dtype=torch.uint8)
        whole = torch.empty(self.ranks * most, dtype=torch.uint8, device="cpu")
        work = self._groups.control._allgather_base(whole, mine)
        self._watch.wait(work, lambda: describe("exchange", whole, self._watch))
        return [json.loads(bytes(row.tolist())) for row in whole.view(self.ranks, most)]

    # ---- the end

    def close(self) -> None:
        """Take part no more and give the groups back. Others need not come; may be called twice."""
        self._hang_up()

    def _offer(self, kind: int, values: Sequence[int], where: str) -> list[tuple[int, ...]]:
        count = len(values)
        assert count <= MOST_VALUES, f"{count} values were offered at {where}, at most {MOST_VALUES} fit"
        self._watch.enter(where)
        self._mine[0] = kind << 8 | count
        self._mine[1 : count + 1] = array.array("q", values)
        self._watch.wait(self._groups.control._allgather_base(self._all_tensor, self._mine_tensor), where)
        flat = self._all.tolist()
        rows = [(flat[i], tuple(flat[i + 1 : i + 1 + (flat[i] & 0xFF)])) for i in range(0, len(flat), _ROW)]
        if others := [place for place, (head, _row) in enumerate(rows) if head >> 8 != kind]:
            calls = sorted({_CALLS.get(rows[place][0] >> 8, "something else") for place in others})
            raise self._watch.diverged(others, f"{_CALLS[kind]} at {where} and not at {' or '.join(calls)}")
        self._watch.met()
        return [row for _head, row in rows]

    def _count(self, kind: str, elements: int) -> None:
        self.sent[kind] += elements

    def _check(self, whole: Tensor, bounds: Sequence[int]) -> None:
        assert whole.dim() == 1 and whole.is_contiguous(), f"expected 1-D contiguous, found {tuple(whole.shape)}"
        assert not bounds or (len(bounds) == self.size + 1 and bounds[0] == 0 and bounds[-1] == whole.numel()), (
            f"the bounds {list(bounds)} do not divide {whole.numel()} elements among {self.size} ranks"
        )
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._watch.failed is not None:
            raise self._watch.failed


class Groups:
    """The groups of Note [three conversations]; `control` is torch's own object, for speed."""

    def __init__(self, shard: Group, replicate: Group | None, totals: Group, control: Any) -> None:
        self.shard = shard
        self.replicate = replicate
        self.totals = totals
        self.control = control
