"""What the last step took: bytes per lane, seconds per kind of op."""

import time
from collections import Counter
from typing import Any

from overspill.runtime.executor import Executor


class Measures:
    """Looks at the executor's counters once a step."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._then = (Counter(executor.moved), dict(executor.times), time.perf_counter())
        self.steps = 0
        self.last: dict[str, Any] = {"steps": 0, "seconds": 0.0, "moved": {}, "op_seconds": {}}

    def tick(self) -> None:
        """A step ends here. Updates that it made due are counted with the next step, in which they run."""
        moved, times, now = Counter(self._executor.moved), dict(self._executor.times), time.perf_counter()
        self.steps += 1
        self.last = {
            "steps": self.steps,
            "seconds": now - self._then[2],
            "moved": {str(lane): n for lane, n in (moved - self._then[0]).items()},
            "op_seconds": {str(k): s - self._then[1][k] for k, s in times.items() if s > self._then[1][k]},
        }
        self._then = (moved, times, now)
