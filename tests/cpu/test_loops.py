"""Every habit of writing a training loop gives the bits of plain PyTorch."""

import copy
import io
import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim import lr_scheduler

import overspill
from tests import small
from tests.both import AWAY, adamw, check, everywhere, grads, losses, prepare, train
from tests.reference import differing, same_bits, weights

STEPS = 5


def clip(model):
    return clip_grad_norm_(model.parameters(), 1.0)


# ---- where gradients are zeroed


def zero_at_start(model, optimizer):
    for loss in losses(model, STEPS):
        optimizer.zero_grad()
        loss.backward()
        clip(model)
        optimizer.step()


def zero_before_forward(model, optimizer):
    for _ in range(STEPS):
        optimizer.zero_grad()
        for loss in losses(model, 1):
            loss.backward()
        clip(model)
        optimizer.step()


def after_step(reset):
    def loop(model, optimizer):
        for i, loss in enumerate(losses(model, STEPS)):
            loss.backward()
            clip(model)
            optimizer.step()
            reset(model, optimizer, i)

    return loop


def by_hand(act):
    def reset(model, optimizer, i):
        for p in model.parameters():
            if p.grad is not None:
                act(p)

    return after_step(reset)


def step_twice(model, optimizer):
    for loss in losses(model, STEPS):
        loss.backward()
        clip(model)
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()


def step_twice_with_a_change_between(model, optimizer):
    for loss in losses(model, STEPS):
        loss.backward()
        optimizer.step()
        clip(model)
        optimizer.step()
        optimizer.zero_grad()


HABITS = {
    "after step": after_step(lambda model, optimizer, i: optimizer.zero_grad()),
    "to zero after step": after_step(lambda model, optimizer, i: optimizer.zero_grad(set_to_none=False)),
    "by the model": after_step(lambda model, optimizer, i: model.zero_grad()),
    "by the model to zero": after_step(lambda model, optimizer, i: model.zero_grad(set_to_none=False)),
    "every second step": after_step(lambda model, optimizer, i: optimizer.zero_grad() if i % 2 else None),
    "to zero every second step": after_step(lambda m, optimizer, i: optimizer.zero_grad(False) if i % 2 else None),
    "never": after_step(lambda model, optimizer, i: None),
    "None by hand": by_hand(lambda p: setattr(p, "grad", None)),
    "deleted by hand": by_hand(lambda p: delattr(p, "grad")),
    "zero_ by hand": by_hand(lambda p: p.grad.zero_()),
    "zero_ of data by hand": by_hand(lambda p: p.grad.data.zero_()),
    "times zero by hand": by_hand(lambda p: p.grad.mul_(0)),
    "zeros by hand": by_hand(lambda p: setattr(p, "grad", torch.zeros_like(p))),
    "before forward": zero_before_forward,
    "between forward and backward": zero_at_start,
    "step twice": step_twice,
    "step twice with a change between": step_twice_with_a_change_between,
}


@everywhere
@pytest.mark.parametrize("habit", HABITS)
def test_zeroing(habit: str, place, tmp_path: Path) -> None:
    check(HABITS[habit], place, tmp_path)


@everywhere
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_zeroed_before_they_were_ever_used(to_none: bool, place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        for loss in losses(model, 3):
            loss.backward(retain_graph=True)
            optimizer.zero_grad(to_none)
            loss.backward()
            optimizer.step()

    check(loop, place, tmp_path)


@everywhere
@pytest.mark.parametrize("reset", [None, True, False], ids=["added", "to none", "to zero"])
def test_a_model_of_one_parameter(reset: bool | None, place, tmp_path: Path) -> None:
    """The gradient that is on its way home is the one that the next backward adds to, or replaces."""

    def build():
        torch.manual_seed(0)
        return nn.Linear(5, 3, bias=False)

    def loop(model, optimizer):
        for i in range(3):
            for j in range(3):
                model(torch.full((2, 5), 0.3 * (i + j))).square().mean().backward()
                if j == 0 and reset is not None:
                    kept = model.weight.grad
                    optimizer.zero_grad(reset)
            optimizer.step()
            optimizer.zero_grad()
        return kept.clone() if reset is not None else None

    check(loop, place, tmp_path, build=build)


# ---- hyperparameters that change

SCHEDULES = {
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=3e-2, total_steps=STEPS + 1),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=4),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda i: 1 / (1 + i)),
}


def scheduled(model, optimizer, scheduler):
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loss in losses(model, STEPS):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            rates.append(scheduler.get_last_lr())
    return rates, weights(model)


def made_before(place, nvme: Path, make):
    model = small.build()
    optimizer = adamw(model)
    scheduler = make(optimizer)
    model, optimizer = overspill.prepare(model, optimizer, place=place, nvme=nvme)
    return model, optimizer, scheduler


