"""How long steps take, without disturbing them.

Note [One window]. The host never waits for the device within the window, so an engine that overlaps a step with the
next one is seen at its real speed. Events on the compute stream mark where one step ends and the next begins;
differences between them show how steady it is. The window begins at the end of a step that is not counted and ends at
that of the last one, and the step time is its length over its steps: an update that a step leaves for the next one to
do is timed there, and a window holds as many updates as it has steps, also of those that run by themselves.

Note [Garbage]. Every few dozen steps Python's garbage collector looks at all objects of the process, which takes 0.3 s
where Transformers is imported, whoever trains. Whether that falls into the window is chance, so for all engines what
is there when the set-up is done is frozen: the collector looks at what came later only.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Told = Callable[[str, int, int], None]
"""(phase, steps that were issued, of how many)"""


@dataclass(frozen=True, slots=True)
class Timed:
    """What was seen, in seconds."""

    step: float
    """The window over its steps."""
    issue: float
    """The host's part: how long it took to issue a step, on average. Close to `step`: the device waits for the host."""
    steps: Sequence[float]
    warmup: Sequence[float]
    losses: Sequence[float]
    """The losses of all steps, the warm-up's first."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "step_seconds": self.step,
            "median_seconds": statistics.median(self.steps),
            "least_seconds": min(self.steps),
            "most_seconds": max(self.steps),
            "issue_seconds": self.issue,
            "steps_seconds": list(self.steps),
            "warmup_seconds": list(self.warmup),
            "losses": list(self.losses),
        }


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def warm_up(
    step: Callable[[], Tensor], count: int, device: torch.device, told: Told
) -> tuple[list[float], list[Tensor]]:
    """Steps that are not counted, each waited for. Returns how long each took, and their losses."""
    seconds, losses = [], []
    for done in range(1, count + 1):
        begin = time.perf_counter()
        losses.append(step())
        wait(device)
        seconds.append(time.perf_counter() - begin)
        told("warm-up", done, count)
    return seconds, losses


def window(
    step: Callable[[], Tensor], count: int, device: torch.device, told: Told, warm: tuple[list[float], list[Tensor]]
) -> Timed:
    """Steps that are counted, see Note [One window]; `warm` is what `warm_up` returned."""
    losses = [step()]
    marks = [_mark(device)]
    begin = time.perf_counter()
    for done in range(1, count + 1):
        losses.append(step())
        marks.append(_mark(device))
        told("steps", done, count)
    issued = time.perf_counter()
    wait(device)
    between = [_between(a, b) for a, b in itertools.pairwise(marks)]
    # Losses are read now: reading one would have waited for its step.
    read = [float(loss) for loss in [*warm[1], *losses]]
    return Timed(_between(marks[0], marks[-1]) / count, (issued - begin) / count, between, warm[0], read)


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _between(one: Any, other: Any) -> float:
    if isinstance(one, float):
        return float(other - one)
    return float(one.elapsed_time(other)) / 1000


class Stopwatch:
    """Measures a context, in seconds of the host's clock."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begin = 0.0

    def __enter__(self) -> "Stopwatch":
        self._begin = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._begin
