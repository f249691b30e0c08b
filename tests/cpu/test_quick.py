"""Updates by addresses alone, as a GPU's kernels take them: they are where the arrays are."""

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import overspill
from overspill.kernels import executors, reference
from overspill.kernels.elements import Addresses, Elements
from overspill.kernels.executors import Executor, in_torch
from overspill.kernels.reference import ieee_root
from overspill.runtime import kernel_update, parts, rooms
from overspill.specs import STATE_BLOCK
from tests.cpu.test_ahead import check, loop, prepare, trained
from tests.reference import weights

FIELDS = {"exact": torch.float32, "bf16": torch.bfloat16, "compact": torch.uint8}


def array(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """What is there."""
    found = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(found, dtype=dtype)


def elements(at: Addresses) -> Elements:
    weight, kept, gradient = at.dtypes
    blocks = -(-at.numel // STATE_BLOCK)
    tops = at.format == "compact"
    return Elements(
        array(at.weight, at.numel, weight),
        None if at.kept is None or kept is None else array(at.kept, at.numel, kept),
        array(at.gradient, at.numel, gradient),
        [array(factor, 1, torch.float32).reshape(()) for factor in at.factors],
        [array(each, blocks if tops and i % 2 else at.numel, FIELDS[at.format]) for i, each in enumerate(at.arrays)],
        at.format,
        at.first,
        at.key,
    )


def by_addresses(used: list[Addresses], every: int) -> Callable[..., Executor]:
    """An executor that refuses some."""

    def executor_for(rule: reference.Rule, device: torch.device, format: str) -> Executor:
        plain = executors.executor_for(rule, device, format)

        def widened(gradient: Tensor, factors: Sequence[Tensor]) -> Tensor:
            gradient = gradient.float().clone()
            for factor in factors:
                gradient *= factor
            return gradient

        def fused(on: Elements, hypers: reference.Hypers, step: int) -> None:
            gradient = widened(on.gradient, on.factors)
            whole = Elements(on.weight, on.kept, gradient, (), on.arrays, on.format, on.first, on.key)
            in_torch(rule, ieee_root, whole, hypers, step)

        def quick(at: Addresses, hypers: reference.Hypers, step: int) -> bool:
            used.append(at)
            if len(used) % every == 0:
                return False
            fused(elements(at), hypers, step)
            return True

        assert not plain.fused, "as on the CPU"
        return Executor(fused, True, quick)

    return executor_for


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("states", ["exact", "bf16", "compact"])
@pytest.mark.parametrize("place", ["states", "host"])
def test_addresses_are_those_of_the_arrays(
    place: Any, states: str, passes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whole and cut parameters, of gradients that are on the device and that came from elsewhere."""
    monkeypatch.setattr(executors, "torch_root", ieee_root)
    expected = trained("device", tmp_path, clip=0.5, states=states, passes=passes)
    used: list[Addresses] = []
    monkeypatch.setattr(parts, "PAGED", {"cpu"})
    monkeypatch.setattr(rooms, "PIECES", {"cpu"})
    monkeypatch.setattr(kernel_update, "executor_for", by_addresses(used, 5))
    model, optimizer = prepare(place, tmp_path, states=states, micro_batches=passes)
    found = loop(model, optimizer, passes, 0.5)
    overspill.settle(model)
    check((found, weights(overspill.close(model))), expected)
    assert len(used) > 20
