"""How long a step takes, as far as a plan can know that.

Note [Times]: what computing takes depends on the batch. So a plan tells what passing takes, and what of a step hides
it; a step is never shorter than all that passes:

- lazy: the longer of its first forward pass and of updates, and then the rest of computing. Updates wait for the norm
  of all gradients, and weights for their updates: until that pass is over, all that lives elsewhere has come once, and
  states and new weights have gone home. What the ring holds when a step begins is there already.
- eager, delayed: the longer of computing and of all that passes.

Steps of the files in benchmarks/results that have computing alone took 0.93 to 1.17 of that; a test compares them.
Updates of states that live on the device, and collectives, are not counted.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Passing(NamedTuple):
    """Bytes that pass over the link (up, down) and the disk (read, write)."""

    up: float = 0
    down: float = 0
    read: float = 0
    write: float = 0


def behind(passing: Passing, held: float) -> Passing:
    """What is left of it where the ring holds so many bytes of what comes."""
    left = 1 - min(held / passing.up, 1) if passing.up else 0.0
    return passing._replace(up=passing.up * left, read=passing.read * left)


ONE_WAY = 0.55
"""The share of what a link carries both ways together that it carries one way alone, as measured on PCIe
(benchmarks/results)."""


class Pace(NamedTuple):
    """How fast bytes pass on a machine, as far as one rank has it: bytes per second; None: not known."""

    up: float | None = None
    down: float | None = None
    both: float | None = None
    """The link in both directions at once, together."""
    read: float | None = None
    """The disks: bytes read."""
    write: float | None = None
    """The disks: bytes written."""

    def seconds(self, passing: Passing) -> dict[str, float] | None:
        """Seconds of this passing, by what takes them; None: not known."""
        pairs = [(passing.up, self.up), (passing.down, self.down), (passing.up + passing.down, self.both)]
        disk = [(passing.read, self.read), (passing.write, self.write)]
        if any(nbytes and not rate for nbytes, rate in (*pairs, *disk)):
            return None
        link, reads = ([nbytes / rate if rate else 0.0 for nbytes, rate in each] for each in (pairs, disk))
        # A disk reads or writes.
        return {"the link": max(link), "the disk": sum(reads)}


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a step. See Note [Times]."""

    passing: float
    """Seconds that all that passes takes."""
    first: float
    """Seconds of that which the first forward pass waits for."""
    by: str
    """What takes that long: the link or the disk."""

    def step(self, forward: float, rest: float) -> float:
        """Seconds of a step whose first forward pass takes so long to compute, and all else that it computes."""
        return max(max(forward, self.first) + rest, self.passing)

    def __str__(self) -> str:
        if not self.passing:
            return "what computing takes"
        if not self.first:
            return f"{_seconds(self.passing)} for bytes over {self.by}, or what computing takes if that is longer"
        least, first = _seconds(self.passing), _seconds(self.first)
        some = f", {first} of them" if first != least else ""
        return (
            f"at least {least} for bytes over {self.by}{some} beside the first forward pass; all other computing comes "
            f"after these {first}"
        )


def times_of(pace: Pace, passing: Passing, first: Passing) -> Times | None:
    """What a step takes that moves so many bytes, some of them before its first forward pass ends; None: not known."""
    every, begin = pace.seconds(passing), pace.seconds(first)
    if every is None or begin is None:
        return None
    by = max(every, key=lambda name: (begin[name], every[name]))
    return Times(max(*every.values(), *begin.values()), max(begin.values()), by)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.095 else f"{seconds * 1e3:.1f} ms"
