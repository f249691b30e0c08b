"""Ctrl-C while a command is being imported, which takes a second or two.

It is not left to Python, which would raise it wherever it is: in the middle of torch's own initialisation, which gives
a long traceback, aborts, or goes on as if nothing had been.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

NAME = "overspill"


@contextmanager
def ending_at_once() -> Iterator[None]:
    """While a command is imported, Ctrl-C ends the process: there is nothing to tidy up. Nothing changes in any other
    process, in other threads (Python has signals for the main one only), and where somebody has a handler of their
    own."""
    is_command = Path((*sys.argv, "")[0]).name == NAME or ("-m", NAME) in pairwise(sys.orig_argv)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_command or not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: object) -> None:
    os.write(2, b"overspill: interrupted\n")
    os._exit(128 + signal.SIGINT)
