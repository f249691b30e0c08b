"""Layers of every sort, each from rows of WIDTH to rows of WIDTH: what plain torch trains, in miniature."""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.side import WIDTH


class Stack(nn.Module):
    """Three layers of a kind, one unit each, between a first and a last one."""

    def __init__(self, make: Callable[[], nn.Module], count: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(count))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.last(x)


class Apply(nn.Module):
    """A torch layer behind a function that shapes its inputs, and one that makes rows of its output."""

    def __init__(self, layer: nn.Module, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.layer, x)


def _image(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x.view(-1, 2, 2, 2)).flatten(1)[:, :WIDTH]


def _line(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x.view(-1, 2, 4)).flatten(1)[:, :WIDTH]


def _tokens(layer: nn.Module, x: Tensor) -> Tensor:
    return layer((x > 0).long())


def _attend(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x, x, x)[0]


def _both(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x, x)


TORCH: dict[str, Callable[[], nn.Module]] = {
    "conv1d": lambda: Apply(nn.Conv1d(2, 4, 3, padding=1), _line),
    "conv2d": lambda: Apply(nn.Conv2d(2, 4, 3, padding=1), _image),
    "grouped conv": lambda: Apply(nn.Conv2d(2, 4, 3, padding=1, groups=2), _image),
    "channels last": lambda: Apply(nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last), _image),
    "transposed conv": lambda: Apply(nn.ConvTranspose2d(2, 3, 2), _image),
    "conv3d": lambda: Apply(nn.Conv3d(1, 4, 2), lambda m, x: m(x.view(-1, 1, 2, 2, 2)).flatten(1).repeat(1, 2)),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "group norm": lambda: nn.GroupNorm(2, WIDTH),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "batch norm of images": lambda: Apply(nn.BatchNorm2d(2), _image),
    "instance norm": lambda: Apply(nn.InstanceNorm1d(2, affine=True, track_running_stats=True), _line),
    "prelu": lambda: nn.PReLU(WIDTH),
    "bilinear": lambda: Apply(nn.Bilinear(WIDTH, WIDTH, WIDTH), _both),
    "embedding bag": lambda: Apply(nn.EmbeddingBag(4, WIDTH), _tokens),
    "padded embedding": lambda: Apply(nn.Embedding(4, WIDTH, padding_idx=1), lambda m, x: m((x > 0).long()).sum(1)),
    "scaled embedding": lambda: Apply(
        nn.Embedding(4, WIDTH, scale_grad_by_freq=True, max_norm=0.5), lambda m, x: m((x > 0).long()).sum(1)
    ),
    "attention": lambda: Apply(nn.MultiheadAttention(WIDTH, 2), _attend),
    "attention of other sizes": lambda: Apply(
        nn.MultiheadAttention(WIDTH, 2, kdim=4, vdim=4, add_bias_kv=True, dropout=0.1),
        lambda m, x: m(x, x[:, :4], x[:, 4:])[0],
    ),
    "transformer encoder layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 13, dropout=0.1),
    "transformer encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 13), 2),
    "transformer": lambda: Apply(nn.Transformer(WIDTH, 2, 1, 2, 13, dropout=0.1), _both),
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.AlphaDropout(0.1)),
    "lazy linear": lambda: _materialised(nn.LazyLinear(WIDTH)),
}


def _materialised(layer: nn.Module) -> nn.Module:
    layer(torch.zeros(2, WIDTH))
    return layer


# --- parametrizations


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.triu()


class Gated(nn.Module):
    """A parametrization with a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.add_(1)
        return x * self.gate.sigmoid()


def _parametrized(*kinds: type[nn.Module]) -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    for kind in kinds:
        parametrize.register_parametrization(layer, "weight", kind())
    return layer


class Cached(nn.Module):
    """Computes a parametrized weight once and uses it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = _parametrized(Symmetric)

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return self.layer(torch.tanh(self.layer(x)))


def _removed() -> nn.Module:
    layer = _parametrized(Symmetric)
    parametrize.remove_parametrizations(layer, "weight")
    return layer


