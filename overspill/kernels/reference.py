"""The update rules in plain torch: one order of operations, which every other executor reproduces bit for bit.

Note [Roundings]: the order is that of torch's own optimizers. Where those fuse a multiplication with an addition, so
does this one: product and sum have one rounding together. All other operations are fp32 with one rounding each,
division as IEEE has it, scalars computed once on the host. So a step is within 2 ulp of max(|p|, |update|) of torch's,
on the same device.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from overspill.errors import ModelError

Hypers = Mapping[str, Any]
Root = Callable[[Tensor], Tensor]
Apply = Callable[..., int]


@dataclass(frozen=True, slots=True)
class Rule:
    """How one optimizer updates, element by element."""

    name: str
    """The name of the rule, for those who carry it out in another way."""
    fields: tuple[str, ...]
    """The fp32 arrays that it keeps, by torch's names."""
    initial: float
    """What those hold before the first step."""
    counts: bool
    """Whether torch keeps a step count in its state."""
    apply: Apply
    """(masters, gradients, fields, hyperparameters, step[, root]): all fp32 [n] and changed in place; steps count from
    1. The root is torch's own, or another one. Returns how many of the fields, from the first on, it changed: what
    hyperparameters do not ask for any more stays as it is, to the bit."""


def rule_of(optimizer: torch.optim.Optimizer) -> Rule | None:
    """The rule that updates as this optimizer does; None where only its own `step` can."""
    groups = optimizer.param_groups
    if any(group.get("differentiable") for group in groups):
        return None
    kind = type(optimizer)
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        most = ("max_exp_avg_sq",) if any(group["amsgrad"] for group in groups) else ()
        return Rule("adam", ("exp_avg", "exp_avg_sq", *most), 0.0, True, _adam)
    if kind is torch.optim.SGD:
        return Rule("sgd", ("momentum_buffer",) if any(g["momentum"] for g in groups) else (), 0.0, False, _sgd)
    if kind is torch.optim.Adagrad:
        initial = {group["initial_accumulator_value"] for group in groups}
        return Rule("adagrad", ("sum",), initial.pop(), True, _adagrad) if len(initial) == 1 else None
    return None


def _number(x: float) -> float:
    """A scalar as fp32 has it."""
    return torch.tensor(x, dtype=torch.float32, device="cpu").item()


AT_A_TIME = {"cpu": 1 << 14, "cuda": 1 << 16}
"""Elements: few, for what is in between is in fp64, and the caches of a CPU are to hold it; not so few where each
operation has to be launched."""


def _fused_(a: Tensor, b: Tensor, c: Tensor | float) -> Tensor:
    """a += b * c, rounded once; see Note [Roundings]."""
    count = AT_A_TIME[a.device.type]
    factors = c.split(count) if isinstance(c, Tensor) else itertools.repeat(_number(c))
    for each in zip(a.split(count), b.split(count), factors, strict=False):
        _fuse_(*each)
    return a


def _fuse_(a: Tensor, b: Tensor, c: Tensor | float) -> None:
    """In fp64 the product is exact and the sum is not; so what is lost of the sum stays in its last bit, which rounding
    to fp32 then sees. (Sum and error: Knuth; last bit: Boldo and Melquiond.)"""
    product, a_ = b.double().mul_(c), a.double()
    total = product + a_
    of_a = total - product
    a_.sub_(of_a)
    lost = product.sub_(torch.sub(total, of_a, out=of_a)).add_(a_)
    del of_a, a_
    bits = total.view(torch.int64)
    # Cut instead of rounded, and odd if anything was cut.
    bits.add_(total * lost < 0, alpha=-1).bitwise_or_(lost.abs_() > 0)
    a.copy_(total)


def torch_root(a: Tensor) -> Tensor:
    """torch's own, as its optimizers use it. On cuda it is correctly rounded; on the CPU, where torch leaves it to a
    math library, about one of 150 results is off by an ulp, and only following it keeps the bound of the note."""
    return a.sqrt()


def ieee_root(a: Tensor) -> Tensor:
    """Correctly rounded on every device: the root of a float, in fp64, is never so near to the middle of two floats
    that rounding it errs."""
    return a.double().sqrt_().float()


def _divide_(a: Tensor, scalar: float) -> Tensor:
    """A true division: on cuda torch would multiply by the inverse of a number."""
    return a.div_(a.new_full((), scalar))


def _toward_(a: Tensor, b: Tensor, weight: float) -> None:
    """a += weight * (b - a), or from the other end where that is nearer, as torch.lerp has it."""
    if weight < 0.5:
        _fused_(a, b.sub(a), weight)
    else:
        way = b.sub(a)
        _fused_(a.copy_(b), way, weight - 1)


def need_field(field: str, fields: Sequence[object], count: int) -> None:
    """Refuse hyperparameters that ask for more than is kept."""
    if len(fields) < count:
        raise ModelError(
            f"expected an optimizer that keeps what it kept at prepare, found that it wants {field!r} now; set such "
            "hyperparameters before prepare, or close the model and prepare it anew"
        )


def check_fields(rule: Rule, h: Hypers) -> None:
    """As `need_field`, of all that a rule may be asked for."""
    if rule.name == "adam" and h["amsgrad"]:
        need_field("max_exp_avg_sq", rule.fields, 3)
    if rule.name == "sgd" and h["momentum"]:
        need_field("momentum_buffer", rule.fields, 1)


def _adam(p: Tensor, g: Tensor, fields: Sequence[Tensor], h: Hypers, step: int, root_of: Root = torch_root) -> int:
    lr, (beta1, beta2), decay = float(h["lr"]), map(float, h["betas"]), float(h["weight_decay"])
    if h["maximize"]:
        g.neg_()
    if decay and h.get("decoupled_weight_decay"):
        p.mul_(1 - lr * decay)
    elif decay:
        _fused_(g, p, decay)
    m, v = fields[:2]
    _toward_(m, g, 1 - beta1)
    _fused_(v.mul_(beta2), g.mul(1 - beta2), g)
    if h["amsgrad"]:
        need_field("max_exp_avg_sq", fields, 3)
        v = torch.maximum(fields[2], v, out=fields[2])
    size, root = lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
    p.add_(m.mul(-size).div_(_divide_(root_of(v), root).add_(float(h["eps"]))))
    return 3 if h["amsgrad"] else 2


def _sgd(p: Tensor, g: Tensor, fields: Sequence[Tensor], h: Hypers, step: int, root_of: Root = torch_root) -> int:
    lr, momentum, decay = float(h["lr"]), float(h["momentum"]), float(h["weight_decay"])
    if h["maximize"]:
        g.neg_()
    if decay:
        _fused_(g, p, decay)
    if momentum:
        need_field("momentum_buffer", fields, 1)
        buffer = fields[0]
        if step == 1:
            buffer.copy_(g)
        else:
            _fused_(buffer.mul_(momentum), g, 1 - float(h["dampening"]))
        g = _fused_(g, buffer, momentum) if h["nesterov"] else buffer
    _fused_(p, g, -lr)
    return 1 if momentum else 0


def _adagrad(p: Tensor, g: Tensor, fields: Sequence[Tensor], h: Hypers, step: int, root_of: Root = torch_root) -> int:
    decay, total = float(h["weight_decay"]), fields[0]
    lr = float(h["lr"]) / (1 + (step - 1) * float(h["lr_decay"]))
    if h["maximize"]:
        g.neg_()
    if decay:
        _fused_(g, p, decay)
    _fused_(total, g, g)
    p.add_(g.mul(-lr).div_(root_of(total).add_(float(h["eps"]))))
    return 1
