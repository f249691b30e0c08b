"""Buffers over ranks: as in DistributedDataParallel, those of the first rank are everybody's when a forward begins."""

from torch import nn

from overspill.runtime.executor import Executor
from overspill.runtime.ranks import Meeting, Point, Ranks


class SharedBuffers:
    """Broadcasts buffers that were written to since the last time; most models have none, and need nothing."""

    def __init__(self, model: nn.Module, ranks: Ranks, executor: Executor) -> None:
        self._model = model
        self._ranks = ranks
        self._executor = executor
        self._seen = self._versions()
        ranks.joins[Meeting.BUFFERS] = lambda point: self._broadcast()

    def _versions(self) -> list[int]:
        return [buffer._version for buffer in self._model.buffers()]

    def begin(self) -> None:
        """A forward of the whole model begins."""
        if self._model.training:
            self._ranks.agree(self._offer)
            if self._offer():
                self._broadcast()

    def _offer(self) -> tuple[Point, ...]:
        return (Point(Meeting.BUFFERS),) if self._versions() != self._seen else ()

    def _broadcast(self) -> None:
        self._executor.finish_together()
        for buffer in self._model.buffers():
            flat = buffer.detach().contiguous()
            self._ranks.comm.broadcast(flat.view(-1))
            if flat.data_ptr() != buffer.data_ptr():
                buffer.data.copy_(flat)
        self._seen = self._versions()
