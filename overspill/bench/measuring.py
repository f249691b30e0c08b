"""A worker's part of `overspill probe`: every rate of the machine, and that of our own update."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import overspill
from overspill.bench import timing, updating
from overspill.kernels import codecs, cpu
from overspill.kernels.elements import Elements
from overspill.tiers import host_available, rates

_LAYERS, _WIDTH, _SMALL_WIDTH = 8, 4096, 256
_COUNT, _SMALL_COUNT, _ELEMENT = 1 << 28, 1 << 20, 14
"""Elements for the cores, more than caches hold; and bytes of one."""
_ROUNDS = 4


def measurements(device: torch.device, nvme: str | None) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """What is measured, by name, one after the other."""
    small = device.type != "cuda"
    yield "link", partial(rates.link, device)
    yield "host memory", lambda: {"dram": rates.dram(small)}
    yield "host memory in place", lambda: {"in_place": in_place(small)}
    yield "update", lambda: {"update": update(device)}
    if cpu.How.best() is not None:
        yield "update on cores", lambda: updated_by_cores(small)
    if nvme is not None:
        yield "disk", partial(rates.disk, Path(nvme), small)
    # The last one, because some virtual machines announce instructions for it that end the process.
    yield "matrix product", lambda: {"matmul": rates.matmul(device)}


def _count(small: bool) -> int:
    return _SMALL_COUNT if small else max(_SMALL_COUNT, min(_COUNT, host_available() // (4 * _ELEMENT)))


def in_place(small: bool) -> float:
    """Bytes per second, read and written."""
    case = updating.Case(counts=(_count(small),), engines=(), kinds=(updating.BARE,), rounds=_ROUNDS)
    (found,) = updating.measure(case)
    assert found["ok"], found["reason"]
    return float(updating.BYTES[updating.MEMORY] * found["per_second"])


def updated_by_cores(small: bool) -> dict[str, float]:
    """Elements per second, from bf16 gradients to bf16 weights, of states in every format."""
    count = _count(small)
    (found,) = updating.measure(updating.Case(counts=(count,), kinds=(updating.WHOLE,), rounds=_ROUNDS))
    assert found["ok"], found["reason"]
    others = {f"cores_{format}": _in_format(format, count) for format in ("bf16", "compact")}
    return {"cores": float(found["per_second"]), **others}


def _in_format(format: str, count: int) -> float:
    how, kept = cpu.How.best(), torch.int8 if format == "compact" else torch.int16
    assert how is not None, "there is a native library"
    weight, gradient = (torch.full((count,), value, dtype=torch.bfloat16) for value in (0.5, 1e-2))
    sizes = [count, codecs.blocks_of(count)] if format == "compact" else [count]
    arrays = [torch.zeros(size, dtype=cpu.FORMATS[format]) for _ in ("m", "v") for size in sizes]
    on = Elements(weight, torch.zeros(count, dtype=kept), gradient, (), arrays, format)
    best = 0.0
    for step in range(1, _ROUNDS + 1):
        with timing.Stopwatch() as watch:
            cpu.RULES["adam"](on, updating.HYPERS, step, how)
        best = max(best, count / watch.seconds)
    return best


def update(device: torch.device) -> float:
    """Elements per second of overspill's own AdamW update, with weights, gradients and states on the device."""
    width = _WIDTH if device.type == "cuda" else _SMALL_WIDTH
    with torch.device(device):
        model: Any = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(_LAYERS))).to(torch.bfloat16)
        inputs = torch.randn(1, width, dtype=torch.bfloat16)
    count = sum(p.numel() for p in model.parameters())
    own = torch.optim.AdamW(model.parameters(), lr=1e-5)
    homes = dict.fromkeys(("weight", "grad", "state"), "device")
    model, optimizer = overspill.prepare(model, own, place=homes)
    best = 0.0
    for _ in range(_ROUNDS):
        model(inputs).float().sum().backward()
        timing.wait(device)
        with timing.Stopwatch() as watch:
            optimizer.step()
            overspill.settle(model)
            timing.wait(device)
        optimizer.zero_grad()
        best = max(best, count / watch.seconds)
    overspill.close(model)
    return best
