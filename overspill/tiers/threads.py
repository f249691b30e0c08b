"""Threads with small stacks: the usual 8 MiB each count where a process has a limit on its memory."""

import threading
from concurrent.futures import ThreadPoolExecutor

from overspill.specs import MiB

_STACK = 2 * MiB
_changing = threading.Lock()


def workers(count: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads are there from the start, because the size of a stack is set when a thread is made."""
    pool = ThreadPoolExecutor(count, thread_name_prefix=name)
    together = threading.Barrier(count + 1)
    with _changing:
        before = threading.stack_size(_STACK)
        try:
            for _ in range(count):
                pool.submit(together.wait)
        finally:
            threading.stack_size(before)
    together.wait()
    return pool
