"""The threads of the native library: whoever works on which part, and whoever calls, the bits are those of one."""

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from overspill.kernels import codecs, cpu
from overspill.kernels.cpu import How
from overspill.kernels.elements import Elements
from tests.cpu.test_native import KINDS, NATIVE, RULES, calm, differing, elements, native, packed, part

pytestmark = NATIVE

PIECE, THREADS, STEP = 1 << 16, (1, 2, 3, 4, 5), 3
"""Elements that a thread takes at once (csrc/pool.cpp)."""
HYPERS = RULES["adamw"][2]
WIDEST = cpu.sets()[-1] if cpu.sets() else "portable"


def some(format: str, count: int) -> Elements:
    on = calm(elements("adamw", count, KINDS[2]))
    return replace(on if format == "exact" else packed("adamw", on, format), key=codecs.key_of(9, STEP))


def updated(on: Elements, threads: int) -> Elements:
    return native("adamw", on, STEP, How(WIDEST, threads))


def around() -> Iterator[int]:
    """Lengths at which parts of threads begin to differ."""
    for pieces, more in itertools.product(range(THREADS[-1] + 2), (-129, -1, 0, 1, 128)):
        if pieces * PIECE + more > 0:
            yield pieces * PIECE + more


@pytest.mark.parametrize("format", cpu.FORMATS)
def test_the_same_bits_however_many_threads(format: str) -> None:
    whole = some(format, max(around()))
    for count in around():
        on = part(whole, 0, count)
        known = updated(on, 1)
        for threads in THREADS[1:]:
            assert differing(updated(on, threads), known) == [], (count, threads)


def test_calls_from_several_threads_at_once() -> None:
    """Each asks for other lengths and numbers of threads."""
    arrays = {format: some(format, count) for format, count in zip(cpu.FORMATS, (300001, 200000, 131073), strict=True)}
    known = {format: updated(on, 1) for format, on in arrays.items()}

    def calls(format: str) -> list[str]:
        every = itertools.islice(itertools.cycle(THREADS), 60)
        return [wrong for threads in every for wrong in differing(updated(arrays[format], threads), known[format])]

    with ThreadPoolExecutor(len(arrays)) as pool:
        assert list(pool.map(calls, arrays)) == [[]] * len(arrays)


def test_more_threads_than_before_and_fewer_again() -> None:
    on = some("exact", 20 * PIECE)
    known = updated(on, 1)
    for threads in (2, 9, 3, 17, 2):
        assert differing(updated(on, threads), known) == [], threads


@pytest.mark.full
def test_a_process_that_is_forked_amid_calls_can_make_its_own() -> None:
    """What another thread had locked in that moment would stay locked there."""
    on, stop = some("exact", 2 * PIECE), threading.Event()
    found = part(on, 0, on.weight.numel())

    def calls() -> None:
        mine = part(on, 0, on.weight.numel())
        while not stop.is_set():
            cpu.RULES["adam"](mine, HYPERS, STEP, How(WIDEST, 2))

    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(calls) for _ in range(2)]
        try:
            for _ in range(300):
                pid = os.fork()
                if pid == 0:
                    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # whatever pytest does at it
                    signal.alarm(20)
                    cpu.RULES["adam"](found, HYPERS, STEP, How(WIDEST, 2))
                    os._exit(0)
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        finally:
            stop.set()
        for each in done:
            each.result()
