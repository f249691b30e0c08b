"""Trains any model plainly and prepared, side by side, on every kind of placement, and compares bits."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overspill
from tests.both import AWAY, HERE, same
from tests.places import PLACES, prepare_tight
from tests.reference import differing, weights

WIDTH = 8
HOWS = ("here", "away", "host", "nvme")
"""Homes on the device; off it; and off it with no window at all, so that a unit leaves as soon as another is needed."""
hows = pytest.mark.parametrize(
    "how", [how if how == "nvme" else pytest.param(how, marks=pytest.mark.full) for how in HOWS]
)
tight = pytest.mark.parametrize("how", ["host", "nvme"])

LossOf = Callable[[nn.Module, int], Tensor]
"""(model, number of the step) -> loss."""


def squared(model: nn.Module, step: int) -> Tensor:
    """The loss of a model from rows to anything whose tensors count."""
    return model(torch.randn(5, WIDTH)).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


@dataclass(frozen=True)
class Side:
    """What to train, and how."""

    build: Callable[[], nn.Module]
    loss_of: LossOf = squared
    steps: int = 4
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    after: Callable[[nn.Module], Any] | None = None
    """What else to look at after every step."""

    def made(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = self.build()
        return model, self.optimizer(model)

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        """The usual loop; losses, norms, and what `after` sees."""
        torch.manual_seed(1)
        found: list[Any] = []
        for step in range(self.steps):
            loss = self.loss_of(model, step)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3 if step % 2 else 30.0)
            optimizer.step()
            optimizer.zero_grad()
            found += [loss.detach(), norm, self.after(model) if self.after else None]
        return found


def spilled(model: nn.Module, optimizer: torch.optim.Optimizer, how: str, nvme: Path) -> Any:
    if how in ("here", "away"):
        place = HERE if how == "here" else AWAY
        return overspill.prepare(model, optimizer, precision="fp32", place=place, nvme=nvme)
    return prepare_tight(model, optimizer, PLACES[how], nvme)


def check(side: Side, how: str, nvme: Path) -> None:
    """The same bits as in the plain loop, while training and after closing."""
    plain, own = side.made()
    expected = side.train(plain, own)
    model, optimizer = spilled(*side.made(), how, nvme)
    assert same(side.train(model, optimizer), expected), "losses, norms or what was seen between steps differ"
    assert differing(weights(model), weights(plain)) == []
    overspill.close(model)
    assert differing(weights(model), weights(plain)) == []
