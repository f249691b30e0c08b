"""Other people's engines, each set up as its own documentation does it for one GPU. One process is a group of one rank.

Note [Fair to peers]. What a peer does once per machine (compiling its extension) or what belongs to the process
(connecting the group) is done before its set-up is timed. Their models are built where they want them, and that is not
timed as set-up either.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from overspill.bench.engines import (
    LR,
    OWN,
    Engine,
    Ready,
    backward_passes,
    built_in,
    built_in_host_memory,
    plain_step,
)
from overspill.bench.jobs import Job
from overspill.bench.models import Batches

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
NEAR = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""One rank speaks to nobody, so it needs no name that other machines would find it by."""


def alone() -> None:
    """Be a group of one rank, for those that know nothing else."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(ALONE, MASTER_PORT=str(port))
    for name, value in NEAR.items():
        os.environ.setdefault(name, value)


# --- DeepSpeed


def _load_deepspeed() -> None:
    import deepspeed
    from deepspeed.ops.op_builder import CPUAdamBuilder

    alone()
    CPUAdamBuilder().load()  # compiles it, the first time on a machine
    deepspeed.init_distributed(dist_backend="nccl")


def deepspeed_config(job: Job, stage: int) -> dict[str, Any]:
    """ZeRO-Offload as DeepSpeed's tutorial has it; at stage 3 the parameters are offloaded too."""
    elsewhere = {"device": "cpu", "pin_memory": True}
    zero: dict[str, Any] = {
        "stage": stage,
        "offload_optimizer": elsewhere,
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if stage == 3:
        zero["offload_param"] = elsewhere
    return {
        "train_micro_batch_size_per_gpu": job.training.micro_batch,
        "gradient_accumulation_steps": job.training.micro_batches,
        "gradient_clipping": job.training.clip,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "zero_optimization": zero,
        "steps_per_print": 10**9,
    }


def _deepspeed(model: nn.Module, job: Job, stage: int) -> Ready:
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=deepspeed_config(job, stage)
    )

    def step(batches: Batches) -> Tensor:
        loss = torch.empty(0)
        for _ in range(job.training.micro_batches):
            tokens = next(batches)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
        return loss.detach()

    return Ready(model, step)


# --- FSDP2


def _load_fsdp() -> None:
    alone()
    torch.cuda.set_device(0)
    # Clipping reduces norms that are in host memory.
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl")


def _fsdp(model: nn.Module, job: Job) -> Ready:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    how: dict[str, Any] = {
        "mesh": init_device_mesh("cuda", (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=True),
    }
    for block in reversed([child for m in model.modules() if isinstance(m, nn.ModuleList) for child in m]):
        fully_shard(block, **how)  # inner ones first
    sharded: Any = fully_shard(model, **how)
    move_buffers(model, torch.device("cuda"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    params = list(model.parameters())

    @contextlib.contextmanager
    def held() -> Iterator[None]:
        sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            sharded.set_requires_gradient_sync(True)

    def step(batches: Batches) -> Tensor:
        loss = backward_passes(model, job.training, batches, held=held)
        if job.training.clip:
            nn.utils.clip_grad_norm_(params, job.training.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Ready(model, step)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """FSDP2 offloads parameters only: buffers are the user's to move."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


# --- optimizers that come alone


def _torchao(model: nn.Module, job: Job) -> Ready:
    """It cannot clip: gradients leave for the host in backward."""
    from torchao.optim import CPUOffloadOptimizer

    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=LR, fused=True)

    def step(batches: Batches) -> Tensor:
        loss = backward_passes(model, job.training, batches)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Ready(model, step)


def _flashoptim(model: nn.Module, job: Job) -> Ready:
    from flashoptim import FlashAdamW

    return Ready(model, plain_step(model, FlashAdamW(model.parameters(), lr=LR), job))


PEERS: dict[str, Engine] = {
    "deepspeed": Engine(
        "ZeRO-2, optimizer on the CPU",
        built_in(torch.bfloat16),
        lambda model, job: _deepspeed(model, job, stage=2),
        packages=("deepspeed",),
        needs_gpu=True,
        load=_load_deepspeed,
    ),
    "deepspeed3": Engine(
        "ZeRO-3, optimizer and parameters on the CPU",
        built_in_host_memory(torch.bfloat16),
        lambda model, job: _deepspeed(model, job, stage=3),
        packages=("deepspeed",),
        needs_gpu=True,
        load=_load_deepspeed,
    ),
    "fsdp2": Engine(
        "fully_shard per block, CPUOffloadPolicy, fused AdamW on the CPU",
        built_in_host_memory(torch.float32),
        _fsdp,
        needs_gpu=True,
        load=_load_fsdp,
    ),
    "torchao": Engine(
        "CPUOffloadOptimizer: bf16 states, no clipping",
        built_in(torch.bfloat16),
        _torchao,
        packages=("torchao",),
        needs_gpu=True,
    ),
    "flashoptim": Engine(
        "FlashAdamW on the GPU", built_in(torch.bfloat16), _flashoptim, packages=("flashoptim",), needs_gpu=True
    ),
}

ENGINES: dict[str, Engine] = OWN | PEERS
NAMES = tuple(name for name in ENGINES if name != "ours")
"""What --peers may list."""
