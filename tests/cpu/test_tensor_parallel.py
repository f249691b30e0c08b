"""Models of DTensors (torch's tensor parallelism), in two processes: as the same model with its plain optimizer."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import overspill
from overspill.errors import ModelError
from overspill.runtime.door import keeper_of
from overspill.runtime.handle import GradHandle
from tests.places import PLACES, prepare_tight

WORLD, WORDS = 2, 64


def two_processes(work: Callable[..., None], folder: Path, *args: Any) -> None:
    mp.spawn(_process, (work, str(folder), args), nprocs=WORLD)  # type: ignore[attr-defined,no-untyped-call]


def _process(rank: int, work: Callable[..., None], folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    try:
        work(Path(tempfile.mkdtemp(dir=folder)), *args)
    finally:
        dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(self.up(x).relu())
        return found


def mlp() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def llama() -> nn.Module:
    """With its norms sequence-parallel, whose gradients autograd leaves unsummed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=WORDS, num_hidden_layers=2, use_cache=False, attn_implementation="eager", **sizes)
    model: Any = LlamaForCausalLM(config)
    mesh, whole, rows = init_device_mesh("cpu", (WORLD,)), Replicate(), Shard(1)
    layer: dict[str, Any] = {f"self_attn.{n}_proj": ColwiseParallel() for n in "qkv"}
    layer |= {f"mlp.{n}_proj": ColwiseParallel() for n in ("gate", "up")}
    layer |= {n: RowwiseParallel(output_layouts=rows) for n in ("self_attn.o_proj", "mlp.down_proj")}
    layer |= {n: SequenceParallel() for n in ("input_layernorm", "post_attention_layernorm")}
    layer["mlp"] = PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(whole,))
    layer["self_attn"] = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": rows}, desired_input_kwarg_layouts={"hidden_states": whole}
    )
    for each in model.model.layers:
        parallelize_module(each, mesh, layer)
    ends: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=rows),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=rows, output_layouts=whole),
    }
    return parallelize_module(model, mesh, ends)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, nn.Sequential):
        found: Tensor = model(torch.randn(4, 8, generator=generator)).square().mean()
        return found
    words = torch.randint(0, WORDS, (2, 8), generator=generator)
    # The model itself sees only its part of the sequence.
    mask = torch.full((2, 1, 8, 8), -1e9).triu(1)
    found = model(input_ids=words, labels=words, position_ids=torch.arange(8)[None], attention_mask=mask).loss
    return found


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> list[float]:
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        add_partial_sums(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        seen += [loss.item(), full(norm).item()]
    return seen


def add_partial_sums(model: nn.Module) -> None:
    """overspill adds up the gradients of replicated parameters when they arrive; plain torch in every use of them, and
    for a norm in another order."""
    for p in model.parameters():
        gradient: Any = p.grad
        if isinstance(p, DTensor) and gradient.placements != p.placements:
            p.grad = gradient.redistribute(placements=p.placements)


def full(t: Any) -> Tensor:
    found: Tensor = t.full_tensor() if isinstance(t, DTensor) else t
    return found


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(full(a), full(b)) for a, b in zip(one, other, strict=True))


# --- what the processes do


def trains_as_plain(folder: Path, build: Callable[[], nn.Module]) -> None:
    plain = build()
    plain_optimizer = adamw(plain)
    expected = train(plain, plain_optimizer)
    for place in PLACES.values():
        model = build()
        given = adamw(model)
        kinds = [type(p) for p in model.parameters()]
        model, optimizer = prepare_tight(model, given, place, folder)
        assert train(model, optimizer) == expected
        states = model.state_dict()
        assert all(isinstance(t, DTensor) for t in states.values())
        assert same(states.values(), plain.state_dict().values())
        if place["weight"] != "device":
            keeper: Any = keeper_of(next(model.parameters()))
            assert not all(unit.here for unit in keeper.units)
            assert not any(unit.viewed for unit in keeper.units)
        overspill.close(model)
        assert [type(p) for p in model.parameters()] == kinds
        assert same(model.parameters(), plain.parameters())
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert same(given.state[p].values(), plain_optimizer.state[q].values())
        # Both go on as plain models.
        assert train(model, given, 1)[0] == loss_of(plain, 0).item()


def is_used_as_plain(folder: Path) -> None:
    plain: Any = mlp()
    model: Any = mlp()
    model, optimizer = prepare_tight(model, adamw(model), PLACES["host"], folder)
    p: Any = model[0].up.weight
    q: Any = plain[0].up.weight
    assert isinstance(p, DTensor) and isinstance(p, nn.Parameter) and p.placements == q.placements
    assert torch.equal(p.to_local(), q.to_local())
    assert same([p, p.sum(), p.redistribute(placements=[Replicate()])], [q, q.sum(), q])
    with torch.no_grad():
        for each in (p, q):
            each.mul_(2)
            each.to_local().add_(1)
    for other in model.parameters():
        other.sum()
    assert same([p], [q])
    for seed in (0, 1):
        loss_of(model, seed).backward()
        loss_of(plain, seed).backward()
        assert isinstance(p.grad, DTensor) and isinstance(p.grad._local_tensor, GradHandle)
        assert same([p.grad, p.grad.norm(), overspill.grad(p)], [q.grad, q.grad.norm(), q.grad])
    gradients: list[Any] = [p.grad, q.grad]
    for gradient in gradients:
        gradient.mul_(0.5)
        gradient.to_local().add_(1)
        gradient[0].zero_()
    assert same([p.grad], [q.grad])
    optimizer.zero_grad(set_to_none=False)
    assert full(gradients[0].sum()).item() == 0
    optimizer.zero_grad()
    assert p.grad is None
    loss = loss_of(model, 0)
    for other in model.parameters():
        other.sum()
    loss.backward()


def keeps_masters(folder: Path) -> None:
    seen = []
    for place in PLACES.values():
        model = llama()
        model, optimizer = prepare_tight(model, adamw(model), place, folder, precision="bf16")
        losses = train(model, optimizer)
        weights, states = model.state_dict(), optimizer.state_dict()
        seen.append((losses, [full(t) for t in weights.values()]))
        assert {t.dtype for t in weights.values()} == {torch.float32}
        assert next(model.parameters()).dtype == torch.bfloat16
        following = train(model, optimizer, 2)
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        assert train(model, optimizer, 2) == following
        overspill.close(model)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(losses == seen[0][0] and same(weights, seen[0][1]) for losses, weights in seen)


def refuses_whole_matrices(folder: Path) -> None:
    model = mlp()
    with pytest.raises(ModelError, match="every element by itself"):
        overspill.prepare(model, torch.optim.Adafactor(model.parameters()))
    with pytest.raises(ModelError, match=r"every element by itself.*found .*OfMyOwn.*use AdamW"):
        overspill.prepare(model, OfMyOwn(model.parameters()), separable=True)


class OfMyOwn(torch.optim.AdamW):
    """Whether it looks at whole matrices nobody can tell."""


# ---


@pytest.mark.parametrize("build", [mlp, pytest.param(llama, marks=pytest.mark.full)])
def test_trains_as_the_plain_model_does(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    two_processes(trains_as_plain, tmp_path, build)


def test_parameters_and_gradients_are_dtensors(tmp_path: Path) -> None:
    two_processes(is_used_as_plain, tmp_path)


@pytest.mark.full
def test_masters_of_parts(tmp_path: Path) -> None:
    two_processes(keeps_masters, tmp_path)


@pytest.mark.full
def test_optimizers_of_whole_matrices_are_refused(tmp_path: Path) -> None:
    two_processes(refuses_whole_matrices, tmp_path)
