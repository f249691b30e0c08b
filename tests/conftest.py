"""Models this small are slower on several threads, and much slower when the machine is busy."""

import sys

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def command() -> list[str]:
    """The command line, in a process of its own."""
    return [sys.executable, "-m", "overspill"]
