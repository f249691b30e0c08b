"""One process group that moves whole tensors, over gloo or over nccl."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from overspill.comm.watch import Watch


class Group(Protocol):
    """Ranks that work on the same tensors. Tensors are 1-D and contiguous; pieces as in `Comm`."""

    rank: int
    size: int

    def gather(self, whole: Tensor, bounds: Sequence[int]) -> None:
        """Fill in the pieces of the others."""

    def reduce(self, whole: Tensor, bounds: Sequence[int]) -> Tensor:
        """My piece of the sum over ranks; `whole` stays as it is."""

    def broadcast(self, whole: Tensor, root: int) -> None:
        """Overwrite it with that of `root`."""


# Note [the same bits for every owner]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# gloo's own reductions add in an order that depends on the place inside the tensor. Here each rank receives what the
# others have of its piece, as bytes, and adds in the order of ranks: so an element has the same sum wherever the
# bounds lie, and with two ranks it is a + b exactly. Types of 16 bits and less are added in fp32 and rounded once.
# nccl adds on the device, in its own order: with two ranks that is a + b too, with more it may depend on the bounds.


class GlooGroup:
    """Over gloo, through host memory; a tensor on another device is copied to the host and back."""

    def __init__(self, group: Any, watch: Watch) -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        self._group = group
        self._watch = watch

    def gather(self, whole: Tensor, bounds: Sequence[int]) -> None:
        mine = slice(bounds[self.rank], bounds[self.rank + 1])
        # Always other memory: gloo's thread keeps what it was given for a moment after it is done with it, and whoever
        # counts the views of a unit's weights would count that.
        host = torch.empty(whole.shape, dtype=whole.dtype, device="cpu")
        host[mine].copy_(whole[mine])
        pieces = _pieces(_bytes(host), [bound * whole.itemsize for bound in bounds])
        if is_even(bounds):
            works = [self._group._allgather_base(_bytes(host), pieces[self.rank])]
        else:
            works = [self._send(piece, root) for root, piece in enumerate(pieces) if piece.numel()]
        self._finish(works, "gather", whole)
        whole.copy_(host)

    def reduce(self, whole: Tensor, bounds: Sequence[int]) -> Tensor:
        """See Note [the same bits for every owner]."""
        host = whole.cpu()
        lengths = [(end - begin) * whole.itemsize for begin, end in pairwise(bounds)]
        length = lengths[self.rank]
        all_mine = torch.empty(length * self.size, dtype=torch.uint8, device="cpu")
        work = self._group.alltoall_base(all_mine, _bytes(host), [length] * self.size, lengths)
        self._finish([work], "reduction", whole)
        return add_in_order(all_mine.view(whole.dtype).view(self.size, -1)).to(whole.device)

    def broadcast(self, whole: Tensor, root: int) -> None:
        host = whole.cpu()
        if whole.numel():
            self._finish([self._send(_bytes(host), root)], "broadcast", whole)
        if host is not whole and self.rank != root:
            whole.copy_(host)

    def _send(self, data: Tensor, root: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        return self._group.broadcast([data], options)

    def _finish(self, works: Sequence[Any], verb: str, whole: Tensor) -> None:
        for work in works:
            self._watch.wait(work, lambda: describe(verb, whole, self._watch))


class NcclGroup:
    """Over nccl: nothing is waited for on the host, the current stream waits. `pending` tells the watch."""

    def __init__(self, group: Any, watch: Watch) -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        self._group = group
        self._watch = watch
        self._last: Any = None

    def gather(self, whole: Tensor, bounds: Sequence[int]) -> None:
        data = _bytes(whole)
        pieces = _pieces(data, [bound * whole.itemsize for bound in bounds])
        if is_even(bounds):
            self._finish(self._group._allgather_base(data, pieces[self.rank]))
            return
        for root, piece in enumerate(pieces):
            if piece.numel():
                self._send(piece, root)

    def reduce(self, whole: Tensor, bounds: Sequence[int]) -> Tensor:
        pieces = _pieces(whole, bounds)
        mine = pieces[self.rank].clone()
        if is_even(bounds):
            self._finish(self._group._reduce_scatter_base(_real(mine), _real(whole)))
            return mine
        for root, piece in enumerate(pieces):
            if piece.numel():
                options = dist.ReduceOptions()
                options.rootRank = root
                self._finish(self._group.reduce([_real(mine if root == self.rank else piece)], options))
        return mine

    def broadcast(self, whole: Tensor, root: int) -> None:
        if whole.numel():
            self._send(_bytes(whole), root)

    def pending(self) -> bool:
        """Whether the last collective has not ended yet."""
        return self._last is not None and not self._last.is_completed()

    def abort(self) -> None:
        """End what is pending; its results are void, and the watch lets nobody use them."""
        self._group.abort()

    def close(self) -> None:
        """Give it back; whoever is left alone in a collective does not wait for its end."""
        if self._watch.failed is not None or self.pending():
            self._group.abort()
        else:
            self._group.shutdown()

    def _send(self, data: Tensor, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        self._finish(self._group.broadcast([data], options))

    def _finish(self, work: Any) -> None:
        if self._watch.failed is not None:
            raise self._watch.failed
        self._last = work
        work.wait()


def add_in_order(rows: Tensor) -> Tensor:
    """The sum of the rows, first to last, in fp32 for types of 16 bits and less, in their own type."""
    small = rows.dtype.is_floating_point and rows.itemsize < 4
    total = rows[0].to(torch.float32 if small else rows.dtype, copy=True)
    for row in rows[1:]:
        total.add_(row)
    return total.to(rows.dtype)


def is_even(bounds: Sequence[int]) -> bool:
    """Whether all pieces have the same size, and some."""
    sizes = {end - begin for begin, end in pairwise(bounds)}
    return len(sizes) == 1 and sizes != {0}


def describe(verb: str, whole: Tensor, watch: Watch) -> str:
    """A collective, for messages."""
    return f"a {verb} of {whole.numel()} elements after {watch.where}"


def _pieces(whole: Tensor, bounds: Sequence[int]) -> list[Tensor]:
    return [whole[begin:end] for begin, end in pairwise(bounds)]


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def _bytes(tensor: Tensor) -> Tensor:
    # With one element or none, a tensor is contiguous whatever its stride, but can only be viewed with stride 1.
    return tensor.as_strided(tensor.shape, (1,)).view(torch.uint8)
