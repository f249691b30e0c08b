"""On cuda the plain loop itself is only repeatable with deterministic algorithms. And what was measured of this machine
must not decide what is tested."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

from overspill.tiers import known
from tests.gpu.where import INTERPRETED


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, scope="session")
def products_have_their_workspaces() -> None:
    """32 MiB for each thread that multiplies matrices, which torch keeps: more than tight budgets have room for, so
    it would matter which test is the first of its process."""
    if torch.cuda.is_available():
        one = torch.ones(64, 64, device="cuda", requires_grad=True)
        (one @ one).sum().backward()


@pytest.fixture(autouse=True)
def nothing_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "cache", lambda: tmp_path / "none.json")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU there is no current one. And the interpreter would make other numbers of denormals of bf16."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(raw: Any, of: Any, to: Any, rounding: Any) -> Any:
        widens = (str(of), str(to)) == ("bf16", "fp32")
        return raw.astype(np.uint32) << 16 if widens else convert(raw, of, to, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", converted)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
