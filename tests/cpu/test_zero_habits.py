"""Ways to treat gradients and weights, over two ranks that see the same batches: the average of two equal gradients is
that gradient, so every way of writing a loop must give the very bits of one process."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill.errors import OptionError, StateError
from overspill.units import stripes
from tests import ranks, small
from tests.reference import differing, weights

Loop = Callable[[Any, Any, Iterator[dict[str, Tensor]]], None]
STEPS = 4


def held(model: Any) -> Any:
    return model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext()


def backward(model: nn.Module, batches: Iterator[dict[str, Tensor]]) -> None:
    small.loss_of(model, next(batches)).backward()


def zeroed(model: Any, optimizer: Any, batches: Any) -> None:
    """Gradients are zeroed, not dropped, and what is held comes on top of the zeros."""
    for _ in range(STEPS):
        with held(model):
            backward(model, batches)
        backward(model, batches)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def only_held(model: Any, optimizer: Any, batches: Any) -> None:
    """Nothing but what is held is there at the step."""
    for _ in range(STEPS):
        with held(model):
            backward(model, batches)
        optimizer.step()
        optimizer.zero_grad()


def looked_at(model: Any, optimizer: Any, batches: Any) -> None:
    """Through views, between two backward passes."""
    for _ in range(STEPS):
        backward(model, batches)
        seen = [p.grad.view(-1) for p in model.parameters()]
        assert all(bool(view.isfinite().all()) for view in seen)
        del seen
        backward(model, batches)
        optimizer.step()
        optimizer.zero_grad()


def changed(model: Any, optimizer: Any, batches: Any) -> None:
    """Scaled while they are zero, overwritten, and scaled again."""
    for _ in range(STEPS):
        backward(model, batches)
        for p in model.parameters():
            p.grad.mul_(0.5)
            p.grad.copy_(p.grad * 2)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        for p in model.parameters():
            p.grad.div_(3)


def used_together(model: Any, optimizer: Any, batches: Any) -> None:
    """One use of the parameters of all blocks at once, right after a step."""
    for _ in range(STEPS):
        backward(model, batches)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            total = torch.stack([block.scale for block in model.blocks]).sum()
            model.blocks[0].scale.mul_(1 + total / 1000)


class Broken(Exception):
    pass


def _broken(gradient: Tensor) -> None:
    raise Broken


def interrupted(model: Any, optimizer: Any, batches: Any) -> None:
    """A backward pass ends in an error of the user's own in the midst of a block, some of whose gradients have come."""
    for _ in range(STEPS):
        logits = model(next(batches)["tokens"])
        hook = model.blocks[1].up.weight.register_hook(_broken)
        with pytest.raises(Broken):
            logits.square().mean().backward()
        hook.remove()
        optimizer.zero_grad()
        backward(model, batches)
        optimizer.step()
        optimizer.zero_grad()


LOOPS: list[Loop] = [zeroed, only_held, looked_at, changed, used_together, interrupted]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def over_ranks(stages: tuple[int, ...], precision: str) -> list[str]:
    import torch.distributed as dist

    import overspill.units.stripes

    dist.init_process_group("gloo")
    overspill.units.stripes.STRIPE = 4096  # type: ignore[misc]
    wrong = []
    for loop in LOOPS:
        blocks = 9
        plain: Any = small.build(blocks=blocks)
        if precision == "fp32":
            loop(plain, adamw(plain), small.batches())
        else:
            plain, optimizer = overspill.prepare(plain, adamw(plain), precision=precision, micro_batches=2, zero=0)
            loop(plain, optimizer, small.batches())
        expected = weights(plain)
        for zero in stages:
            tier = ("device", "host", "nvme", "nvme")[zero]
            with tempfile.TemporaryDirectory() as folder:
                model, optimizer = small.build(blocks=blocks), None
                model, optimizer = overspill.prepare(
                    model,
                    adamw(model),
                    precision=precision,
                    zero=zero,
                    micro_batches=2,
                    place=dict.fromkeys(("weight", "grad", "state"), tier),
                    nvme=folder if tier == "nvme" else None,
                    gpu="64MiB",
                    host="64MiB",
                )
                try:
                    loop(model, optimizer, small.batches())
                except Exception as error:
                    raise AssertionError(f"{loop.__name__} at stage {zero}") from error
                wrong += [f"{loop.__name__} {zero}: {name}" for name in differing(expected, weights(model))]
                overspill.close(model)
    return wrong


