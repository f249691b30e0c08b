"""fp16: gradients are scaled inside of the model and nowhere else, whatever the loop does with it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import overspill
from overspill.errors import StateError
from overspill.runtime.generation import Generation
from tests.places import PLACES

WIDTH = 6


class Net(nn.Module):
    def __init__(self, recompute: bool | None = None, norm: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.recompute = recompute

    def forward(self, x: torch.Tensor, *, deep: bool = False) -> Any:
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        x = torch.tanh(self.norm(x))
        return Holder(x) if deep else x


class Holder:
    """An output of a kind that nobody knows."""

    def __init__(self, x: torch.Tensor) -> None:
        self.inside = {"list": [x]}


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def inputs() -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.float().clone() for p in model.parameters()]


def prepared(nvme: Path, place: str = "device", **options: Any) -> Any:
    model = net(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return overspill.prepare(model, optimizer, precision="fp16", place=PLACES[place], nvme=nvme)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Up to the rounding of fp16, which a missing or doubled scale of 65536 exceeds by far."""
    return torch.allclose(a.float(), b.float(), rtol=0.05, atol=1e-3)


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({}, lambda m, x: m(x).square().mean()),
    "norm with statistics": ({"norm": True}, lambda m, x: m(x).square().mean()),
    "recompute": ({"recompute": False}, lambda m, x: m(x).square().mean()),
    "reentrant recompute": ({"recompute": True}, lambda m, x: m(x.requires_grad_()).square().mean()),
    "fed its own output": ({}, lambda m, x: m(m(x)).square().mean()),
    "two calls": ({}, lambda m, x: m(x).square().mean() + m(x + 1).abs().mean()),
    "deep inside an output": ({}, lambda m, x: m(x, deep=True).inside["list"][0].square().mean()),
}


