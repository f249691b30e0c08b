"""The ways to train a model that are compared: overspill itself, torch alone, and the peers by their names."""

import contextlib
import importlib
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import overspill
from overspill.bench import models
from overspill.bench.jobs import Job, Training
from overspill.bench.models import Batches
from overspill.errors import OptionError

LR = 1e-5

Held = Callable[[], contextlib.AbstractContextManager[Any]]
"""A context for the backward passes of a step but the last one."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A model that is set up for training."""

    model: nn.Module
    step: Callable[[Batches], Tensor]
    """One whole step; returns the loss of its last micro-batch, which nobody has waited for."""
    report: Callable[[], dict[str, Any]] = dict
    """What the engine says of itself after the last step."""
    plan: Callable[[], overspill.Plan] | None = None
    """The one in force, of ours."""


@dataclass(frozen=True, slots=True)
class Engine:
    """How one engine is brought to the point where it can step. What is timed as its set-up is `set_up` alone."""

    what: str
    build: Callable[[Job, torch.device], nn.Module]
    set_up: Callable[[nn.Module, Job], Ready]
    packages: tuple[str, ...] = ()
    needs_gpu: bool = False
    load: Callable[[], None] = lambda: None
    """What is compiled or connected once per machine or process, before anything is built."""

    def check(self, device: torch.device) -> None:
        """Refuse what cannot work here."""
        for name in self.packages:
            if importlib.util.find_spec(name) is None:
                raise OptionError(f"expected the package {name}, found none; install it: pip install {name}")
            importlib.import_module(name)
        if self.needs_gpu and device.type != "cuda":
            raise OptionError("expected a cuda device, found none; run it on a machine with a GPU")


def backward_passes(
    model: Any, training: Training, batches: Batches, autocast: bool = False, held: Held = contextlib.nullcontext
) -> Tensor:
    """Forward and backward of all micro-batches of a step. Returns the last one's loss."""
    loss = torch.empty(0)
    for left in reversed(range(training.micro_batches)):
        tokens = next(batches)
        with held() if left else contextlib.nullcontext():
            with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
                loss = model(input_ids=tokens, labels=tokens).loss
            (loss / training.micro_batches).backward()
    return loss.detach()


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, job: Job, autocast: bool = False
) -> Callable[[Batches], Tensor]:
    """The loop that everybody writes."""
    params, clip = list(model.parameters()), job.training.clip

    def step(batches: Batches) -> Tensor:
        loss = backward_passes(model, job.training, batches, autocast)
        if clip:
            nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def built_in(dtype: torch.dtype) -> Callable[[Job, torch.device], nn.Module]:
    """Builds on the device, in that dtype."""
    return lambda job, device: models.build(job.training, dtype, device)


def built_in_host_memory(dtype: torch.dtype) -> Callable[[Job, torch.device], nn.Module]:
    return lambda job, device: models.build_in_host_memory(job.training, dtype, device)


# --- ours


def _build_ours(job: Job, device: torch.device) -> nn.Module:
    match job.build:
        case "meta":
            return models.build(job.training, torch.float32, torch.device("meta"))
        case "host":
            return models.build_in_host_memory(job.training, torch.float32, device)
    return models.build(job.training, torch.bfloat16, device)


def _prepare(model: nn.Module, job: Job) -> Ready:
    training = job.training
    own = torch.optim.AdamW(model.parameters(), lr=LR)
    keywords: dict[str, Any] = {"micro_batches": training.micro_batches, **job.keywords}
    model, optimizer = overspill.prepare(model, own, **keywords)
    held: Held = model.no_sync  # type: ignore[assignment]

    def step(batches: Batches) -> Tensor:
        loss = backward_passes(model, training, batches, held=held)
        if training.clip:
            optimizer.clip_grad_norm_(training.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Ready(model, step, lambda: _plain(optimizer.report()), lambda: optimizer.report()["plan"])


def _plain(report: dict[str, Any]) -> dict[str, Any]:
    """As JSON knows it."""
    plain = {**report, "plan": json.loads(report["plan"].to_json())}
    found: dict[str, Any] = json.loads(json.dumps(plain, default=str))
    return found


# --- torch alone


def _compute_only(model: nn.Module, job: Job) -> Ready:
    """Forward and backward; gradients are added up within a step, and then dropped."""

    def step(batches: Batches) -> Tensor:
        loss = backward_passes(model, job.training, batches)
        model.zero_grad()
        return loss

    return Ready(model, step)


def _torch(model: nn.Module, job: Job) -> Ready:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    return Ready(model, plain_step(model, optimizer, job, autocast=True))


def _torch_bf16(model: nn.Module, job: Job) -> Ready:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    return Ready(model, plain_step(model, optimizer, job))


OURS = Engine("overspill.prepare", _build_ours, _prepare)
OWN: dict[str, Engine] = {
    "ours": OURS,
    "compute": Engine("bf16, forward and backward only: no update at all", built_in(torch.bfloat16), _compute_only),
    "torch": Engine("all on the GPU: fp32 weights, autocast, fused AdamW", built_in(torch.float32), _torch),
    "torch-bf16": Engine("all on the GPU and in bf16, fused AdamW: no masters", built_in(torch.bfloat16), _torch_bf16),
}
