"""Gradients that are missing, changed, clipped, or the user's own: the bits of plain PyTorch."""

import copy
import io
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import overspill
from tests import small
from tests.both import AWAY, adamw, check, everywhere, grads, losses, prepare, train
from tests.places import PLACES, prepare_tight
from tests.reference import differing, same_bits, weights

STEPS = 5


def clip(model):
    return clip_grad_norm_(model.parameters(), 1.0)


# ---- gradients that are missing, changed, or the user's own


@everywhere
def test_a_unit_that_some_steps_skip(place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        for i in range(8):
            train(model, optimizer, 1, skip=2 if i % 3 else None)
        return counts(model, optimizer)

    check(loop, place, tmp_path)


def counts(model, optimizer):
    """The optimizer's own step counts; None where a parameter has no state."""
    return [optimizer.state[p]["step"].item() if optimizer.state.get(p) else None for p in model.parameters()]


@everywhere
def test_a_unit_that_is_skipped_while_its_gradient_stays(place, tmp_path: Path) -> None:
    """Not zeroed: the old gradient is stepped with again."""

    def loop(model, optimizer):
        for i in range(8):
            for loss in losses(model, 1, skip=2 if i % 3 else None):
                loss.backward()
            clip(model)
            optimizer.step()
            if i % 3:
                optimizer.zero_grad(set_to_none=i % 2 == 0)

    check(loop, place, tmp_path)


@everywhere
def test_parameters_without_gradient_are_left_alone(place, tmp_path: Path) -> None:
    """No decay, no step count; the others of the same unit are updated."""

    def loop(model, optimizer):
        for i, loss in enumerate(losses(model, STEPS)):
            loss.backward()
            if i % 2:
                model.blocks[0].up.weight.grad = None
                model.blocks[3].scale.grad = None
            model.last.bias.grad = None
            optimizer.step()
            optimizer.zero_grad()
        return counts(model, optimizer)

    check(loop, place, tmp_path, optimizer=lambda m: torch.optim.AdamW(m.parameters(), 1e-2, weight_decay=0.3))


class Pages(nn.Module):
    """Parameters of which each takes a page of its own where pages are small."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ParameterList(torch.randn(80, 80) / 9 for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x @ layer
        return x


@everywhere
@pytest.mark.parametrize("missing", [slice(0, 3), slice(3, 6)], ids=["first pages", "last pages"])
def test_a_unit_of_several_pages_of_which_some_have_no_gradient(missing: slice, place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        for i in range(3):
            model(torch.full((2, 80), 0.1 * (i + 1))).square().mean().backward()
            for p in list(model.parameters())[missing]:
                p.grad = None
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters())

    plain = Pages()
    expected = loop(plain, adamw(plain))
    model = Pages()
    model, optimizer = overspill.prepare(model, adamw(model), place=place, nvme=tmp_path, gpu="2MiB", precision="fp32")
    assert [len(unit.pages) for unit in optimizer.report()["plan"].model.units] == [6]
    assert all(map(same_bits, loop(model, optimizer), expected))


@everywhere
def test_a_gradient_of_the_users_own(place, tmp_path: Path) -> None:
    """A plain tensor in p.grad is taken at step(); what becomes of the tensor afterwards does not matter."""

    def loop(model, optimizer):
        for _ in range(4):
            train(model, optimizer, 1)
            own = [torch.full_like(p, 0.01) for p in model.parameters()]
            for p, gradient in zip(model.parameters(), own, strict=True):
                p.grad = gradient
            optimizer.step()
            for gradient in own:
                gradient.fill_(7.0)
            optimizer.zero_grad()

    check(loop, place, tmp_path)


MIXED = {
    "decay": lambda p: p.grad.add_(p, alpha=0.01),
    "several": lambda p: torch._foreach_add_([p.grad], [p], alpha=0.01),
    "product": lambda p: p.grad.mul_(1 + (p.grad * p).sum()),
    "sum": lambda p: p.grad.copy_(p.grad + p),
    "parameter first": lambda p: p.grad.copy_(p + p.grad),
}


@pytest.mark.parametrize("name", MIXED)
def test_a_gradient_and_its_parameter_in_one_operation(name: str, tmp_path: Path) -> None:
    """Whose bytes are elsewhere: its unit was left for another one."""

    def loop(model, optimizer):
        for loss in losses(model, STEPS):
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    MIXED[name](p)
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    plain = small.build()
    expected = loop(plain, adamw(plain))
    model = small.build()
    prepared = prepare_tight(model, adamw(model), PLACES["host"], tmp_path)
    assert not differing(loop(*prepared), expected)


class Named(torch.Tensor):
    """A user's own, which knows of no other kind of tensors."""


@pytest.mark.parametrize("name", ["gradient first", "gradient last"])
def test_a_gradient_and_a_tensor_of_the_users_own_kind(name: str, tmp_path: Path) -> None:
    def loop(model, optimizer):
        (loss,) = losses(model, 1)
        loss.backward()
        found = []
        for p in model.parameters():
            own = torch.full(p.shape, 0.25).as_subclass(Named)
            both = p.grad * own if name == "gradient first" else own * p.grad
            assert type(both) is Named
            found.append(both.as_subclass(torch.Tensor).clone())
        return found

    check(loop, AWAY, tmp_path)


def plus(p: nn.Parameter, own: Tensor) -> None:
    p.grad += own


IN_PLACE = {
    "add_": lambda p, own: p.grad.add_(own),
    "add_ of a parameter's kind": lambda p, own: p.grad.add_(nn.Parameter(own.as_subclass(Tensor), False)),
    "plus": plus,
    "mul_": lambda p, own: p.grad.mul_(own),
    "copy_": lambda p, own: p.grad.copy_(own),
    "foreach": lambda p, own: torch._foreach_add_([p.grad], [own]),
    "assigned": lambda p, own: setattr(p, "grad", torch.add(p.grad, own)),
}


@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE)
@everywhere
def test_a_gradient_changed_by_a_tensor_of_the_users_own_kind(place, change, tmp_path: Path) -> None:
    def loop(model, optimizer):
        for loss in losses(model, STEPS):
            loss.backward()
            for i, p in enumerate(model.parameters()):
                own = torch.full(p.shape, 0.25 / (1 + i)).as_subclass(Named)
                change(p, own)
                # It may change afterwards.
                own.zero_()
            clip(model)
            optimizer.step()
            optimizer.zero_grad()

    check(loop, place, tmp_path)


