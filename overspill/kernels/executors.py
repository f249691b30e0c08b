"""Who carries out a rule on elements: plain torch, the native library, or a Triton kernel. All give the same bits, but
for the root that plain torch takes of exact states on a CPU: reference.torch_root says why."""

import functools
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from overspill.kernels import codecs, cpu
from overspill.kernels.elements import Addresses, Elements
from overspill.kernels.masters import join, split
from overspill.kernels.reference import Hypers, Root, Rule, ieee_root, torch_root

log = logging.getLogger("overspill")
Quick = Callable[[Addresses, Hypers, int], bool]


@dataclass(frozen=True, slots=True)
class Executor:
    run: Callable[[Elements, Hypers, int], None]
    """(elements, hyperparameters, step): changes weights and what is kept, in place; steps count from 1."""
    fused: bool
    """Whether it is one pass that needs no memory of its own, and multiplies gradients with their factors itself.
    Others take some elements at a time, and gradients that are fp32, their own, and without factors."""
    quick: Quick | None = None
    """As `run`, if it can do that by addresses alone; False: it cannot."""


def executor_for(rule: Rule, device: torch.device, format: str) -> Executor:
    """The fastest there is for states of this format."""
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is not None:
            from overspill.kernels import gpu

            return Executor(gpu.RULES[rule.name], fused=True, quick=gpu.QUICK[rule.name])
        log.warning("updates run piece by piece in plain torch, which is slower: there is no triton; install it")
    root = torch_root if format == "exact" else ieee_root
    plain = functools.partial(in_torch, rule, root)
    how = cpu.How.best() if device.type == "cpu" and format != "exact" else None
    return Executor(plain if how is None else functools.partial(_native, rule, how, plain), fused=False)


def in_torch(rule: Rule, root: Root, on: Elements, hypers: Hypers, step: int) -> None:
    assert not on.factors and on.gradient.dtype == torch.float32, "a gradient comes as it counts"
    noise: tuple[Tensor, Tensor] | None = None
    if on.format != "exact":
        noise = codecs.chance(on.first, on.weight.numel(), on.key, on.weight.device)
    fields = codecs.load(on.format, rule.fields, on.arrays)
    master = on.weight if on.kept is None else join(on.weight, on.kept)
    changed = rule.apply(master, on.gradient, fields, hypers, step, root)
    codecs.keep(on.format, rule.fields[:changed], on.arrays, noise, fields[:changed])
    if on.kept is not None:
        split(master, on.weight, on.kept, None if noise is None else noise[1] >> 24)


def _native(
    rule: Rule, how: cpu.How, plain: Callable[[Elements, Hypers, int], None], on: Elements, hypers: Hypers, step: int
) -> None:
    if cpu.takes(on):
        cpu.RULES[rule.name](on, hypers, step, how)
    else:
        plain(on, hypers, step)
