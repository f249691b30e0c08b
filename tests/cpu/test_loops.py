"""Every habit of writing a training loop gives the bits of plain PyTorch."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import overspill
from tests import small
from tests.both import adamw, check, everywhere, grads, losses, prepare, train
from tests.reference import differing, weights

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
    model, optimizer = overspill.prepare(model, optimizer, place=place, nvme=nvme, precision="fp32")
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
def test_backward_into_some_of_the_parameters(place, tmp_path: Path) -> None:
    """As adversarial training does, with a recompute that uses weights on the way."""

    def loop(model, optimizer):
        found = []
        for inputs in (list(model.blocks[1].parameters()), model.last.weight, dict(model.blocks.named_parameters())):
            x = model.embedding(next(small.batches())["tokens"])
            for block in model.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            model.last(x).square().mean().backward(inputs=inputs)
            found.append(grads(model))
            optimizer.step()
            optimizer.zero_grad()
        return found

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
