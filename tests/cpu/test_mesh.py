"""Meshes of two dimensions, in four processes: ranks that divide the model beside ranks that have copies of it, or
beside tensor-parallel ones. The result is that of one process with all batches, but for the order of sums."""

import itertools
import tempfile

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill.errors import OptionError
from tests import ranks

STEPS, CLIP = 6, 0.5
TOLERANCE = 1e-6
"""Gradients are summed over ranks in another order than over micro-batches, and products over parts of the inner
dimension; AdamW makes steps of the learning rate, here 1e-2, out of any gradient."""
CASES = [*itertools.product((0, 1, 2, 3), ("device", "host", "nvme"))]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(13, 24), nn.Linear(24, 13)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x).relu())
        return out


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)))


def loss_of(model: nn.Module, batch: int, step: int) -> Tensor:
    noise = torch.Generator().manual_seed(100 * batch + step)
    x, y = torch.randn(6, 13, generator=noise), torch.randn(6, 13, generator=noise)
    return ((model(x) - y) ** 2).mean()


def alone(batches: int) -> dict[str, Tensor]:
    """One process, with the batches of all ranks in every step."""
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for batch in range(batches):
            (loss_of(model, batch, step) / batches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def on_mesh(names: tuple[str, str], cases: list[tuple[int, str]]) -> list[dict[str, Tensor]]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    batch = mesh.get_local_rank("shard") if "tp" in names else dist.get_rank()
    found = []
    for zero, tier in cases:
        model: nn.Module = blocks()
        if "tp" in names:
            for block in model.children():
                parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        with tempfile.TemporaryDirectory() as folder:
            model, optimizer = overspill.prepare(
                model,
                torch.optim.AdamW(model.parameters(), lr=1e-2),
                precision="fp32",
                zero=zero,
                mesh=mesh,
                place=dict.fromkeys(("weight", "grad", "state"), tier),
                nvme=folder if tier == "nvme" else None,
                gpu="64MiB",
                host="64MiB",
            )
            for step in range(STEPS):
                loss_of(model, batch, step).backward()
                optimizer.clip_grad_norm_(CLIP)
                optimizer.step()
                optimizer.zero_grad()
            state = model.state_dict()
            found.append({k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()})
            overspill.close(model)
    return found


def check(names: tuple[str, str], cases: list[tuple[int, str]]) -> None:
    expected = alone(2 if "tp" in names else 4)
    by_rank = ranks.run(on_mesh, 4, names, cases)
    for found in by_rank:
        for case, state in zip(cases, found, strict=True):
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=0, atol=TOLERANCE, msg=f"{case} {name}")
            assert all(torch.equal(state[name], found[0][name]) for name in state), f"{case}: unlike {cases[0]}"


@pytest.mark.full
def test_shards_beside_tensor_parallel() -> None:
    check(("shard", "tp"), [(1, "device"), (3, "host")])


@pytest.mark.full
def test_shards_beside_copies() -> None:
    check(("replicate", "shard"), [(2, "nvme"), (3, "device")])


@pytest.mark.full
@pytest.mark.parametrize("names", [("shard", "tp"), ("replicate", "shard")])
def test_every_stage_and_tier(names: tuple[str, str]) -> None:
    check(names, CASES)


def without_mesh() -> str:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    model = parallelize_module(blocks()[0], mesh["tp"], {"up": ColwiseParallel()})
    with pytest.raises(OptionError) as refused:
        overspill.prepare(model, torch.optim.AdamW(model.parameters()), precision="fp32")
    return str(refused.value)


@pytest.mark.full
def test_parts_need_a_mesh() -> None:
    assert all("expected mesh=" in message for message in ranks.run(without_mesh, 4))
