"""Ctrl-C and SIGTERM: the first asks the training to stop after its step, the second ends the process at once.

Note [Signals over ranks]. torchrun passes on what it is sent, and a batch system sends it to every process itself: so a
rank may get one signal twice, and one may get it before the others. What follows at once is therefore the same signal,
and the ranks tell each other after every step, so that all stop after the same one.
"""

import os
import signal
import sys
import time
from types import FrameType
from typing import Any

from overspill.cli.ranks import Ranks

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = "\x1b[?25h"
"""A live bar hides it."""
SAME = 2.0
"""Seconds in which a second signal is the first one again, see Note [Signals over ranks]."""


class Interruption:
    """A context in which signals are taken down instead of raising wherever the program happens to be."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.caught: signal.Signals | None = None
        self._ranks = ranks or Ranks()
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interruption":
        self._before = {number: signal.signal(number, self._take) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """As a shell reports a process that ended by the signal."""
        return 128 + self.caught if self.caught else 0

    def _take(self, number: int, _: FrameType | None) -> None:
        # os.write, because the signal may have come in the middle of a print.
        if self.caught is not None:
            if self._ranks.size > 1 and time.monotonic() - self._since < SAME:
                return
            if sys.stdout.isatty():
                os.write(1, SHOW_CURSOR.encode())
            if self._ranks.first:
                os.write(2, b"\noverspill: ended at once; checkpoints that were complete before are still there\n")
            # Nothing is tidied up: a checkpoint that is being written has no name yet under which it would be found,
            # and what lies in the nvme folders is removed by the next run that uses them.
            os._exit(128 + number)
        self.caught, self._since = signal.Signals(number), time.monotonic()
        if self._ranks.first:
            os.write(2, b"\noverspill: finishing this step, then saving a checkpoint; once more to end at once\n")