@everywhere
@pytest.mark.parametrize("before", [True, False], ids=["before prepare", "after prepare"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers(name: str, before: bool, place, tmp_path: Path) -> None:
    make = SCHEDULES[name]
    model = small.build()
    optimizer = adamw(model)
    expected = scheduled(model, optimizer, make(optimizer))
    if before:
        model, optimizer, scheduler = made_before(place, tmp_path, make)
    else:
        model, optimizer = prepare(place, tmp_path)
        scheduler = make(optimizer)
    found = scheduled(model, optimizer, scheduler)
    assert found[0] == expected[0]
    assert differing(found[1], expected[1]) == []


@everywhere
def test_a_scheduler_made_before_prepare_goes_on_after_close(place, tmp_path: Path) -> None:
    make = SCHEDULES["exponential"]
    model = small.build()
    optimizer = adamw(model)
    scheduler = make(optimizer)
    scheduled(model, optimizer, scheduler)
    expected = scheduled(model, optimizer, scheduler)
    model, optimizer, scheduler = made_before(place, tmp_path, make)
    scheduled(model, optimizer, scheduler)
    user = scheduler.optimizer
    overspill.close(model)
    assert differing(scheduled(model, user, scheduler)[1], expected[1]) == []


@everywhere
def test_a_learning_rate_that_is_a_tensor(place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.7)
        for loss in losses(model, STEPS):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    rate = lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2))  # noqa: E731
    check(loop, place, tmp_path, optimizer=rate)


@everywhere
def test_hyperparameters_changed_right_after_step(place, tmp_path: Path) -> None:
    """The update that is still to come must use those that held at step()."""

    def loop(model, optimizer):
        for i, loss in enumerate(losses(model, STEPS)):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"], group["weight_decay"], group["betas"] = 0.01 / (i + 1), 0.1 * i, (0.5, 0.9)

    check(loop, place, tmp_path)


