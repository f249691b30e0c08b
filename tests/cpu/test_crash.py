"""A killed process leaves nothing behind that the next one does not remove; a normal end leaves nothing at all."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import overspill
from tests import small

TRAIN = """
import signal, sys, torch, overspill
from tests import small
from tests.reference import Recipe, train

# A shell that runs the tests in the background has switched interrupts off, for all below it.
signal.signal(signal.SIGINT, signal.default_int_handler)
model = small.build()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
place = dict.fromkeys(("weight", "grad", "state"), "nvme")
model, optimizer = overspill.prepare(model, optimizer, place=place, nvme=sys.argv[1])
train(model, optimizer, small.batches(), Recipe(steps=2), small.loss_of)
print("training", flush=True)
train(model, optimizer, small.batches(), Recipe(steps=int(sys.argv[2])), small.loss_of)
if sys.argv[3] == "raise":
    raise RuntimeError("the loop broke")
"""


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process that trains; none outlives its test."""
    started: list[subprocess.Popen[str]] = []

    def start(nvme: Path, steps: int, end: str = "") -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", TRAIN, str(nvme), str(steps), end]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "training\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def prepare(nvme: Path) -> torch.nn.Module:
    model = small.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    place = dict.fromkeys(("weight", "grad", "state"), "nvme")
    return overspill.prepare(model, optimizer, place=place, nvme=nvme, precision="fp32")[0]


def test_a_killed_process_is_cleaned_up_after(tmp_path: Path, start: Start) -> None:
    process = start(tmp_path, steps=10**6)
    (left,) = tmp_path.iterdir()
    assert left.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in left.iterdir()} == {0o600}
    process.kill()
    process.wait()
    assert left.exists(), "a killed process cannot clean up"
    model = prepare(tmp_path)
    assert not left.exists() and len(list(tmp_path.iterdir())) == 1
    overspill.close(model)
    assert list(tmp_path.iterdir()) == []


def test_a_running_process_keeps_its_files(tmp_path: Path, start: Start) -> None:
    process = start(tmp_path, steps=10**6)
    (other,) = tmp_path.iterdir()
    overspill.close(prepare(tmp_path))
    assert other.exists() and len(list(other.iterdir())) == 2
    time.sleep(0.1)
    assert process.poll() is None, "the other process goes on"
    process.kill()
    process.wait()


def test_nothing_is_left_after_a_normal_end_an_error_or_an_interrupt(tmp_path: Path, start: Start) -> None:
    assert start(tmp_path, steps=1).wait() == 0
    assert list(tmp_path.iterdir()) == []
    assert start(tmp_path, steps=1, end="raise").wait() == 1
    assert list(tmp_path.iterdir()) == []
    process = start(tmp_path, steps=10**6)
    process.send_signal(signal.SIGINT)
    assert process.wait() != 0
    assert list(tmp_path.iterdir()) == []
