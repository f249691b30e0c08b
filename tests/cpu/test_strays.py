"""Parts of a graph that hang on nothing that a module returns, takes or keeps: found, or refused, but never a crash."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill.runtime import hooks
from tests.both import same
from tests.layers import Stack
from tests.reference import differing, weights
from tests.side import WIDTH, Side, check, hows, spilled, squared, tight

BAG: list[Any] = []


class Leaking(nn.Module):
    """Puts a loss of its own into a global list: by itself, in a closure, or in a generator."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        aux = self.gate(torch.tanh(self.layer(x)) * self.gain).square().mean()
        BAG.append({"tensor": aux, "closure": lambda: aux, "generator": (a for a in [aux])}[self.kind])
        return self.layer(x)


TAKE: dict[str, Callable[[Any], Tensor]] = {
    "tensor": lambda aux: aux,
    "closure": lambda aux: aux(),
    "generator": lambda aux: next(aux),
}


def alone(model: nn.Module, step: int) -> Tensor:
    """Only what is in the list; then with the output; then neither of the last block's."""
    BAG.clear()
    out = model(torch.randn(5, WIDTH)).square().mean()
    found = [TAKE[model.blocks[0].kind](aux) for aux in BAG]
    BAG.clear()
    return [sum(found), out + sum(found), found[0] + found[1]][step % 3]


@hows
@pytest.mark.parametrize("kind", TAKE)
def test_a_loss_in_a_global_list(kind: str, how: str, tmp_path: Path) -> None:
    check(Side(lambda: Stack(lambda: Leaking(kind)), alone, steps=3), how, tmp_path)


@tight
def test_what_is_not_found_is_refused(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the tensor were kept where Python cannot see it. The model can be used afterwards."""
    side = Side(lambda: Stack(lambda: Leaking("tensor")), alone, steps=3)
    model, optimizer = spilled(*side.made(), how, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(hooks, "_strays", lambda begin: [])
        with pytest.raises(RuntimeError, match="needed for gradient computation has been modified"):
            side.train(model, optimizer)
    optimizer.zero_grad()
    plain, own = side.made()
    assert same(Side(side.build).train(model, optimizer), Side(side.build).train(plain, own))


@tight
def test_a_graph_from_before_prepare(how: str, tmp_path: Path) -> None:
    """It refers to weights that have moved away since."""
    model, optimizer = Side(lambda: Stack(lambda: nn.LayerNorm(WIDTH))).made()
    loss = squared(model, 0)
    model, optimizer = spilled(model, optimizer, how, tmp_path)
    with pytest.raises(RuntimeError, match="needed for gradient computation has been modified"):
        loss.backward()


def test_where_nothing_is_to_be_found_is_not_searched_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that a module computes and drops make no difference, and cost a search only at first."""

    class Wasteful(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x * 2)
            return super().forward(x)

    searched = []
    real = hooks._strays
    monkeypatch.setattr(hooks, "_strays", lambda begin: searched.append(begin) or real(begin))
    side = Side(lambda: Stack(lambda: Wasteful(WIDTH, WIDTH)), steps=6)
    side.train(*spilled(*side.made(), "host", tmp_path))
    assert len(searched) == hooks.LOOKS, "for all modules of one kind together"


@hows
def test_closing_while_views_are_held(how: str, tmp_path: Path) -> None:
    side = Side(lambda: Stack(lambda: nn.Linear(WIDTH, WIDTH)))
    plain, own = side.made()
    side.train(plain, own)
    model, optimizer = spilled(*side.made(), how, tmp_path)
    side.train(model, optimizer)
    kept = [p.data for p in model.parameters()] + [squared(model, 0)]
    overspill.close(model)
    assert differing(weights(model), weights(plain)) == []
    assert all(torch.equal(view, p) for view, p in zip(kept, plain.parameters(), strict=False))


@pytest.mark.parametrize("swap", ["swap", "convert", "load"])
@hows
def test_swapped_parameters_are_refused(how: str, swap: str, tmp_path: Path) -> None:
    side = Side(lambda: Stack(lambda: nn.Linear(WIDTH, WIDTH)))
    plain, own = side.made()
    model, optimizer = spilled(*side.made(), how, tmp_path)
    side.train(model, optimizer)
    torch.__future__.set_swap_module_params_on_conversion(swap != "swap")
    try:
        with pytest.raises(RuntimeError, match="swap"):
            if swap == "swap":
                torch.utils.swap_tensors(model.last.weight, nn.Parameter(torch.zeros(3, WIDTH)))
            elif swap == "convert":
                model.double()
            else:
                model.load_state_dict(plain.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    if swap != "load":  # torch writes the values before it swaps
        side.train(plain, own)
        assert same(side.train(model, optimizer), side.train(plain, own))
