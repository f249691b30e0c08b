"""Torch's own optimizer beside ours, step by step."""

import copy
from typing import Any

import torch
from torch import nn

import overspill
from tests.reference import differing


class Judge:
    """Beside each step of ours, torch's own optimizer on the same masters, gradients and states."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer, self.steps = model, optimizer, 0

    def step(self) -> None:
        groups = self.optimizer.param_groups
        before = {name: value.clone() for name, value in self.model.state_dict().items()}
        states = copy.deepcopy(self.optimizer.state_dict())
        grads = {name: overspill.grad(p) for name, p in self.model.named_parameters()}
        skipped = self.optimizer.report()["skipped"]
        self.optimizer.step()
        self.steps += 1
        if self.optimizer.report()["skipped"] > skipped:
            assert differing(self.model.state_dict(), before) == []
            return
        names = {id(p): name for name, p in self.model.named_parameters()}
        copies = [[nn.Parameter(before[names[id(p)]].clone()) for p in group["params"]] for group in groups]
        options = [
            {**{k: v for k, v in g.items() if k != "params"}, "params": c} for g, c in zip(groups, copies, strict=True)
        ]
        torchs = type(self.optimizer.given)(options)
        torchs.load_state_dict(states)
        for group, mine in zip(groups, copies, strict=True):
            for p, q in zip(group["params"], mine, strict=True):
                q.grad = grads[names[id(p)]]
        torchs.step()
        after = self.model.state_dict()
        for group, mine in zip(groups, copies, strict=True):
            for p, q in zip(group["params"], mine, strict=True):
                self._compare(names[id(p)], before[names[id(p)]], after[names[id(p)]], q.detach())

    def _compare(self, name: str, before: torch.Tensor, ours: torch.Tensor, torchs: torch.Tensor) -> None:
        largest = torch.maximum(before.abs(), (torchs - before).abs())
        ulp = torch.nextafter(largest, torch.tensor(torch.inf)) - largest
        assert ((ours - torchs).abs() <= 2 * ulp).all(), f"{name} in step {self.steps}"

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
