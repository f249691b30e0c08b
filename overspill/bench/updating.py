"""A worker's part of `overspill bench update`: AdamW on the host's cores, by ours, by torch and by DeepSpeed.

Note [Bare and whole]. Bare is the arithmetic on four fp32 arrays: gradient, master and both moments. Whole is what an
engine with bf16 weights needs: bf16 gradients in, new bf16 weights out. Ours does that in one pass, on masters of which
the weights are the upper half; the others convert gradients before and weights after, as their own engines do.

Note [The same memory]. All engines work on the same arrays of one process, in turns: where pages of memory lie, and
what else the machine does, makes more difference than the engines.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from overspill import cgroups
from overspill.errors import OptionError
from overspill.kernels import cpu
from overspill.kernels.elements import Elements
from overspill.specs import human
from overspill.tiers.probe import host_available

OURS, TORCH, DEEPSPEED = "ours", "torch", "deepspeed"
ENGINES = (OURS, TORCH, DEEPSPEED)
BARE, WHOLE, MEMORY = "bare", "whole", "memory"
HYPERS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False, "maximize": False}
HYPERS |= {"decoupled_weight_decay": True}
_SAME: dict[str, Any] = {name: HYPERS[name] for name in ("lr", "betas", "eps", "weight_decay")}
"""What all engines are told."""
BYTES = {BARE: 28, MEMORY: 24}
"""Bytes of memory that an element takes at least: four arrays read and three written; three read and written."""

FLOATS = ("master", "gradient", "m", "v")
ARRAYS: Mapping[str, tuple[torch.dtype, float]] = {
    "master": (torch.float32, 0.5),
    "gradient": (torch.float32, 1e-2),
    "m": (torch.float32, 1e-3),
    "v": (torch.float32, 1e-6),
    "narrow": (torch.bfloat16, 1e-2),
    "weight": (torch.bfloat16, 0.5),
    "rest": (torch.int16, 0.0),
}
"""What they begin with."""
STEP = 10
REST = 0.3
"""Seconds before each round: threads of OpenMP, on which some of the engines run, spin for a while after their work."""
_TROUBLE = (OptionError, ImportError, AttributeError, OSError, RuntimeError, ValueError, AssertionError)
"""Errors of peers that compile what they need when it is first used."""
LEFT = 0.04
"""The share of the memory that is there for whatever else runs."""

Arrays = Mapping[str, Tensor]
Rows = list[dict[str, Any]]
Told = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Several measurements in one process."""

    counts: Sequence[int]
    """Elements, of one measurement after the other."""
    engines: Sequence[str] = (OURS,)
    kinds: Sequence[str] = (BARE, WHOLE)
    cores: int | None = None
    """The first so many; None: all that this process may use."""
    rounds: int = 5

    def pairs(self) -> Iterator[tuple[str, str]]:
        """(engine, kind), those with the same kind together. MEMORY: three arrays that are read and written, by torch.
        It is measured in turns with the bare updates."""
        if BARE in self.kinds:
            yield TORCH, MEMORY
        for kind in self.kinds:
            yield from ((engine, kind) for engine in self.engines)


def names_of(engine: str, kind: str) -> Sequence[str]:
    """The arrays that it works on."""
    if kind == MEMORY:
        return ("master", "m", "v")
    if kind == BARE:
        return FLOATS
    return ("weight", "rest", "narrow", "m", "v") if engine == OURS else (*FLOATS, "narrow", "weight")


def check_cores(cores: int) -> None:
    there = cgroups.cores()
    if not 1 <= cores <= there:
        raise OptionError(f"expected --cores from 1 to the {there} that are there, found {cores}; give such a number")


def measure(case: Case, told: Told = lambda text: None, known: Callable[[Rows], None] = lambda rows: None) -> Rows:
    """A row for each engine, kind and count: seconds of a round, elements per second; or why there is none. `known`
    hears all rows so far after every count: a machine that runs out of memory at the next one takes none of them."""
    there, threads = os.sched_getaffinity(0), torch.get_num_threads()
    if case.cores is not None:
        check_cores(case.cores)
    used = sorted(there)[: case.cores or cgroups.cores()]
    room = int(host_available() * (1 - LEFT))
    try:
        os.sched_setaffinity(0, used)
        torch.set_num_threads(len(used))
        memory = torch.empty(min(room, max(map(_needed, _sets(case)))), dtype=torch.uint8)
        rows: Rows = []
        for count in case.counts:
            found = _measure(case, count, memory, told)
            rows += [{**row, "cores": len(used), "rounds": case.rounds} for row in found]
            known(rows)
    finally:
        os.sched_setaffinity(0, there)
        torch.set_num_threads(threads)
    return rows


def _sets(case: Case) -> Iterator[tuple[int, set[str]]]:
    for count in case.counts:
        yield count, {name for pair in case.pairs() for name in names_of(*pair)}


def _needed(given: tuple[int, set[str]]) -> int:
    count, names = given
    return sum(_room(count, name) for name in names)


