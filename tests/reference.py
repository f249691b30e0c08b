"""The plain loops that define what is right. Nothing here knows of overspill.

A `Recipe` says what to train and how; `train` is the loop every user writes. The tests run it once on a plain model
and optimizer and once on prepared ones, and compare bits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Batch = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """How the loop is written."""

    steps: int = 20
    micro_batches: int = 1
    clip: float | None = None
    """Some value between the norms that occur, so that clipping acts on some steps and not on others."""
    seed: int = 1


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Batch],
    recipe: Recipe,
    loss_of: Callable[[nn.Module, Batch], torch.Tensor],
) -> list[float]:
    """The loop. Returns the losses of all micro-batches."""
    torch.manual_seed(recipe.seed)
    losses = []
    for _ in range(recipe.steps):
        for _ in range(recipe.micro_batches):
            loss = loss_of(model, next(batches)) / recipe.micro_batches
            loss.backward()
            losses.append(loss.detach())
        if recipe.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers."""
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit; NaN equals the same NaN, and 0 differs from -0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bits(a), _bits(b))


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().flatten().view(torch.uint8) if t.numel() else t


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names whose values differ, or that only one side has."""
    return [n for n in sorted({*a, *b}) if n not in a or n not in b or not same_bits(a[n], b[n])]
