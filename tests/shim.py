"""Stand-ins for what this tree does not have yet: `weights=`, bf16, `overspill.save`, `load` and `export`.

To be deleted, with the fixture `whole_api` in tests/conftest.py, once they are there. As a module it runs the command
line with them: `python -m tests.shim train ...`.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

import overspill

PLAIN = (int, float, str, bool, type(None), torch.Tensor)
prepare, plan = overspill.prepare, overspill.plan


def check_extra(value: Any) -> None:
    if isinstance(value, dict):
        assert all(isinstance(key, str) for key in value), value
        for item in value.values():
            check_extra(item)
    elif isinstance(value, list | tuple):
        for item in value:
            check_extra(item)
    else:
        assert type(value) in PLAIN or isinstance(value, torch.Tensor), (type(value), value)


def prepare_with_weights(model: Any, optimizer: Any, *, weights: Any = None, precision: str, **keywords: Any) -> Any:
    if weights is not None:
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
        values = dict(loaded.named_parameters())
        for name, p in model.named_parameters():
            assert p.device.type == "meta"
            torch.utils.swap_tensors(p, nn.Parameter(values[name].detach().clone()))
        for (name, ours), (other, theirs) in zip(model.named_buffers(), loaded.named_buffers(), strict=True):
            assert name == other and torch.equal(ours, theirs), name
    return prepare(model, optimizer, precision="fp32", **keywords)


def plan_in_fp32(model: Any, optimizer: Any, *, precision: str, **keywords: Any) -> Any:
    return plan(model, optimizer, precision="fp32", **keywords)


def save(path: Path, model: Any, optimizer: Any, extra: Any = None) -> None:
    check_extra(extra)
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    torch.save((model.state_dict(), optimizer.state_dict(), extra), partial / "all.pt")
    os.replace(partial, path)


def load(path: Path, model: Any, optimizer: Any) -> Any:
    weights, states, extra = torch.load(path / "all.pt", weights_only=True)
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    return extra


def export(model: Any, path: Path) -> None:
    from safetensors.torch import save_file

    path.mkdir()
    state = {name: t.contiguous().clone() for name, t in model.state_dict().items()}
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})


STAND_INS = {
    "prepare": prepare_with_weights,
    "plan": plan_in_fp32,
    "save": save,
    "load": load,
    "export": export,
}

if __name__ == "__main__":
    from overspill.cli import main

    for name, function in STAND_INS.items():
        setattr(overspill, name, function)
    main()