def _room(count: int, name: str) -> int:
    """Bytes, so that the next array begins where a page does."""
    return -(-count * ARRAYS[name][0].itemsize // 4096) * 4096


def _measure(case: Case, count: int, memory: Tensor, told: Told) -> Rows:
    """All of one count, kind after kind."""
    fits: list[tuple[str, str]] = []
    names: set[str] = set()
    # Those that need least first, and what is only for comparison last.
    for pair in sorted(case.pairs(), key=lambda pair: (pair[1] == MEMORY, _needed((count, set(names_of(*pair)))))):
        if _needed((count, names | set(names_of(*pair)))) <= memory.numel():
            fits, names = [*fits, pair], names | set(names_of(*pair))
    arrays, rows = _carved(count, names, memory), []
    for turn in ((MEMORY, BARE), (WHOLE,)):
        together = [pair for pair in case.pairs() if pair[1] in turn and pair in fits]
        told(f"{count:,} elements, {turn[-1]}")
        rows += _in_turns(together, count, arrays, case.rounds)
    for engine, kind in (pair for pair in case.pairs() if pair not in fits):
        needed, there = human(_needed((count, set(names_of(engine, kind))))), human(memory.numel())
        reason = f"expected {needed} of host memory, found {there} for it"
        rows.append({"engine": engine, "kind": kind, "count": count, "ok": False, "reason": reason})
    return rows


def _carved(count: int, names: set[str], memory: Tensor) -> Arrays:
    """Filled by all threads, as they will use it."""
    found, begin = {}, 0
    for name in (name for name in ARRAYS if name in names):
        dtype, value = ARRAYS[name]
        found[name] = memory[begin : begin + count * dtype.itemsize].view(dtype).fill_(value)
        begin += _room(count, name)
    return found


def _in_turns(pairs: Sequence[tuple[str, str]], count: int, arrays: Arrays, rounds: int) -> Rows:
    """See Note [The same memory]."""
    rows: Rows = []
    runs: list[tuple[Callable[[], object], list[float]]] = []
    for engine, kind in pairs:
        row: dict[str, Any] = {"engine": engine, "kind": kind, "count": count, "ok": True, "reason": None}
        try:
            run = _memory(arrays) if kind == MEMORY else _UPDATES[engine](kind, arrays)
            run()
            runs.append((run, []))
        except _TROUBLE as error:
            if engine == OURS and not isinstance(error, OptionError):
                raise
            # What a peer needs may not be there, or not fit this machine; the others are measured all the same.
            row |= {"ok": False, "reason": (str(error).splitlines() or [type(error).__name__])[0]}
        rows.append(row)
    for _ in range(rounds):
        for run, seconds in runs:
            time.sleep(REST)
            begin = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begin)
    for row, (_, seconds) in zip((row for row in rows if row["ok"]), runs, strict=True):
        usual = statistics.median(seconds)
        row |= {"seconds": usual, "fastest": min(seconds), "slowest": max(seconds), "per_second": count / usual}
    return rows


def _memory(arrays: Arrays) -> Callable[[], object]:
    def run() -> None:
        for name in names_of(TORCH, MEMORY):
            arrays[name].mul_(1.0)

    return run


def elements_of(kind: str, arrays: Arrays) -> Elements:
    """What ours works on."""
    moments = [arrays["m"], arrays["v"]]
    if kind == BARE:
        return Elements(arrays["master"], None, arrays["gradient"], (), moments)
    return Elements(arrays["weight"], arrays["rest"], arrays["narrow"], (), moments)


def _ours(kind: str, arrays: Arrays) -> Callable[[], object]:
    how = cpu.How.best()
    if how is None:
        raise OptionError(
            "expected overspill's native library, found none; install overspill where there is a compiler"
        )
    on = elements_of(kind, arrays)
    return lambda: cpu.RULES["adam"](on, HYPERS, STEP, how)


def _converting(
    kind: str, arrays: Arrays, optimizer_of: Callable[[nn.Parameter], torch.optim.Optimizer], step: Any
) -> Callable[[], object]:
    master = nn.Parameter(arrays["master"])
    master.grad = arrays["gradient"]
    optimizer, gradient = optimizer_of(master), master.grad
    optimizer.state[master] = {"step": step, "exp_avg": arrays["m"], "exp_avg_sq": arrays["v"]}
    if kind == BARE:
        return lambda: optimizer.step(None)
    narrow, weight = arrays["narrow"], arrays["weight"]

    def run() -> None:
        gradient.copy_(narrow)
        optimizer.step(None)
        weight.copy_(master.detach())

    return run


def _torch(kind: str, arrays: Arrays) -> Callable[[], object]:
    return _converting(kind, arrays, lambda p: torch.optim.AdamW([p], **_SAME, fused=True), torch.tensor(STEP - 1.0))


def _deepspeed(kind: str, arrays: Arrays) -> Callable[[], object]:
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError as error:
        raise OptionError(
            f"expected deepspeed to be installed, found none: {error}; install it, or leave it out"
        ) from error

    return _converting(kind, arrays, lambda p: DeepSpeedCPUAdam([p], **_SAME, adamw_mode=True), STEP - 1)


_UPDATES = {OURS: _ours, TORCH: _torch, DEEPSPEED: _deepspeed}
