"""Modules and parameters used in every way that a loop or a forward can: twice, elsewhere, sometimes, never."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.layers import Stack
from tests.side import WIDTH, Side, check, hows


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


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


class TiesAnew(Stack):
    """Ties a weight at every forward, as models do whose heads are built late."""

    def forward(self, x: Tensor) -> Tensor:
        self.blocks[2].weight = self.first.weight
        return super().forward(x)


def tied_by_forward() -> nn.Module:
    model = TiesAnew(linear)
    model(torch.zeros(1, WIDTH))
    return model


class Lists(Stack):
    """Keeps its children's parameters in lists of its own, and uses those."""

    def __init__(self) -> None:
        super().__init__(linear)
        self.weights, self.biases = [b.weight for b in self.blocks], tuple(b.bias for b in self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = torch.tanh(F.linear(x, weight, bias))
        return self.last(self.first(x))


class Coder(nn.Module):
    """Used by methods of its own, never by a call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), linear()

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x @ self.weight))

    def decode(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


class Methods(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.encode(x)
        for block in reversed(self.blocks):
            x = block.decode(x)
        return x


class Remembers(Stack):
    """Carries an activation over from step to step."""

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x + (0 if self.kept is None else self.kept.detach())))
        self.kept = x
        return x


class Edits(Stack):
    """Changes its weights in place before it uses them."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            with torch.no_grad():
                block.weight.clamp_(-0.2, 0.2)
                block.bias.data.mul_(0.99)
            x = torch.tanh(block(x))
        return x


class Learns(Stack):
    """Takes a step of its own inside forward, and computes with what that gives."""

    def forward(self, x: Tensor) -> Tensor:
        weights = [block.weight for block in self.blocks]
        y = x
        for weight in weights:
            y = torch.tanh(y @ weight)
        slopes = torch.autograd.grad(y.square().sum(), weights, create_graph=True)
        for weight, slope in zip(weights, slopes, strict=True):
            x = torch.tanh(x @ (weight - 0.1 * slope))
        return x


class Mapped(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.vmap(block)(x)
        return x


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
    "buffers": Counting,
    "own autograd function": lambda: Stack(Custom),
    "shared blocks": shared,
    "tied late": tied_late,
    "unused": unused,
    "tied by forward": tied_by_forward,
    "lists of parameters": Lists,
    "methods": lambda: Methods(Coder),
    "carried over": lambda: Remembers(linear),
    "edited in forward": lambda: Edits(linear),
    "a step inside forward": lambda: Learns(linear),
    "mapped": lambda: Mapped(linear),
}


@hows
@pytest.mark.parametrize("name", MODELS)
def test_who_uses_what(name: str, how: str, tmp_path: Path) -> None:
    Sometimes.step = 0
    check(Side(MODELS[name]), how, tmp_path)
