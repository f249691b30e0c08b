"""What is kept of every parameter, from options: its dtypes, and who updates it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from overspill.config import DTYPES, FORMATS, OWN_STATES, Options
from overspill.errors import OptionError
from overspill.kernels.masters import KEPT
from overspill.kernels.reference import Rule, rule_of
from overspill.plan.plan import Plan
from overspill.specs import ModelSpec, Sharding, StateFormat
from overspill.units.layout import Forms
from overspill.units.states import StateProbe

WIDTHS = {"exact": "fp32", "bf16": "bf16", "compact": "8 bits"}
"""How wide what an update keeps is, by format."""


def update_rule(optimizer: torch.optim.Optimizer, chosen: Options) -> Rule | None:
    """Our own rule for this optimizer's updates; None: its own `step` does them."""
    if chosen.precision == "fp32" or chosen.kernels == "torch":
        return None
    if any(p.is_complex() for group in optimizer.param_groups for p in group["params"]):
        return None
    return rule_of(optimizer)


def forms_of(optimizer: torch.optim.Optimizer, chosen: Options, sharding: Sharding) -> Forms:
    dtype, rule = DTYPES[chosen.precision], update_rule(optimizer, chosen)
    wide = torch.float32 if chosen.micro_batches > 1 else None
    format = StateFormat(master=KEPT.get(dtype), fields=rule.fields if rule else None)
    saying = [group for group in optimizer.param_groups if "states" in group]
    said = {id(p): _format(group["states"]) for group in saying for p in group["params"]}
    if rule is None and {chosen.states, *said.values()} != {"exact"}:
        raise OptionError(
            f"expected states='exact' where the optimizer's own step runs, found {chosen.states!r}; other formats are "
            "for torch's Adam, AdamW, SGD and Adagrad, with precision='bf16' or 'fp16' and kernels='auto'"
        )
    grads = 2 if chosen.update == "delayed" else 0 if rule is not None and _consumes(chosen) else 1
    return Forms(dtype, wide, format, StateProbe(optimizer).bytes_of, sharding, chosen.states, grads, said)


def _consumes(chosen: Options) -> bool:
    """Whether gradients are let go in the backward pass: where that makes their updates due, and no other adds to them
    before, unless they are told to live elsewhere."""
    if chosen.update != "eager" or chosen.micro_batches > 1:
        return False
    if isinstance(chosen.place, Plan):
        return not any(p.grads for unit in chosen.place.model.units for p in unit.params)
    return chosen.place is None or chosen.place.get("grad", "device") == "device"


def _format(name: Any) -> str:
    if name not in FORMATS:
        raise OptionError(
            f"expected 'states' of a parameter group to be one of {FORMATS}, found {name!r}; give one of them"
        )
    return str(name)


def dtypes_of(forms: Forms, chosen: Options, model: ModelSpec) -> dict[str, str]:
    """The dtype of every role, in words: that of most parameters, where their states have several formats."""
    narrow, fields = forms.state.master is not None, forms.state.fields
    counts = _formats(model)
    most = max(counts, key=lambda name: counts[name], default=chosen.states)
    masters = {
        "bf16": "24 bits (the weight and 8)" if most == "compact" else "fp32 (the weight and 16 bits)",
        "fp16": "fp32",
    }
    state = ", ".join(f"{name} {WIDTHS[most]}" for name in fields or ()) or "none"
    if len(counts) > 1:
        each = [f"{name} for {_count(n)}" for name, n in sorted(counts.items(), key=lambda item: -item[1])]
        state += f" ({each[0]} parameters, {', '.join(each[1:])})"
    return {
        "weight": chosen.precision,
        "gradient": f"{chosen.precision}, sums fp32" if narrow else chosen.precision,
        "master": masters.get(chosen.precision, "the weight itself"),
        "state": OWN_STATES if fields is None else state,
    }


def _formats(model: ModelSpec) -> Counter[str]:
    """How many parameters have their states in each format."""
    counts = Counter[str]()
    for p in (p for unit in model.units for p in unit.params if p.trainable):
        counts[p.states] += p.numel
    return counts


def _count(number: int) -> str:
    """As people say it."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return str(number)
