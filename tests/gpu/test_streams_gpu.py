"""A model whose branches run on streams of their own: the bits of one that runs on one stream."""

from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.program import Kind
from tests.gpu.test_ahead_gpu import HOMES, LAYERS, WIDTH
from tests.reference import differing, weights

pytestmark = pytest.mark.gpu


class Branches(nn.Module):
    """A branch of each block runs on a stream of its own."""

    def __init__(self, beside: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("one", "other")}) for _ in range(LAYERS)
        )
        self.beside = torch.cuda.Stream() if beside else torch.cuda.current_stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here = torch.cuda.current_stream()
        for block in self.blocks:
            self.beside.wait_stream(here)
            with torch.cuda.stream(self.beside):
                # Long enough for whoever does not wait to be early.
                other = Slow.apply(block["other"](x))
            one = block["one"](x)
            here.wait_stream(self.beside)
            x = torch.tanh(one + other)
        return x


class Slow(torch.autograd.Function):
    """The same, and a gradient that takes its time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(10_000_000)
        return gradient


@pytest.mark.parametrize("update", ["lazy", "eager", "delayed"])
def test_branches_on_streams_of_their_own(update: str) -> None:
    def trained(beside: bool) -> tuple[list[float], Any]:
        model: Any = Branches(beside).cuda()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        told = {"delay_after": 1} if update == "delayed" else {}
        model, optimizer = overspill.prepare(
            model, optimizer, place=HOMES["states"], gpu="1GiB", host="1GiB", update=update, precision="bf16", **told
        )
        overspill.api._engine(model).executor.lanes.delays[Kind.UPDATE] = 0.002
        losses = []
        for step in range(6):
            torch.manual_seed(step)
            loss = model(torch.randn(64, WIDTH, device="cuda")).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [float(loss) for loss in losses], weights(overspill.close(model))

    found, expected = trained(True), trained(False)
    assert found[0] == expected[0] and not differing(found[1], expected[1])
