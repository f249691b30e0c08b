"""A model whose weights exceed the memory that its process may use."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

GiB, MiB = 2**30, 2**20


def run(*arguments: object) -> str:
    command = [sys.executable, "-m", "tests.large_run", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.timeout(900)
@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_larger_than_memory_is_loaded_trained_and_exported(dtype: str, tmp_path: Path) -> None:
    given, nvme, out = tmp_path / "given", tmp_path / "nvme", tmp_path / "out"
    nvme.mkdir()
    run("make", given, 1.0, dtype)
    found = json.loads(run("train", given, nvme, out).splitlines()[-1])
    assert found["weights"] >= GiB and found["limit"] == 512 * MiB
    assert found["peak"] < found["limit"]
    assert [9 < loss < 11 for loss in found["losses"]] == [True] * 3, "three guesses among 16,000 tokens: log = 9.7"
    assert list(nvme.iterdir()) == [], "nothing is left on the disk"
    _check_export(given, out)
    for folder in (given, out):
        shutil.rmtree(folder)


def _check_export(given: Path, out: Path) -> None:
    """The exported folder has the same tensors, and training has changed all of them."""
    from overspill.checkpoint.tensorfile import Reader, entries_of

    before, after = entries_of(given), entries_of(out)
    assert {n: (e.dtype, e.shape) for n, e in before.items()} == {n: (e.dtype, e.shape) for n, e in after.items()}
    with Reader() as reader:
        for name in before:
            # Of 16 bits, an embedding that no token asked for does not show the little that decay takes of it.
            same = True
            for (_, one), (_, other) in zip(
                reader.pieces(before[name], 2**20), reader.pieces(after[name], 2**20), strict=True
            ):
                same = same and torch.equal(one, other)
                assert bool(other.isfinite().all())
            assert not same or before[name].shape == (1024,), name