def in_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Matrices, vectors and one block, each with values of their own; the groups cut through the units."""
    block = {id(p) for p in model.blocks[1].parameters()}
    rest = [p for p in model.parameters() if id(p) not in block]
    groups = [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-2},
        {"params": list(model.blocks[1].parameters()), "betas": (0.8, 0.9)},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


@everywhere
def test_parameter_groups(place, tmp_path: Path) -> None:
    check(train, place, tmp_path, optimizer=in_groups)


@everywhere
def test_an_optimizer_of_some_of_the_parameters(place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        train(model, optimizer)
        return grads(model)

    check(loop, place, tmp_path, optimizer=lambda m: torch.optim.AdamW(m.blocks[1].parameters(), lr=1e-2))


@everywhere
def test_step_hooks_run_once_per_step(place, tmp_path: Path) -> None:
    ran = []

    def with_hooks(model):
        optimizer = adamw(model)
        optimizer.register_step_pre_hook(lambda *_: ran.append("before"))
        optimizer.register_step_post_hook(lambda *_: ran.append("after"))
        return optimizer

    train(*prepare(place, tmp_path, optimizer=with_hooks), steps=2)
    assert ran == ["before", "after"] * 2


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
    model, optimizer = overspill.prepare(model, adamw(model), place=place, nvme=tmp_path, gpu="2MiB")
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


# ---- weights that are read or written between steps


@everywhere
@pytest.mark.parametrize("read", [lambda p: p.data, lambda p: p.detach(), lambda p: p], ids=["data", "detach", "p"])
def test_a_moving_average_of_the_weights(read, place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        average = [torch.zeros_like(p) for p in model.parameters()]
        for _ in range(STEPS):
            train(model, optimizer, 1)
            with torch.no_grad():
                for mean, p in zip(average, model.parameters(), strict=True):
                    mean.lerp_(read(p), 0.1)
        return average

    check(loop, place, tmp_path)


@everywhere
def test_torchs_averaged_model(place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        averaged = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
        for _ in range(STEPS):
            train(model, optimizer, 1)
            averaged.update_parameters(model)
        return list(averaged.module.parameters())

    check(loop, place, tmp_path)


@torch.no_grad()
def copied(p):
    p.copy_(p * 0.5)


@torch.no_grad()
def clamped(p):
    p.clamp_(-0.1, 0.1)


WRITES = {
    "data.clamp_": lambda p: p.data.clamp_(-0.1, 0.1),
    "clamp_": clamped,
    "data =": lambda p: setattr(p, "data", p.data * 0.9),
    "copy_": copied,
    "detach().mul_": lambda p: p.detach().mul_(0.9),
    "init": nn.init.zeros_,
    "numpy": lambda p: p.detach().numpy().__imul__(0.9),
    "part of it": lambda p: p.data.view(-1)[:1].fill_(0.5),
}


@everywhere
@pytest.mark.parametrize("write", WRITES)
def test_weights_written_between_steps(write: str, place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        for _ in range(4):
            train(model, optimizer, 1)
            for p in model.blocks[1].parameters():
                WRITES[write](p)
        return train(model, optimizer, 1)

    check(loop, place, tmp_path)


@everywhere
def test_weights_initialised_anew(place, tmp_path: Path) -> None:
    def anew(module):
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    def loop(model, optimizer):
        torch.manual_seed(3)
        model.apply(anew)
        train(model, optimizer)
        model.apply(anew)
        return train(model, optimizer)

    check(loop, place, tmp_path)


@everywhere
def test_tied_weights_stay_one_object(place, tmp_path: Path) -> None:
    model, optimizer = prepare(place, tmp_path)
    before = list(model.parameters())
    train(model, optimizer)
    assert model.head.weight is model.embedding.weight
    assert [id(p) for p in before] == [id(p) for p in model.parameters()]
    assert same_bits(model.head.weight.detach().clone(), model.embedding.weight.detach().clone())


# ---- the flow of the loop


@everywhere
def test_accumulation_with_no_sync(place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        for _ in range(3):
            if hasattr(model, "no_sync"):
                with model.no_sync():
                    for loss in losses(model, 2):
                        loss.backward()
            else:
                for loss in losses(model, 2):
                    loss.backward()
            train(model, optimizer, 1)

    check(loop, place, tmp_path)


@everywhere
def test_several_forwards_before_their_backwards(place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        for _ in range(3):
            for loss in list(losses(model, 3)):
                loss.backward()
            clip(model)
            optimizer.step()
            optimizer.zero_grad()

    check(loop, place, tmp_path)


@everywhere
def test_two_backwards_of_one_graph(place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        for loss in losses(model, 3):
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    check(loop, place, tmp_path)


@everywhere
def test_a_backward_through_weights_that_a_step_has_changed_is_an_error(place, tmp_path: Path) -> None:
    """As in plain torch, which notices that saved weights were modified."""

    def loop(model, optimizer):
        for loss in losses(model, 1):
            loss.backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

    check(loop, place, tmp_path)


@everywhere
def test_a_gradient_penalty(place, tmp_path: Path) -> None:
    """Backward of backward."""

    def loop(model, optimizer):
        params = list(model.parameters())
        for loss in losses(model, 3):
            first = torch.autograd.grad(loss, params, create_graph=True)
            (loss + 0.1 * sum(g.square().sum() for g in first)).backward()
            optimizer.step()
            optimizer.zero_grad()

    check(loop, place, tmp_path)


@everywhere
def test_evaluation_between_steps(place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        found = []
        for _ in range(3):
            train(model, optimizer, 1)
            model.eval()
            with torch.no_grad():
                found += list(losses(model, 2))
            with torch.inference_mode():
                found += [loss.item() for loss in losses(model, 1)]
            model.train()
        return found

    check(loop, place, tmp_path)


@everywhere
def test_two_models_at_once(place, tmp_path: Path) -> None:
    """As adversarial training does: the second judges what the first makes, and each has its own step."""

    def loop(first, second, steps_first, steps_second):
        stream = small.batches()
        for _ in range(4):
            tokens = next(stream)["tokens"]
            made = first(tokens)
            second.zero_grad()
            (second(tokens) - made.detach()).square().mean().backward()
            steps_second.step()
            first.zero_grad()
            second(made.argmax(-1)).mul(made).mean().backward()
            steps_first.step()
        return {f"{i}.{k}": v for i, m in enumerate((first, second)) for k, v in weights(m).items()}

    plain = [small.build(0), small.build(1)]
    expected = loop(*plain, *map(adamw, plain))
    pairs = [prepare(place, tmp_path, lambda s=s: small.build(s)) for s in (0, 1)]
    found = loop(*(model for model, _ in pairs), *(optimizer for _, optimizer in pairs))
    assert differing(found, expected) == []


class Stop(Exception):
    pass


@everywhere
@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["block", "embedding", "root"])
def test_an_exception_in_forward(where: str, error: type[BaseException], place, tmp_path: Path) -> None:
    """Training goes on after it as if that forward had not been."""

    def loop(model, optimizer):
        module = {"block": model.blocks[2].down, "embedding": model.embedding, "root": model}[where]
        for i in range(6):
            if i % 2:
                handle = module.register_forward_hook(stop)
                with pytest.raises(error):
                    train(model, optimizer, 1)
                handle.remove()
            train(model, optimizer, 1)

    def stop(*_):
        raise error

    check(loop, place, tmp_path)


@everywhere
def test_an_exception_in_backward(place, tmp_path: Path) -> None:
    def stop(gradient):
        raise Stop

    def loop(model, optimizer):
        train(model, optimizer, 2)
        tokens = next(small.batches())["tokens"]
        x = model.blocks[0](model.embedding(tokens))
        x.register_hook(stop)
        with pytest.raises(Stop):
            model.blocks[1](x).sum().backward()
        optimizer.zero_grad()
        train(model, optimizer, 2)

    check(loop, place, tmp_path)


@everywhere
def test_gradients_in_one_flat_buffer_of_the_users(place, tmp_path: Path) -> None:
    def loop(model, optimizer):
        params = list(model.parameters())
        flat = torch.zeros(sum(p.numel() for p in params))
        offset = 0
        for p in params:
            p.grad = flat[offset : offset + p.numel()].view_as(p)
            offset += p.numel()
        seen = []
        for loss in losses(model, 4):
            flat.zero_()
            loss.backward()
            flat.mul_(0.5)
            seen.append(flat.clone())
            optimizer.step()
        return seen

    check(loop, place, tmp_path)