@pytest.mark.parametrize("place", ["device", "mixed"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_unscaled(name: str, place: str, tmp_path: Path) -> None:
    options, loss_of = CASES[name]
    plain = net(**options)
    loss_of(plain, inputs()).backward()
    model, optimizer = prepared(tmp_path, place, **options)
    loss_of(model, inputs()).backward()
    assert all(map(close, grads(model), grads(plain)))
    optimizer.step()
    assert optimizer.report()["skipped"] == 0
    after = model.state_dict()
    for name, p in plain.named_parameters():
        assert close(after[name], p.detach() - 0.1 * p.grad)


def test_gradients_of_inputs_are_unscaled(tmp_path: Path) -> None:
    x, y = inputs().requires_grad_(), inputs().requires_grad_()
    net()(x).square().mean().backward()
    prepared(tmp_path)[0](y).square().mean().backward()
    assert close(y.grad, x.grad)


def test_autograd_grad_is_unscaled(tmp_path: Path) -> None:
    plain, (model, _) = net(), prepared(tmp_path)
    expected = torch.autograd.grad(plain(inputs()).square().mean(), list(plain.parameters()))
    found = torch.autograd.grad(model(inputs()).square().mean(), list(model.parameters()))
    assert all(map(close, found, expected))


def test_gradients_from_before_count_as_they_are(tmp_path: Path) -> None:
    model = net()
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)
    plain = net()
    plain(inputs()).square().mean().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = overspill.prepare(model, optimizer, precision="fp16")
    model(inputs()).square().mean().backward()
    assert all(close(a, b + 0.5) for a, b in zip(grads(model), grads(plain), strict=True))


def test_what_would_be_scaled_is_refused(tmp_path: Path) -> None:
    model, _ = prepared(tmp_path)
    model.blocks[0].weight.grad = torch.zeros(WIDTH, WIDTH, dtype=torch.float16)
    with pytest.raises(StateError, match=r"leave p\.grad to overspill"):
        model(inputs()).square().mean().backward()
    model, _ = prepared(tmp_path)
    with pytest.raises(StateError, match="or a graph"):
        model(inputs()).square().mean().backward(create_graph=True)


class WideProduct(torch.autograd.Function):
    """Its gradient of a narrow weight is fp32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *made: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return made[0] @ weight, made[0].float().t() @ x.float()


class Wide(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return WideProduct.apply(x, self.weight)


def two_passes(layer: type[nn.Linear], between: Any, place: str, nvme: Path, **keywords: Any) -> list[torch.Tensor]:
    """What the second one leaves."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(layer(WIDTH, WIDTH, bias=False), nn.Tanh(), layer(WIDTH, WIDTH, bias=False))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if keywords:
        model, optimizer = overspill.prepare(model, optimizer, place=PLACES[place], nvme=nvme, **keywords)
    model(inputs()).square().mean().backward()
    kept = between(model, optimizer)
    model(inputs()).square().mean().backward()
    del kept
    return grads(model)


BETWEEN: dict[str, Any] = {
    "added": lambda model, optimizer: None,
    "zeroed": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "dropped": lambda model, optimizer: optimizer.zero_grad(),
    "looked at": lambda model, optimizer: [p.grad.view(-1) for p in model.parameters()],
}


@pytest.mark.parametrize("place", ["device", "mixed"])
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("layer", [nn.Linear, Wide])
def test_whatever_autograd_adds_is_unscaled(layer: type[nn.Linear], between: str, place: str, tmp_path: Path) -> None:
    expected = two_passes(layer, BETWEEN[between], place, tmp_path)
    found = two_passes(layer, BETWEEN[between], place, tmp_path, precision="fp16", micro_batches=2)
    assert all(map(close, found, expected))


@pytest.mark.parametrize("between", BETWEEN)
def test_under_a_dispatch_mode_autograd_adds_as_ever(between: str, tmp_path: Path) -> None:
    """It calls from Python what autograd asked for."""
    expected = two_passes(nn.Linear, BETWEEN[between], "mixed", tmp_path)
    with FlopCounterMode(display=False):
        found = two_passes(nn.Linear, BETWEEN[between], "mixed", tmp_path, precision="fp16", micro_batches=2)
    assert all(map(close, found, expected))


ADDS: dict[str, Any] = {
    "narrow": lambda g: g.add_(torch.full_like(g, 0.5, dtype=torch.float16)),
    "wide": lambda g: g.add_(torch.full_like(g, 0.5, dtype=torch.float32)),
    "by the op itself": lambda g: torch.ops.aten.add_.Tensor(g, torch.full_like(g, 0.5, dtype=torch.float16)),
}


@pytest.mark.parametrize("add", ADDS)
@pytest.mark.parametrize("between", ["added", "zeroed", "dropped", "looked at"])
def test_what_a_hook_adds_counts_as_it_is(between: str, add: str, tmp_path: Path) -> None:
    def add_more(p: torch.Tensor) -> None:
        ADDS[add](p.grad)

    def hooked(model: nn.Module, optimizer: Any) -> Any:
        kept = BETWEEN[between](model, optimizer)
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(add_more)
        return kept

    plain = two_passes(nn.Linear, BETWEEN[between], "device", tmp_path)
    found = two_passes(nn.Linear, hooked, "device", tmp_path, precision="fp16", micro_batches=2)
    assert all(close(a, b + 0.5) for a, b in zip(found, plain, strict=True))


class OwnSum(torch.autograd.Function):
    """Puts the gradient of its weight there by itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
        ctx.layer, ctx.x = layer, x
        return x @ layer.weight.t()

    @staticmethod
    def backward(ctx: Any, *made: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.layer.weight.grad = made[0].t() @ ctx.x
        return made[0] @ ctx.layer.weight.detach(), None


class Summed(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return OwnSum.apply(x, self)


def test_what_a_function_puts_there_by_itself_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), Summed(WIDTH, WIDTH, bias=False))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = overspill.prepare(model, optimizer, precision="fp16")
    for _ in range(2):
        model(inputs()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [record.message.count("'1.weight' is a tensor of yours") for record in caplog.records].count(1) == 1


def test_the_gradient_of_another_parameter_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model, optimizer = overspill.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp16")
    model(inputs()).square().mean().backward()
    model[0].weight.grad = model[1].weight.grad
    optimizer.step()
    assert not any("is a tensor of yours" in record.message for record in caplog.records)


def test_norms_of_wide_gradients_are_those_of_their_bytes() -> None:
    model: Any = nn.Linear(4, 1, bias=False)
    model, _ = overspill.prepare(model, torch.optim.SGD(model.parameters()), precision="fp16")
    spec, factor = overspill.api._engine(model).units[0].spec.params[0], torch.tensor(1 / 1024)
    wide = [Generation(0, 0, spec, torch.ones(4), factor) for _ in range(2)]
    narrow = [Generation(0, 0, spec, torch.ones(4, dtype=torch.float16), factor) for _ in range(2)]
    assert Generation.norms_of(wide, 2.0) == [g.norm(g.value) for g in wide] == [2.0, 2.0]
    assert Generation.norms_of(narrow, 2.0) == [g.norm(g.value) for g in narrow] == [2 / 1024, 2 / 1024]


def halved(y: torch.Tensor) -> None:
    y /= 2


def masked(y: torch.Tensor) -> None:
    y[..., 0] = 0


class Adding(nn.Module):
    """Changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return self.block(x)


@pytest.mark.parametrize("change", [halved, masked, torch.Tensor.relu_])
def test_inputs_and_outputs_may_be_changed_in_place(change: Any) -> None:
    found = []
    for precision in ("fp32", "fp16"):
        torch.manual_seed(0)
        model, before = Adding(), nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, _ = overspill.prepare(model, optimizer, precision=precision, place=PLACES["device"])
        y = model(before(inputs()))
        change(y)
        y.float().square().mean().mul(0.1).backward()
        found.append(grads(before) + grads(model))
    assert all(map(close, *found)) and all(g.abs().max() > 1e-3 for g in found[1])


def test_gradients_put_there_while_all_is_open_are_refused(tmp_path: Path) -> None:
    """As outside: what autograd would add to them is scaled."""
    model, _ = prepared(tmp_path)
    with overspill.full(model):
        for p in model.parameters():
            p.grad = torch.ones_like(p, dtype=torch.float32)
    with pytest.raises(StateError, match="tensor of yours"):
        model(inputs()).sum().backward()
