"""Modules and parameters used in every way that a loop or a forward can: twice, elsewhere, sometimes, never."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.layers import Stack
from tests.side import WIDTH, Side, adamw, check, hows, squared

BATCH = (5, WIDTH)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def dropping() -> nn.Module:
    return nn.Sequential(linear(), nn.Dropout(0.3), nn.BatchNorm1d(WIDTH))


# --- who uses what


class Elsewhere(Stack):
    """Weights are used by the root and by neighbours, as functions of what another module owns."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(self.first(x), self.blocks[1].weight)
        for block, other in zip(self.blocks, [*self.blocks[1:], self.first], strict=True):
            x = torch.tanh(block(x)) * other.bias
        return F.linear(x, self.last.weight) + F.linear(x, self.last.weight * 2)


class Sometimes(Stack):
    """Other blocks on every step: none, one, some twice; the last one never."""

    step = 0

    def forward(self, x: Tensor) -> Tensor:
        Sometimes.step += 1
        x = self.first(x)
        for i in [(), (0,), (1, 1), (0, 1, 0)][self.step % 4]:
            x = x + torch.tanh(self.blocks[i](x))
        return self.last(x)


class Experts(Stack):
    """A router of which some experts get no rows."""

    def __init__(self) -> None:
        super().__init__(linear, 6)
        self.router = nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).topk(1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.blocks):
            rows = (chosen[:, 0] == i).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows])
        return self.last(out)


class Counting(Stack):
    """Buffers written in forward: in place, by assignment, and as a view."""

    def __init__(self) -> None:
        super().__init__(linear)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("cache", torch.zeros(2, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        self.cache[self.calls % 2] = x.detach()[0]
        return super().forward(x + self.mean + self.cache[0])


class Square(torch.autograd.Function):
    """Saves its weight, and keeps it as an attribute of the context too."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.kept = weight
        return x @ weight * weight.sum()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        total = (gradient * (x @ weight)).sum()
        return gradient @ ctx.kept.t() * weight.sum(), x.t() @ gradient * ctx.kept.sum() + total


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(x, self.weight)


class OnlyNames(Stack):
    """Keywords only, in and out."""

    def forward(self, *, rows: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        y = super().forward(rows)
        return {"sum": y.sum() * scale, "logits": y, "nothing": None}


def shared() -> nn.Module:
    """The same block three times in a list, and tied to what comes last."""
    model = Stack(linear, 1)
    model.blocks = nn.ModuleList([model.blocks[0], linear(), model.blocks[0], model.blocks[0]])
    return model


def tied_late() -> nn.Module:
    """Ties of modules that were built apart: of weights across units, of a bias and a whole layer."""
    model = Stack(linear, 4)
    model.blocks[2].weight = model.first.weight
    model.blocks[3].bias = model.blocks[0].bias
    model.first.bias = model.blocks[1].bias
    return model


def unused() -> nn.Module:
    """Parameters that never have a gradient: a whole unit, one of a module, one of the root."""
    model = Stack(linear)
    model.spare = nn.ModuleList([linear(), linear()])
    model.blocks[1].extra = nn.Parameter(torch.randn(3))
    model.alone = nn.Parameter(torch.randn(2))
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "weights used elsewhere": lambda: Elsewhere(linear),
    "blocks used sometimes": lambda: Sometimes(linear),
    "experts": Experts,
    "buffers": lambda: Counting(),
    "own autograd function": lambda: Stack(Custom),
    "shared blocks": shared,
    "tied late": tied_late,
    "unused": unused,
}


@hows
@pytest.mark.parametrize("name", MODELS)
def test_who_uses_what(name: str, how: str, tmp_path: Path) -> None:
    Sometimes.step = 0
    check(Side(MODELS[name]), how, tmp_path)


# --- loops


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


ALL = {
    **{k: Side(v) for k, v in MODELS.items()},
    **LOOPS,
    **{
        f"recompute {way} {reentrant}": Side(lambda way=way, r=reentrant: Recomputing(way, r))
        for way in WAYS
        for reentrant in (True, False)
    },
}
_ = adamw
