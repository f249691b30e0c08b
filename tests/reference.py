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


# --- 16-bit weights beside fp32 masters


def half_up(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A master rounded to the compute dtype: to bf16 half up, to fp16 as torch does it; NaN stays NaN."""
    if dtype != torch.bfloat16:
        return master.to(dtype)
    bits = master.contiguous().view(torch.int32)
    rounded = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(master.isnan(), torch.nan, rounded)


class Mixed:
    """A model in 16 bits and its masters, trained by a torch optimizer on the masters."""

    def __init__(
        self, model: nn.Module, build: Callable[[list[nn.Parameter]], torch.optim.Optimizer], dtype: torch.dtype
    ):
        self.model = model
        self.masters = {
            name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters() if p.requires_grad
        }
        self.optimizer = build(list(self.masters.values()))
        self.scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
        self.scales: list[float] = []
        for name, p in model.named_parameters():
            p.data = half_up(p.detach(), dtype) if name in self.masters else p.detach().to(dtype)

    def train(self, batches: Iterator[Batch], recipe: Recipe, loss_of: Callable[[nn.Module, Batch], torch.Tensor]):
        """The loop of `train`, with gradients added in fp32."""
        torch.manual_seed(recipe.seed)
        losses = []
        for _ in range(recipe.steps):
            for _ in range(recipe.micro_batches):
                loss = loss_of(self.model, next(batches)) / recipe.micro_batches
                self.scaler.scale(loss).backward()
                losses.append(loss.detach())
                self.gather()
            self.scaler.unscale_(self.optimizer)
            if recipe.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.masters.values(), recipe.clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scales.append(self.scaler.get_scale())
            self.optimizer.zero_grad()
            self.write()
        return [loss.item() for loss in losses]

    def write(self) -> None:
        """New masters become weights."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                if name in self.masters:
                    p.copy_(half_up(self.masters[name], p.dtype))

    def gather(self) -> None:
        """Gradients of weights are added to those of masters, in fp32."""
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                master = self.masters[name]
                master.grad = p.grad.float() if master.grad is None else master.grad + p.grad.float()
                p.grad = None

    def weights(self) -> dict[str, torch.Tensor]:
        """As `weights`, but the masters of what has one."""
        found = weights(self.model)
        for name, value in self.model.named_parameters(remove_duplicate=False):
            master = next((m for n, m in self.masters.items() if self.model.get_parameter(n) is value), None)
            found[name] = found[name] if master is None else master.detach().clone()
        return found
