"""Stages on cuda: one rank over nccl, and two that share the GPU over gloo."""

import itertools
import os
import tempfile

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill.program import Kind
from tests import ranks, small
from tests.reference import Recipe, differing, train, weights

pytestmark = pytest.mark.gpu

TIERS = ("device", "host", "nvme")
CASES = [*itertools.product((0, 1, 2, 3), TIERS)]
RECIPE = Recipe(steps=8, clip=2.5)
PLAIN = Recipe(steps=8)


def repeatable() -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.cuda.set_device(0)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def prepared(zero: int, tier: str, folder: str, **more: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = small.build().cuda()
    place = dict.fromkeys(("weight", "grad", "state"), tier)
    nvme = folder if tier == "nvme" else None
    return overspill.prepare(
        model,
        adamw(model),
        zero=zero,
        place=place,
        nvme=nvme,
        gpu="2GiB",
        host="256MiB",
        **{"precision": "fp32", **more},
    )


def over_nccl(cases: list[tuple[int, str]]) -> tuple[str, list[str]]:
    import torch.distributed as dist

    repeatable()
    plain = small.build().cuda()
    expected = train(plain, adamw(plain), small.batches(), RECIPE, small.loss_of)
    wrong: list[str] = []
    backend = ""
    half: dict[str, Tensor] = {}
    for zero, tier in cases:
        with tempfile.TemporaryDirectory() as folder:
            model, optimizer = prepared(zero, tier, folder)
            backend = str(dist.get_backend())
            losses = train(model, optimizer, small.batches(), RECIPE, small.loss_of)
            wrong += [f"{zero} {tier}: {name}" for name in differing(weights(plain), weights(model))]
            wrong += [f"{zero} {tier}: losses"] if losses != expected else []
            overspill.close(model)
            model, optimizer = prepared(zero, tier, folder, precision="bf16")
            train(model, optimizer, small.batches(), RECIPE, small.loss_of)
            half = half or weights(model)
            wrong += [f"bf16 {zero} {tier}: {name}" for name in differing(half, weights(model))]
            overspill.close(model)
    return backend, wrong


def test_one_rank_over_nccl_runs_all_stages() -> None:
    [(backend, wrong)] = ranks.run(over_nccl, 1, CASES, timeout=400)
    assert "nccl" in backend
    assert not wrong


def sharing_the_gpu(cases: list[tuple[int, str]], delays: bool) -> list[str]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    repeatable()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    plain = small.build().cuda()
    expected = train(DistributedDataParallel(plain), adamw(plain), small.batches(rank), PLAIN, small.loss_of)
    wrong: list[str] = []
    for zero, tier in cases:
        with tempfile.TemporaryDirectory() as folder:
            model, optimizer = prepared(zero, tier, folder)
            if delays and rank == 1:
                lanes = overspill.api._engine(model).executor.lanes
                lanes.delays.update(dict.fromkeys(Kind, 0.002))
            losses = train(model, optimizer, small.batches(rank), PLAIN, small.loss_of)
            wrong += [f"{zero} {tier}: {name}" for name in differing(weights(plain), weights(model))]
            wrong += [f"{zero} {tier}: losses"] if losses != expected else []
            overspill.close(model)
    return wrong


def test_two_ranks_share_the_gpu() -> None:
    assert ranks.run(sharing_the_gpu, 2, CASES, False, timeout=400) == [[], []]


def test_delays_on_one_rank() -> None:
    assert ranks.run(sharing_the_gpu, 2, [(1, "host"), (2, "device"), (3, "host"), (3, "nvme")], True, timeout=400) == [
        [],
        [],
    ]
