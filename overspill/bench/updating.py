"""A worker's part of `overspill bench update`: AdamW on the host's cores, by ours, by torch and by DeepSpeed.

Note [Bare and whole]. Bare is the arithmetic on four fp32 arrays: gradient, master and both moments. Whole is what an
engine with bf16 weights needs: bf16 gradients in, new bf16 weights out. Ours does that in one pass, on masters of which
the weights are the upper half; the others convert gradients before and weights after, as their own engines do.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from overspill.errors import OptionError
from overspill.kernels import cpu
from overspill.kernels.elements import Elements

OURS, TORCH, DEEPSPEED = "ours", "torch", "deepspeed"
ENGINES = (OURS, TORCH, DEEPSPEED)
BARE, WHOLE, MEMORY = "bare", "whole", "memory"
HYPERS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False, "maximize": False}
HYPERS |= {"decoupled_weight_decay": True}
BYTES = {BARE: 28, MEMORY: 24}
"""Of memory that an element takes at least: four arrays read and three written; three read and written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One measurement."""

    engine: str
    kind: str
    """BARE, WHOLE, or MEMORY: three arrays that are read and written, by torch."""
    count: int
    """Elements."""
    cores: int | None = None
    """The first so many; None: all that this process may use."""
    rounds: int = 5


def check_cores(cores: int) -> None:
    there = len(os.sched_getaffinity(0))
    if not 1 <= cores <= there:
        raise OptionError(f"expected --cores from 1 to the {there} that are there, found {cores}")


def measure(case: Case) -> dict[str, float | int]:
    """Seconds of the fastest round, and elements per second."""
    there, threads = os.sched_getaffinity(0), torch.get_num_threads()
    if case.cores is not None:
        check_cores(case.cores)
    used = sorted(there)[: case.cores]
    try:
        os.sched_setaffinity(0, used)
        torch.set_num_threads(len(used))
        run = _memory(case.count) if case.kind == MEMORY else _UPDATES[case.engine](case)
        run()
        seconds = [_timed(run) for _ in range(case.rounds)]
    finally:
        os.sched_setaffinity(0, there)
        torch.set_num_threads(threads)
    best = min(seconds)
    return {"seconds": best, "slowest": max(seconds), "per_second": case.count / best, "cores": len(used)}


def _timed(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _filled(count: int, value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Touched by all threads, as they will use it."""
    return torch.empty(count, dtype=dtype).fill_(value)


def _memory(count: int) -> Callable[[], None]:
    arrays = [_filled(count, 1.0) for _ in range(3)]

    def run() -> None:
        for array in arrays:
            array.mul_(1.0)

    return run


def elements_of(case: Case) -> Elements:
    """What ours works on."""
    moments = [_filled(case.count, 1e-3), _filled(case.count, 1e-6)]
    if case.kind == BARE:
        return Elements(_filled(case.count, 0.5), None, _filled(case.count, 1e-2), (), moments)
    weight, gradient = (_filled(case.count, value, torch.bfloat16) for value in (0.5, 1e-2))
    return Elements(weight, torch.zeros(case.count, dtype=torch.int16), gradient, (), moments)


def _ours(case: Case) -> Callable[[], None]:
    how = cpu.How.best()
    if how is None:
        raise OptionError(
            "expected overspill's native library, found none; install overspill where there is a compiler"
        )
    on = elements_of(case)
    return lambda: cpu.adam(on, HYPERS, 10, how)


def _converting(case: Case, optimizer_of: Callable[[nn.Parameter], torch.optim.Optimizer]) -> Callable[[], None]:
    master = nn.Parameter(_filled(case.count, 0.5))
    master.grad = _filled(case.count, 1e-2)
    optimizer, gradient = optimizer_of(master), master.grad
    if case.kind == BARE:
        return lambda: optimizer.step(None)
    narrow, weight = (_filled(case.count, value, torch.bfloat16) for value in (1e-2, 0.5))

    def run() -> None:
        gradient.copy_(narrow)
        optimizer.step(None)
        weight.copy_(master.detach())

    return run


def _torch(case: Case) -> Callable[[], None]:
    return _converting(case, lambda p: torch.optim.AdamW([p], lr=1e-4, fused=True))


def _deepspeed(case: Case) -> Callable[[], None]:
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError as error:
        raise OptionError(f"expected deepspeed to be installed, found none: {error}") from error

    return _converting(case, lambda p: DeepSpeedCPUAdam([p], lr=1e-4, adamw_mode=True))


_UPDATES = {OURS: _ours, TORCH: _torch, DEEPSPEED: _deepspeed}
