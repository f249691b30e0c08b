"""The loop that every user writes: what it works on, one step after the other, and a look at the validation data."""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import overspill
from overspill.cli.settings import Settings

LAST_LR = 0.1
"""Where the learning rate ends, as a share of its peak."""
MOMENTUM = 0.9
"""The momentum of SGD."""
TRACED = 2
"""Steps that trace.json shows."""

Batch = dict[str, Tensor]
Weighed = tuple[Batch, int]
"""A batch, and for how many samples its mean loss counts."""
Scheduler = torch.optim.lr_scheduler.LRScheduler


@dataclass(frozen=True, slots=True)
class Step:
    """What the loop knows of one step."""

    loss: float
    """Mean over the micro-batches."""
    lr: float
    grad_norm: float | None
    """Before clipping; None without clipping."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Trainee:
    """What the loop works on; `clip` is the one thing that a prepared optimizer does by itself."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Scheduler
    clip: Callable[[float], Tensor]


def compute_device() -> torch.device:
    """The device that `overspill.prepare` chooses for a model in host memory."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def be_deterministic(device: torch.device) -> None:
    """Take no shortcut whose sums come in any order; without a GPU there is none."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "128")
        torch.use_deterministic_algorithms(True)


def build_optimizer(model: nn.Module, name: str, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    shared: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    match name:
        case "adamw":
            return torch.optim.AdamW(model.parameters(), **shared)
        case "adam":
            return torch.optim.Adam(model.parameters(), **shared)
        case "sgd":
            return torch.optim.SGD(model.parameters(), momentum=MOMENTUM, **shared)
        case "adagrad":
            return _with_values(torch.optim.Adagrad(model.parameters(), **shared))
    raise AssertionError(f"no optimizer {name}")


def _with_values(optimizer: torch.optim.Adagrad) -> torch.optim.Adagrad:
    """Adagrad fills its states when it is built. On the meta device they get one value that stands for all elements."""
    value = torch.tensor(float(optimizer.defaults["initial_accumulator_value"]))
    for p, state in optimizer.state.items():
        if state["sum"].is_meta:
            state["sum"] = value.expand(p.shape)
    return optimizer


def build_scheduler(optimizer: torch.optim.Optimizer, settings: Settings, steps: int) -> Scheduler:
    """Warm-up, then down to LAST_LR of the peak along a cosine or a line, or none of it."""
    falling = max(1, steps - settings.warmup)

    def factor(step: int) -> float:
        if step < settings.warmup:
            return (step + 1) / settings.warmup
        done = min(1.0, (step - settings.warmup) / falling)
        match settings.schedule:
            case "cosine":
                return LAST_LR + (1 - LAST_LR) * (1 + math.cos(math.pi * done)) / 2
            case "linear":
                return LAST_LR + (1 - LAST_LR) * (1 - done)
        return 1.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def train_steps(trainee: Trainee, source: Iterator[Batch], settings: Settings, steps: int) -> Iterator[Step]:
    """So many steps, for a plain model and for a prepared one; pauses after every step."""
    model, optimizer, scheduler = trainee.model, trainee.optimizer, trainee.scheduler
    for _ in range(steps):
        begin = time.perf_counter()
        losses, norm = [], None
        for left in reversed(range(settings.micro_batches)):
            with _held(model) if left else contextlib.nullcontext():
                loss: Any = model(**next(source)).loss / settings.micro_batches
                loss.backward()
            losses.append(loss.detach())
        if settings.clip:
            norm = trainee.clip(settings.clip)
        lr = optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        total = torch.stack(losses).sum().item()
        yield Step(total, lr, None if norm is None else norm.item(), time.perf_counter() - begin)


def _held(model: Any) -> contextlib.AbstractContextManager[Any]:
    """Gradients of all but the last micro-batch need not go to other ranks, where there is room to hold them."""
    held: contextlib.AbstractContextManager[Any] = getattr(model, "no_sync", contextlib.nullcontext)()
    return held


def traced(stream: Iterator[Step], model: nn.Module, path: Path, first: int) -> Iterator[Step]:
    """The same steps, with a trace of TRACED of them, from the one with index `first` on."""
    with contextlib.ExitStack() as stack:
        for index in range(first + TRACED):
            if index == first:
                stack.enter_context(overspill.trace(model, path))
            step = next(stream, None)
            if step is None:
                return
            yield step
    yield from stream


def validate(model: nn.Module, source: Iterable[Weighed], device: torch.device) -> tuple[float, int]:
    """Loss over samples of equal length: its sum, and how many. Training goes on as if nobody had looked."""
    total, count, was = 0.0, 0, model.training
    model.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for batch, samples in source:
            total += model(**batch).loss.item() * samples
            count += samples
    model.train(was)
    return total, count
