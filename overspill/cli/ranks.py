"""The processes of one run: torchrun starts several, each with this program and a share of every batch.

Note [Who speaks]. All ranks do the same at the same time: plan, train, validate, save. Rank 0 alone prints, and alone
has the run's folder; what it finds there it tells the others. They speak only of what is theirs: a warning, or the
error that ends them. An error that all have, or that another one tells, is told once.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from overspill.api import join_ranks, processes
from overspill.errors import OptionError, OverspillError, RankError

T = TypeVar("T")
PATIENCE = 2.0
"""Seconds until a process is taken to be there, though nobody can reach it."""


class Elsewhere(OverspillError):
    """Another rank tells what is wrong."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process and the others. One process is a run of one rank."""

    rank: int = 0
    size: int = 1
    seats: tuple[Any, ...] = ()
    """The processes of all ranks, as far as is known."""

    @property
    def first(self) -> bool:
        return self.rank == 0

    def say(self, text: object) -> None:
        """Once for all of them."""
        if self.first:
            print(text, flush=True)

    def exchange(self, thing: T) -> list[T]:
        """What every rank brings, by rank. Small things; all ranks call it together."""
        if self.size == 1:
            return [thing]
        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, thing)
        except RuntimeError as error:
            cure = "look at its output for the cause, and start again from the last checkpoint"
            raise RankError(f"expected all ranks at the next step, found that {self._lost(error)}; {cure}") from error
        return found

    def _lost(self, error: RuntimeError) -> str:
        """Who died, as far as this machine can tell; a connection may end a moment earlier than its process."""
        _, has_ended = processes()
        limit = time.monotonic() + PATIENCE
        while True:
            dead = [str(rank) for rank, seat in enumerate(self.seats) if has_ended(seat)]
            if dead or time.monotonic() > limit:
                break
            time.sleep(0.05)
        return f"rank {', '.join(dead)} died" if dead else f"one of them is gone ({error})"

    def together(self, do: Callable[[], T]) -> T:
        """Every rank does it. Where one is refused, all end, and the one that is to blame says why."""
        if self.size == 1:
            return do()
        done: list[T] = []
        refused: OverspillError | None = None
        try:
            done.append(do())
        except OverspillError as error:
            refused = error
        # Who stops because another rank did is not to blame.
        heard = self.exchange(None if refused is None else isinstance(refused, RankError))
        blamed = [rank for rank, late in enumerate(heard) if late is False] or [
            rank for rank, late in enumerate(heard) if late is not None
        ]
        if not blamed:
            return done[0]
        if self.rank == blamed[0] and refused is not None:
            raise refused
        raise Elsewhere(f"rank {blamed[0]} was refused")

    def from_first(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on all ranks; and its refusal."""
        made = self.together(lambda: [make()] if self.first else [])
        return self.exchange(made)[0][0]

    def check_alike(self, what: str, thing: object) -> None:
        """Ranks must not train on different things; what they were given by path may differ from machine to machine."""
        heard = self.exchange(thing)
        others = [rank for rank, each in enumerate(heard) if each != heard[0]]
        if others and self.first:
            raise OptionError(
                f"expected the same {what} on all ranks, found others on ranks {', '.join(map(str, others))} than on "
                "rank 0; give all machines the same files"
            )
        if others:
            raise Elsewhere(f"ranks differ in {what}")


def join() -> Ranks:
    """The ranks that torchrun started, or this process alone."""
    rank, size = join_ranks()
    if rank:
        logging.basicConfig(format=f"rank {rank}: %(message)s", level=logging.WARNING)
    origin, _ = processes()
    return Ranks(rank, size, tuple(Ranks(rank, size).exchange(origin())))
