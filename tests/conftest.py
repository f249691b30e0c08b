"""Models this small are slower on several threads, and much slower when the machine is busy.

Files go to workers whole (`--dist loadfile`), and those that take longest begin first, so that none is left alone at
the end."""

import gc
import signal
import sys
from collections.abc import Iterator

import pytest
import torch

import overspill

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Of a shell's background job, whose processes would ignore Ctrl-C as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = (
    "zero_parity zero_memory zero_models zero_races large zero_habits zero_saving train_ranks zero_bytes "
    "zero_divergence zero_setup zero_ahead mesh memory"
)


def pytest_collection_finish() -> None:
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {f"test_{name}.py": n for n, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(autouse=True)
def what_is_imported_is_no_garbage() -> Iterator[None]:
    """Looking through all of Transformers for garbage, again and again, took a sixth of the time."""
    before = len(sys.modules)
    yield
    # (A model that was left to the garbage collector would stay for ever.)
    if len(sys.modules) > before and not overspill.api._prepared:
        gc.collect()
        gc.freeze()


@pytest.fixture
def command() -> list[str]:
    """The command line, in a process of its own."""
    return [sys.executable, "-m", "overspill"]
