"""What will an optimizer keep for a parameter? Asked before anything is allocated.

The user's optimizer runs one step on tiny stand-ins of the same rank, whose sizes are distinct primes. Each state
tensor's sizes are then read back as products of the stand-in's sizes, so a row statistic of a matrix is known to
be as long as the matrix has rows. The stand-ins hold a few hundred elements, whatever the model's size.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from overspill.errors import ModelError
from overspill.specs import align

PRIMES = (3, 5, 7, 11, 13, 17, 19, 23)

SMALL = 1
"""State tensors of at most this many elements (step counts, scalars) stay where the optimizer made them."""


def stand_in(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """A copy of the user's optimizer, with everything it was set up with, but groups and states of its own.

    Its step runs none of the user's step hooks: those belong to the whole step, not to a part of it.
    """
    copy = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    copy.__dict__.pop("step", None)
    copy.__dict__["_optimizer_step_pre_hooks"] = {}
    copy.__dict__["_optimizer_step_post_hooks"] = {}
    copy.param_groups = groups
    copy.state = defaultdict(dict)
    return copy


class StateProbe:
    """Bytes of state per parameter, foretold for one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._group = {id(p): i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
        self._known: dict[tuple[int, int, torch.dtype], list[tuple[tuple[int, ...], int]]] = {}

    def bytes_of(self, p: nn.Parameter, shape: Sequence[int]) -> int | None:
        """Bytes of all state tensors of `p`, or of a piece of it, each aligned; None if the optimizer has it not."""
        group = self._group.get(id(p))
        if group is None:
            return None
        key = (group, len(shape), torch.float32 if p.is_floating_point() else p.dtype)
        if key not in self._known:
            self._known[key] = self._run(group, p, len(shape))
        return sum(align(_scaled(tiny, shape) * itemsize) for tiny, itemsize in self._known[key])

    def _run(self, group: int, p: nn.Parameter, dims: int) -> list[tuple[tuple[int, ...], int]]:
        if dims > len(PRIMES):
            raise ModelError(
                f"expected parameters of at most {len(PRIMES)} dimensions, found one of {dims}; fold some into one"
            )
        dtype = torch.float32 if p.is_floating_point() else p.dtype
        tiny = nn.Parameter(torch.ones(PRIMES[:dims], dtype=dtype, device="cpu"))
        tiny.grad = torch.ones_like(tiny)
        hypers = {k: v for k, v in self._optimizer.param_groups[group].items() if k != "params"}
        # These two speak of where the step runs, not of what it keeps, and want a GPU that a plan does not need.
        hypers |= {k: False for k in ("capturable", "fused") if k in hypers}
        runner = stand_in(self._optimizer, [{**hypers, "params": [tiny]}])
        with torch.random.fork_rng(devices=[]):
            runner.step()
        tensors = [v for v in runner.state[tiny].values() if isinstance(v, torch.Tensor) and v.numel() > SMALL]
        return [(tuple(t.shape), t.element_size()) for t in tensors]


def _scaled(tiny: tuple[int, ...], shape: Sequence[int]) -> int:
    """Elements of a state whose stand-in has the sizes `tiny`, for a parameter of `shape`."""
    sizes = dict(zip(PRIMES, shape, strict=False))
    total = 1
    for size in tiny:
        for prime, real in sizes.items():
            if size % prime == 0:
                size //= prime
                total *= real
        total *= size
    return total if math.prod(tiny) else 0
