"""Forward and backward passes in every order and number, plain, recomputed and transformed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.layers import Stack
from tests.side import WIDTH, Side, check, hows, squared

BATCH = (5, WIDTH)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def dropping() -> nn.Module:
    return nn.Sequential(linear(), nn.Dropout(0.3), nn.BatchNorm1d(WIDTH))


class OnlyNames(Stack):
    """Keywords only, in and out."""

    def forward(self, *, rows: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        y = super().forward(rows)
        return {"sum": y.sum() * scale, "logits": y, "nothing": None}


def by_names(model: nn.Module, step: int) -> Tensor:
    out = model(rows=torch.randn(BATCH), scale=0.5)
    return out["sum"] + out["logits"].square().mean()


def two_forwards(model: nn.Module, step: int) -> Tensor:
    return squared(model, step) + squared(model, step) * squared(model, step)


def two_backwards(model: nn.Module, step: int) -> Tensor:
    loss = squared(model, step)
    loss.backward(retain_graph=True)
    return loss * 0.5


def several_losses(model: nn.Module, step: int) -> Tensor:
    out = model(torch.randn(BATCH))
    torch.autograd.backward([out[:, 0].sum(), out[:, 1].square().sum()], retain_graph=True)
    out[:, 2].sum().backward(retain_graph=True, inputs=list(model.blocks[1].parameters()))
    return out.mean()


def through_parts(model: nn.Module, step: int) -> Tensor:
    """Calls the parts itself, in an order of its own, and the whole too."""
    x = model.blocks[2](model.first(torch.randn(BATCH)))
    y = model.last(model.blocks[0](x))
    return y.square().mean() + (squared(model, step) if step % 2 else 0.0)


def evaluating(model: nn.Module, step: int) -> Tensor:
    """Evaluates in between, in each of torch's ways; what that gives counts."""
    model.eval()
    with torch.no_grad():
        before = squared(model, step)
    with torch.inference_mode():
        more = squared(model, step)
    model.train()
    loss = squared(model, step) * (1 + before + more.item())
    with torch.no_grad():
        squared(model, step)
    with torch.inference_mode():
        model.blocks[0](torch.randn(BATCH))
    return loss


def penalty(model: nn.Module, step: int) -> Tensor:
    """Of the gradient of the inputs, as in adversarial training."""
    x = torch.randn(BATCH, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean() + squared(model, step)


def weight_penalty(model: nn.Module, step: int) -> Tensor:
    loss = squared(model, step)
    loss.backward(create_graph=True)
    total = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
    model.zero_grad()
    return loss + total


def functional(model: nn.Module, step: int) -> Tensor:
    """torch.func.functional_call: with the model's own parameters, and with changed ones."""
    own = dict(model.named_parameters())
    x = torch.randn(BATCH)
    changed = {name: p * 0.9 for name, p in own.items()}
    first = torch.func.functional_call(model, own, x).square().mean()
    second = torch.func.functional_call(model, changed, x).square().mean()
    third = torch.func.functional_call(model, {"last.weight": own["last.weight"] * 2}, (x,)).square().mean()
    return first + second + third


def hooked(model: nn.Module, step: int) -> Tensor:
    """Keeps activations by forward hooks, and uses them after the forward."""
    kept: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda m, args, out: kept.append(out)) for block in model.blocks]
    loss = squared(model, step)
    for hook in hooks:
        hook.remove()
    return loss + sum(out.square().mean() for out in kept)


def transformed(model: nn.Module, step: int) -> Tensor:
    """The gradient by torch.func, of the whole and row by row."""
    own = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, (x,)).square().mean()

    x = torch.randn(BATCH)
    whole = torch.func.grad(loss)(own, x)
    rows = torch.func.vmap(torch.func.grad(loss), (None, 0))(own, x)
    factor = sum(g.sum() for g in whole.values()) + sum(g.square().sum() for g in rows.values())
    return squared(model, step) * (1 + factor.detach())


def partial(model: nn.Module, step: int) -> Tensor:
    """The gradient of some parameters, asked for beside the loss."""
    loss = squared(model, step)
    wanted = [model.blocks[1].weight, model.first.bias]
    first, second = torch.autograd.grad(loss, wanted, retain_graph=True)
    return loss * (1 + first.sum().detach() + second.sum().detach())


def first_last(model: nn.Module, step: int) -> Tensor:
    """The second forward's backward comes first."""
    first, second = squared(model, step), squared(model, step)
    second.backward()
    return first


def saved_elsewhere(model: nn.Module, step: int) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return squared(model, step)


def autocast(model: nn.Module, step: int) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return squared(model, step).float()


LOOPS: dict[str, Side] = {
    "two forwards": Side(lambda: Stack(linear), two_forwards),
    "two backwards": Side(lambda: Stack(linear), two_backwards),
    "several losses": Side(lambda: Stack(linear), several_losses),
    "parts": Side(lambda: Stack(linear), through_parts),
    "evaluation": Side(lambda: Stack(dropping), evaluating),
    "gradient penalty": Side(lambda: Stack(linear), penalty),
    "penalty on the gradients of weights": Side(lambda: Stack(linear), weight_penalty),
    "functional call": Side(lambda: Stack(linear), functional),
    "activations kept by hooks": Side(lambda: Stack(linear), hooked),
    "transforms": Side(lambda: Stack(linear), transformed),
    "gradients of some": Side(lambda: Stack(linear), partial),
    "first forward, last backward": Side(lambda: Stack(linear), first_last),
    "saved elsewhere": Side(lambda: Stack(linear), saved_elsewhere),
    "autocast": Side(lambda: Stack(dropping), autocast),
    "keywords only": Side(lambda: OnlyNames(linear), by_names),
}


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@hows
@pytest.mark.parametrize("name", LOOPS)
def test_loops(name: str, how: str, tmp_path: Path) -> None:
    check(LOOPS[name], how, tmp_path)


# --- recompute


class Recomputing(Stack):
    """Dropout, so that the random numbers of the recompute must be those of the forward."""

    def __init__(self, way: str, reentrant: bool) -> None:
        super().__init__(dropping, 4)
        self.way, self.reentrant = way, reentrant

    def again(self, function: Callable[..., Tensor], x: Tensor) -> Tensor:
        return checkpoint(function, x, use_reentrant=self.reentrant)

    def pair(self, x: Tensor, first: int) -> Tensor:
        for block in self.blocks[first : first + 2]:
            x = x + self.again(block, x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.way == "each":
            for block in self.blocks:
                x = x + self.again(block, x)
        elif self.way == "sequential":
            x = checkpoint_sequential(nn.Sequential(*self.blocks), 2, x, use_reentrant=self.reentrant)
        elif self.way == "nested":
            for first in (0, 2):
                x = self.again(lambda x, first=first: self.pair(x, first), x)
        else:
            x = self.again(lambda x: F.linear(x, self.blocks[0][0].weight) + self.blocks[1](x), x)
        return self.last(x)


WAYS = ["each", "sequential", "nested", "function"]


@hows
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])
def test_recompute(reentrant: bool, way: str, how: str, tmp_path: Path) -> None:
    check(Side(lambda: Recomputing(way, reentrant)), how, tmp_path)