def test_any_way_to_write_a_loop() -> None:
    assert ranks.run(over_ranks, 2, (3,), "fp32", timeout=250) == [[], []]


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_any_way_to_write_a_loop_at_every_stage(precision: str) -> None:
    assert ranks.run(over_ranks, 2, (0, 1, 2, 3), precision, timeout=280) == [[], []]


class Normed(nn.Module):
    """Its norm keeps running statistics, so its parameters stay fp32 in every precision; half of it is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))
        self.norm = nn.BatchNorm1d(48)
        for p in self.blocks[1].parameters():
            p.requires_grad_(False)
        self.blocks[2].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.norm(x)


def mixed(precision: str) -> dict[str, Tensor]:
    import torch.distributed as dist

    import overspill.units.stripes

    overspill.units.stripes.STRIPE = 4096  # type: ignore[misc]
    found: dict[str, Tensor] = {}
    alone = "RANK" not in __import__("os").environ
    if not alone:
        dist.init_process_group("gloo")
    for zero in (0, 1, 2, 3):
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            model = Normed()
            model, optimizer = overspill.prepare(
                model,
                adamw(model),
                precision=precision,
                zero=zero,
                place=dict.fromkeys(("weight", "grad", "state"), "nvme"),
                nvme=folder,
                gpu="64MiB",
                host="64MiB",
            )
            for step in range(6):
                x = torch.randn(5, 48, generator=torch.Generator().manual_seed(step))
                model(x).square().mean().backward()
                optimizer.clip_grad_norm_(0.1)
                optimizer.step()
                optimizer.zero_grad()
            found |= {f"{zero} {name}": value for name, value in weights(model).items()}
            overspill.close(model)
        if alone:
            break
    return found


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_units_of_several_kinds(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen and trained, 16 and 32 bits in one unit, on disk: each kind has stripes of its own."""
    # It is changed in this process too, and must be as it was afterwards.
    monkeypatch.setattr(stripes, "STRIPE", stripes.STRIPE)
    expected = mixed(precision)
    for found in ranks.run(mixed, 2, precision, timeout=200):
        for name, value in found.items():
            one = expected[f"0 {name[2:]}"]
            # Norms are put together from shares, so clipping differs by a rounding.
            torch.testing.assert_close(value, one, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def own_gradient() -> str:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = small.build()
    model, _ = overspill.prepare(model, adamw(model), precision="fp32", zero=0)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.raises(StateError) as refused:
        backward(model, small.batches())
    return str(refused.value)


@pytest.mark.full
def test_a_gradient_of_ones_own_is_refused() -> None:
    assert all("would not be averaged" in message for message in ranks.run(own_gradient, 2))


def odd_norm() -> str:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = small.build()
    model, optimizer = overspill.prepare(model, adamw(model), precision="fp32", zero=2)
    batches = small.batches()
    backward(model, batches)
    with pytest.raises(OptionError) as refused:
        optimizer.clip_grad_norm_(1.0, norm_type=-float("inf"))
    # Nothing is lost.
    optimizer.clip_grad_norm_(1.0, norm_type=3.0)
    optimizer.step()
    overspill.settle(model)
    return str(refused.value)


def test_a_norm_that_shares_do_not_tell_is_refused() -> None:
    assert all("found -inf; use norm_type=2.0" in message for message in ranks.run(odd_norm, 2))
