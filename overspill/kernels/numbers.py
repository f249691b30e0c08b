"""What a rule is told beside arrays: numbers, each computed once on the host, and how it goes. The same for the native
library (csrc/native.h has their names) and for Triton kernels, in the order of both."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from overspill.kernels.reference import Hypers, need_field


class Numbers(NamedTuple):
    scalars: tuple[float, ...]
    flags: tuple[int, ...]


def _adam(h: Hypers, step: int, fields: Sequence[Any]) -> Numbers:
    lr, (beta1, beta2), decay = float(h["lr"]), map(float, h["betas"]), float(h["weight_decay"])
    if h["amsgrad"]:
        need_field("max_exp_avg_sq", fields, 3)
    size, root = lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
    scalars = (1 - lr * decay, decay, 1 - beta1, (1 - beta1) - 1, beta2, 1 - beta2, -size, root, float(h["eps"]))
    kind = 0 if not decay else 1 if h.get("decoupled_weight_decay") else 2
    return Numbers(scalars, (kind, 1 - beta1 < 0.5, bool(h["amsgrad"])))


def _sgd(h: Hypers, step: int, fields: Sequence[Any]) -> Numbers:
    lr, momentum, decay = float(h["lr"]), float(h["momentum"]), float(h["weight_decay"])
    if momentum:
        need_field("momentum_buffer", fields, 1)
    scalars = (decay, momentum, 1 - float(h["dampening"]), -lr)
    return Numbers(scalars, (bool(decay), bool(momentum), step == 1, bool(h["nesterov"])))


def _adagrad(h: Hypers, step: int, fields: Sequence[Any]) -> Numbers:
    decay, lr = float(h["weight_decay"]), float(h["lr"]) / (1 + (step - 1) * float(h["lr_decay"]))
    return Numbers((decay, -lr, float(h["eps"])), (bool(decay),))


NUMBERS: dict[str, Callable[[Hypers, int, Sequence[Any]], Numbers]] = {"adam": _adam, "sgd": _sgd, "adagrad": _adagrad}
"""(hyperparameters, step, fields), by the name of the rule; as kernels/reference.py has them."""