@everywhere
def test_a_gradient_from_autograd_grad(place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        params = list(model.parameters())
        for loss in losses(model, STEPS):
            for p, gradient in zip(params, torch.autograd.grad(loss, params), strict=True):
                p.grad = gradient
            clip(model)
            optimizer.step()
            optimizer.zero_grad()

    check(loop, place, tmp_path)


CHANGES = {
    "mul_": lambda g: g.mul_(0.5),
    "data.mul_": lambda g: g.data.mul_(0.5),
    "div_": lambda g: g.div_(torch.tensor(3.0)),
    "add_": lambda g: g.add_(0.125),
    "add_ of itself": lambda g: g.add_(g, alpha=0.3),
    "clamp_": lambda g: g.clamp_(-1e-3, 1e-3),
    "copy_": lambda g: g.copy_(torch.full_like(g, 0.25)),
    "fill_": lambda g: g.fill_(0.25),
    "neg_": lambda g: g.neg_(),
    "in place operators": lambda g: g.__imul__(0.5).__itruediv__(3.0).__isub__(0.1),
    "sub_": lambda g: g.sub_(g.mean()),
    "addcmul_": lambda g: g.addcmul_(g, g, value=0.3),
    "masked_fill_": lambda g: g.masked_fill_(g > 0, 0.0),
    "indexed": lambda g: g.__setitem__(g > 0, 0.5),
    "first row": lambda g: g.__setitem__(0 if g.dim() else ..., 0.0),
    "through a view": lambda g: g.view(-1)[:2].mul_(0.3),
    "through data and a view": lambda g: g.data.flatten().neg_(),
    "numpy": lambda g: g.numpy().__imul__(0.3),
    "out": lambda g: torch.mul(g, 0.3, out=g),
    "foreach add": lambda g: torch._foreach_add_([g], [g], alpha=0.3),
}


@everywhere
@pytest.mark.parametrize("change", CHANGES)
def test_gradients_changed_before_and_after_step(change: str, place, tmp_path: Path) -> None:
    """After step() a change reaches the gradient that is kept, but not the update that is due."""

    def loop(model, optimizer):
        seen = []
        for i, loss in enumerate(losses(model, STEPS)):
            loss.backward()
            for p in model.parameters():
                CHANGES[change](p.grad)
            optimizer.step()
            for p in model.parameters():
                CHANGES[change](p.grad)
            seen.append(grads(model))
            seen.append([p.grad.norm() for p in model.parameters()])
            if i % 2:
                optimizer.zero_grad()
        return seen

    check(loop, place, tmp_path)


@everywhere
@pytest.mark.parametrize("to_none", [True, False])
def test_views_of_gradients_that_are_kept(to_none: bool, place, tmp_path: Path) -> None:
    """They show and change the gradient as long as it is the same one, over backward, clipping and zeroing."""

    def loop(model, optimizer):
        kept, seen = [], []
        for i, loss in enumerate(losses(model, STEPS)):
            loss.backward()
            if i == 1:
                kept = [p.grad.view(-1) for p in model.parameters()]
            for view in kept:
                view[:1].add_(0.25)
            seen += [clip(model), *(view.clone() for view in kept)]
            optimizer.step()
            for view in kept:
                view.mul_(0.5)
            seen += grads(model)
            if i % 3 == 2:
                optimizer.zero_grad(to_none)
                seen += [view.clone() for view in kept]
            if i == 4:
                kept.clear()
        return seen

    check(loop, place, tmp_path)


def test_gradients_of_which_no_view_is_left_go_home_again(tmp_path: Path) -> None:
    model, _ = prepare(AWAY, tmp_path)
    for loss in losses(model, 1):
        loss.backward()
    for p in model.parameters():
        p.grad.view(-1).mul_(0.5)
    overspill.settle(model)
    assert sum(p.grad.generation.value is not None for p in model.parameters()) == 1, "all but the last one"


@everywhere
def test_reading_a_gradient(place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        train(model, optimizer, 1)
        for loss in losses(model, 1):
            loss.backward()
        gradients = [p.grad for p in model.parameters()]
        found = [[g.tolist(), g.sum().item(), torch.from_numpy(g.numpy().copy()), g.isnan().any()] for g in gradients]
        found += [[copy.deepcopy(g), g.cpu().clone(), g + 1, g.float().t().clone()] for g in gradients if g.dim() == 2]
        file = io.BytesIO()
        torch.save(gradients, file)
        file.seek(0)
        return [found, torch.load(file)]

    check(loop, place, tmp_path)


@everywhere
def test_a_gradient_kept_from_an_earlier_step(place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        kept = []
        for loss in losses(model, 4):
            loss.backward()
            optimizer.step()
            kept += [p.grad for p in model.parameters()]
            optimizer.zero_grad()
        return [g.clone() for g in kept]

    check(loop, place, tmp_path)


@everywhere
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan], ids=str)
def test_gradients_that_are_not_finite(bad: float, place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        norms = []
        for i, loss in enumerate(losses(model, 4)):
            (loss * (bad if i == 2 else 1)).backward()
            norms.append(clip(model))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    check(loop, place, tmp_path)


# ---- clipping


@everywhere
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("order", [2.0, math.inf, 1.0], ids=str)
def test_clipping_by_norm(order: float, foreach: bool | None, place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        found = []
        for loss in losses(model, 4):
            loss.backward()
            found.append(clip_grad_norm_(model.parameters(), 0.5, order, foreach=foreach))
            found += grads(model)
            optimizer.step()
            optimizer.zero_grad()
        return found

    check(loop, place, tmp_path)


@everywhere
def test_clipping_part_by_part(place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        found = []
        for loss in losses(model, 4):
            loss.backward()
            found += [clip_grad_norm_(block.parameters(), 0.1) for block in model.blocks]
            found.append(clip_grad_norm_(model.parameters(), 0.3))
            optimizer.step()
            optimizer.zero_grad()
        return found

    check(loop, place, tmp_path)


@everywhere
@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_by_value(foreach: bool | None, place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        for loss in losses(model, 4):
            loss.backward()
            clip_grad_value_(model.parameters(), 1e-2, foreach=foreach)
            optimizer.step()
            optimizer.zero_grad()

    check(loop, place, tmp_path)


@everywhere
def test_the_optimizers_own_clipping(place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        norms = []
        for loss in losses(model, 4):
            loss.backward()
            own = getattr(optimizer, "clip_grad_norm_", None)
            norms.append(own(0.5) if own else clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    check(loop, place, tmp_path)


@everywhere
def test_norms_without_clipping(place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        norms = []
        for loss in losses(model, 3):
            loss.backward()
            gradients = [p.grad for p in model.parameters()]
            norms += [get_total_norm(gradients), get_total_norm(gradients, 1.0), *(g.norm() for g in gradients)]
            norms += [(g**2).sum() for g in gradients] + [g.abs().max() for g in gradients]
            optimizer.step()
        return norms

    check(loop, place, tmp_path)


@everywhere
def test_a_norm_that_is_not_finite_can_be_an_error(place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        train(model, optimizer, 2)
        for loss in losses(model, 1):
            (loss * math.inf).backward()
            with pytest.raises(RuntimeError, match="non-finite"):
                clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.zero_grad()
        train(model, optimizer, 2)

    check(loop, place, tmp_path)


@everywhere
def test_a_gradient_scaler(place, tmp_path: Path) -> None:
    """Also a step with an overflow, which the scaler skips."""

    def loop(model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        scales = []
        for i, loss in enumerate(losses(model, STEPS)):
            scaler.scale(loss * (math.inf if i == 3 else 1)).backward()
            if i % 2:
                scaler.unscale_(optimizer)
                clip(model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return scales

    check(loop, place, tmp_path)
