"""Models this small are slower on several threads, and much slower when the machine is busy."""

import sys

import pytest
import torch

import overspill
from tests import shim

torch.set_num_threads(1)


@pytest.fixture
def whole_api(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line in a process of its own; in this process, what it needs of overspill is there too."""
    for name, function in shim.STAND_INS.items():
        monkeypatch.setattr(overspill, name, function, raising=False)
    return [sys.executable, "-m", "tests.shim"]
