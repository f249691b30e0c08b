"""Backward passes that broke off.

Note [A pass that broke off]: an exception in the middle of a backward pass (of a hook, out of memory, Ctrl-C) ends it,
and nothing of ours is called then. Autograd does call back at the end of a pass that comes to one. So a pass that has
begun and did not end, while its caller is in no backward pass any more, broke off. A pass inside of another one, as of
a re-entrant checkpoint, ends by itself; so the outer one is heard of where it begins, at what the model gave, too.
"""

from functools import partial

import torch
from torch.autograd import Variable

from overspill.runtime.backward import in_backward


class Passes:
    """See Note [A pass that broke off]."""

    def __init__(self) -> None:
        self._running: dict[int, int] = {}
        """Passes that have not ended -> how many gradients had come before."""
        self._came = 0

    def begin(self) -> None:
        """A backward pass is running."""
        task = torch._C._current_graph_task_id()
        if task != -1 and task not in self._running:
            self._running[task] = self._came
            Variable._execution_engine.queue_callback(partial(self._ended, task))

    def _ended(self, task: int) -> None:
        self._running.pop(task, None)

    def came(self) -> None:
        """It brought a gradient."""
        self.begin()
        self._came += 1

    def broke_off(self) -> bool:
        """Whether one broke off that had brought gradients. It is told once."""
        if not self._running or in_backward():
            return False
        before = min(self._running.values())
        self.forget()
        return self._came > before

    def forget(self) -> None:
        """What becomes of those that are not over is known."""
        self._running.clear()