PARAMETRIZED: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "weight norm of all": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH), dim=None),
    "old weight norm": lambda: nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "old weight norm of a conv": lambda: Apply(nn.utils.weight_norm(nn.Conv2d(2, 4, 3, padding=1), dim=1), _image),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    "orthogonal by cayley": lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH), orthogonal_map="cayley"),
    "own": lambda: _parametrized(Symmetric),
    "own, with a parameter": lambda: _parametrized(Gated),
    "two": lambda: _parametrized(Symmetric, Gated),
    "cached": Cached,
    "removed": _removed,
}


# --- parameters of odd shapes and layouts


class Odd(nn.Module):
    """Multiplies with a matrix of any layout; every other parameter only scales."""

    def __init__(self, *params: Tensor, use: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.params = nn.ParameterList(nn.Parameter(p) for p in params)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        if self.use is not None:
            return self.use(x, *self.params)
        for p in self.params:
            x = x @ p if p.dim() == 2 else x * p.sum()
        return x


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({"a": nn.Parameter(torch.randn(WIDTH, WIDTH)), "b": torch.ones(WIDTH)})
        self.weights["late"] = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights["a"] * self.weights["b"] + self.weights["late"]


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


class Whole(nn.Module):
    """A parameter of integers or of truths, which has no gradient."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.arange(WIDTH).to(dtype), requires_grad=False)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.mask


class Late(nn.Module):
    """Registers a parameter, and drops another, after it was built."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.gone = nn.Parameter(torch.ones(3))
        del self.gone
        self.register_parameter("none", None)
        self.layer.register_parameter("extra", nn.Parameter(torch.randn(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.layer.extra


ODD: dict[str, Callable[[], nn.Module]] = {
    "transposed": lambda: Odd(torch.randn(WIDTH, WIDTH).t()),
    "permuted": lambda: Odd(torch.randn(2, WIDTH, 3).permute(1, 2, 0)),
    "part of another": lambda: Odd(torch.randn(3, WIDTH, WIDTH)[1]),
    "expanded": lambda: Odd(torch.randn(1, WIDTH).expand(WIDTH, WIDTH).clone()),
    "scalar": lambda: Odd(torch.tensor(1.5), torch.randn(WIDTH, WIDTH)),
    "one element": lambda: Odd(torch.randn(1, 1, 1)),
    "empty": lambda: Odd(torch.zeros(0), torch.randn(WIDTH, WIDTH), torch.zeros(3, 0), use=lambda x, a, b, c: x @ b),
    "empty, used": lambda: Odd(
        torch.zeros(0, WIDTH), torch.randn(WIDTH, WIDTH), use=lambda x, a, b: x @ torch.cat([b, a])
    ),
    "complex": Complex,
    "integers": lambda: Whole(torch.long),
    "truths": lambda: Whole(torch.bool),
    "named": Named,
    "late": Late,
}


# --- what modules return and take


Pair = namedtuple("Pair", "main side")


@dataclass
class Result:
    main: Tensor
    more: dict[str, Any]


class Returns(nn.Module):
    """Hands its result on in a container."""

    def __init__(self, wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.inner = nn.ModuleList([_Wraps(wrap), _Wraps(wrap)])
        self.unwrap = unwrap

    def forward(self, x: Tensor) -> Tensor:
        for inner in self.inner:
            x = self.unwrap(inner(value=x))
        return x


class _Wraps(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.wrap = wrap

    def forward(self, *, value: Tensor) -> Any:
        return self.wrap(self.layer(value))


RETURNS: dict[str, Callable[[], nn.Module]] = {
    "dict": lambda: Returns(lambda y: {"a": {"b": [y, 3]}}, lambda out: out["a"]["b"][0]),
    "tuple": lambda: Returns(lambda y: (None, (y, y.sum())), lambda out: out[1][0] + out[1][1]),
    "namedtuple": lambda: Returns(lambda y: Pair(y, "text"), lambda out: out.main),
    "dataclass": lambda: Returns(lambda y: Result(y, {"half": y / 2}), lambda out: out.main + out.more["half"]),
}
EVERY = {**TORCH, **PARAMETRIZED, **ODD, **RETURNS}
