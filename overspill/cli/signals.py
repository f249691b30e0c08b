"""Ctrl-C and SIGTERM: the first asks the training to stop after its step, the second ends the process at once."""

import os
import signal
import sys
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = "\x1b[?25h"
"""A live bar hides it."""


class Interruption:
    """A context in which signals are taken down instead of raising wherever the program happens to be."""

    def __init__(self) -> None:
        self.caught: signal.Signals | None = None
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
            if sys.stdout.isatty():
                os.write(1, SHOW_CURSOR.encode())
            os.write(2, b"\noverspill: ended at once; checkpoints that were complete before are still there\n")
            # Nothing is tidied up: a checkpoint that is being written has no name yet under which it would be found,
            # and what lies in the nvme folders is removed by the next run that uses them.
            os._exit(128 + number)
        self.caught = signal.Signals(number)
        os.write(2, b"\noverspill: finishing this step, then saving a checkpoint; once more to end at once\n")
