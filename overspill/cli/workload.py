"""What `overspill train` trains: a byte-level GPT on the source text of Python's own library, by the usual loop."""

import math
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from overspill.cli.settings import Settings
from overspill.errors import OptionError

VOCABULARY = 256
CORPUS_BYTES = 8 << 20
SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})
"""Folders that are not the library's own code, and two that are little but tables."""
LAST_LR = 0.1
"""Where the learning rate ends, as a share of its peak."""

Batch = dict[str, Tensor]
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


def read_corpus(limit: int = CORPUS_BYTES) -> Tensor:
    """The library's text: uint8 [bytes], host."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if SKIPPED.isdisjoint(path.relative_to(root).parts[:-1]):
            text += path.read_bytes()
        if len(text) >= limit:
            break
    if len(text) < 1 << 16:
        raise OptionError(
            f"expected the source text of Python's standard library in {str(root)!r} to train on, found {len(text)} "
            "bytes of it; install it, or use a Python that comes with it"
        )
    return torch.frombuffer(text, dtype=torch.uint8)[:limit]


def batches(corpus: Tensor, settings: Settings, device: torch.device) -> Iterator[Batch]:
    """Random windows of the text, the same for the same seed: int64 [batch, seq], device."""
    generator = torch.Generator().manual_seed(settings.seed)
    while True:
        starts = torch.randint(0, len(corpus) - settings.seq, (settings.batch,), generator=generator)
        window = corpus[starts[:, None] + torch.arange(settings.seq)].long().to(device)
        yield {"input_ids": window, "labels": window}


def build_model(settings: Settings) -> nn.Module:
    """A stock GPT-2 with new weights, in host memory; the same for the same seed."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(settings.seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=settings.seq,
        n_embd=settings.hidden,
        n_layer=settings.layers,
        n_head=settings.heads,
        activation_function="gelu_pytorch_tanh",  # GPT-2's own formula, without its six intermediate tensors
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model: nn.Module = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]
    if settings.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    return model.train()


def build_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=settings.lr)


def build_scheduler(optimizer: torch.optim.Optimizer, settings: Settings) -> Scheduler:
    """Warm-up, then a cosine down to LAST_LR of the peak."""
    falling = max(1, settings.steps - settings.warmup)

    def factor(step: int) -> float:
        if step < settings.warmup:
            return (step + 1) / settings.warmup
        done = min(1.0, (step - settings.warmup) / falling)
        return LAST_LR + (1 - LAST_LR) * (1 + math.cos(math.pi * done)) / 2

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def plain_trainee(settings: Settings, device: torch.device) -> Trainee:
    """The same training by torch alone."""
    model = build_model(settings).to(device)
    optimizer = build_optimizer(model, settings)
    clip = partial(nn.utils.clip_grad_norm_, list(model.parameters()))
    return Trainee(model, optimizer, build_scheduler(optimizer, settings), clip)


def train_steps(trainee: Trainee, source: Iterator[Batch], settings: Settings) -> Iterator[Step]:
    """The loop that every user writes, for a plain model and for a prepared one; pauses after every step."""
    model, optimizer, scheduler = trainee.model, trainee.optimizer, trainee.scheduler
    torch.manual_seed(settings.seed)
    for _ in range(settings.steps):
        begin = time.perf_counter()
        losses, norm = [], None
        for _ in range(settings.micro_batches):
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
