"""What the last step took: bytes per lane, seconds per kind of op; and what the device was seen to hold."""

import logging
import time
from collections import Counter
from typing import Any

import torch

from overspill.runtime.executor import Executor
from overspill.runtime.parts import Planned
from overspill.specs import Activations, human
from overspill.trace import own_time

log = logging.getLogger("overspill")

STEPS_SEEN = 2
"""In the first step an optimizer may make its states; then a step is as any other."""


class Measures:
    """Looks at the executor's counters once a step, and on cuda at what was reserved since it was made."""

    def __init__(self, executor: Executor, planned: Planned) -> None:
        self._executor = executor
        self._planned = planned
        self._warned = False
        self._comm = executor.ranks.comm if executor.ranks is not None else None
        self._sent = Counter(self._comm.sent) if self._comm is not None else Counter[str]()
        self._then = (executor.traffic(), dict(executor.times), time.perf_counter())
        self._own = own_time.seconds
        self.steps = 0
        self._since = 0
        self._searched = 0
        self._reserved = 0
        self._peaks: tuple[int, int] | None = None
        """Before and after the first gradient of a step, while that is watched."""
        self._gradients = False
        """Whether there are some in this step."""
        self.last: dict[str, Any] = {"steps": 0, "seconds": 0.0, "host_seconds": 0.0, "moved": {}, "op_seconds": {}}

    def peaks(self) -> dict[str, int]:
        """Peak bytes per tier as seen from outside, where that can be seen: on cuda."""
        device = self._executor.lanes.device
        if device.type != "cuda":
            return {}
        return {"device": max(self._reserved, torch.cuda.max_memory_reserved(device))}

    # --- activations

    @property
    def sees_activations(self) -> bool:
        """Whether what the device holds can be told: on cuda."""
        return self._executor.lanes.device.type == "cuda"

    def begin(self) -> None:
        """Watch from now on how much is allocated, before and after the first gradient of each step."""
        self._peaks, self._gradients, self._since = (0, 0), False, self.steps
        self._searched = self._searches()
        self._peak()

    def end(self) -> None:
        self._peaks = None

    def gradient_came(self) -> None:
        """The first of a step, or another one."""
        if self._peaks is not None and not self._gradients:
            self._gradients = True
            self._peaks = (max(self._peaks[0], self._peak()), self._peaks[1])

    def activations(self) -> Activations | None:
        """What they take at most, as far as that was seen; None: not known yet, or never."""
        if self._peaks is None or self.steps - self._since < STEPS_SEEN:
            return None
        before, after = (peak - self._planned.others - self._planned.owned for peak in self._peaks)
        return Activations(max(0, before + self._planned.grads), max(0, after))

    @property
    def pressed(self) -> bool:
        """Whether torch's allocator had to look for holes since it is being watched."""
        return self._searches() > self._searched

    def _searches(self) -> int:
        device = self._executor.lanes.device
        stats = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
        return int(stats.get("num_alloc_retries", 0))

    def _peak(self) -> int:
        """What was allocated at most since the last time. What was reserved tells less: torch's allocator takes
        whatever the budget has before it looks for holes."""
        if not self.sees_activations:
            return 0
        device = self._executor.lanes.device
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(device))
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak

    def tick(self) -> None:
        """A step ends here. Updates that it made due are counted with the next step, in which they run."""
        moved, times, now = self._executor.traffic(), dict(self._executor.times), time.perf_counter()
        self.steps += 1
        if self._peaks is not None:
            self._gradients, self._peaks = False, (self._peaks[0], max(self._peaks[1], self._peak()))
        self.last = {
            "steps": self.steps,
            "seconds": now - self._then[2],
            "host_seconds": own_time.seconds - self._own,
            "moved": {str(lane): n for lane, n in (moved - self._then[0]).items()},
            "op_seconds": {str(k): s - self._then[1][k] for k, s in times.items() if s > self._then[1][k]},
        }
        self._then, self._own = (moved, times, now), own_time.seconds
        if self._comm is not None:
            self.last["sent"] = dict(Counter(self._comm.sent) - self._sent)
            self._sent = Counter(self._comm.sent)
        self._watch()

    def _watch(self) -> None:
        """Activations are the one thing that the plan can only make room for; say so once if they took more."""
        seen = self.peaks().get("device", 0) - self._planned.others
        if seen > self._planned.peak and not self._warned:
            self._warned = True
            log.warning(
                "the device was seen to hold %s, and the plan is %s: activations (or what else this process has "
                "there) took more than was kept free; raise gpu=, use smaller micro-batches, or gradient checkpointing",
                human(seen),
                human(self._planned.peak),
            )
