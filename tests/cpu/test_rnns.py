"""Recurrent layers, whose modules keep lists of their weights and a way to move them to other memory."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import overspill
from tests.layers import Apply, Stack
from tests.side import WIDTH, Side, check, hows, spilled, squared, tight


class Recurrent(nn.Module):
    """From rows to rows: the batch is one sequence, or several of other lengths, packed."""

    def __init__(self, kind: type[nn.RNNBase], flatten: bool = False, packed: bool = False, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, WIDTH, **options)
        self.flatten, self.packed = flatten, packed
        width = (options.get("proj_size") or WIDTH) * (2 if options.get("bidirectional") else 1)
        self.out = nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.flatten:
            self.rnn.flatten_parameters()
        if not self.packed:
            return self.out(self.rnn(x[None] if self.rnn.batch_first else x[:, None])[0]).view_as(x)
        many = torch.stack([x, x.flip(0), x * 2], 0 if self.rnn.batch_first else 1)
        lengths = torch.tensor([5, 2, 4])
        options = {"batch_first": self.rnn.batch_first}
        sequence, _ = self.rnn(pack_padded_sequence(many, lengths, enforce_sorted=False, **options))
        return self.out(pad_packed_sequence(sequence, **options)[0]).sum(0 if self.rnn.batch_first else 1)


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.gate, self.memory = (
            nn.RNNCell(WIDTH, WIDTH),
            nn.GRUCell(WIDTH, WIDTH),
            nn.LSTMCell(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros_like(x)
        for _ in range(3):
            h = self.gate(self.cell(x, h), h)
            h, c = self.memory(x, (h, c))
        return h


KINDS: dict[str, Callable[[], nn.Module]] = {
    "rnn": lambda: Recurrent(nn.RNN),
    "rnn of relu": lambda: Recurrent(nn.RNN, nonlinearity="relu", bias=False),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU, batch_first=True),
    "two layers": lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.2, flatten=True),
    "both ways": lambda: Recurrent(nn.GRU, num_layers=2, bidirectional=True, batch_first=True, flatten=True),
    "projected": lambda: Recurrent(nn.LSTM, proj_size=3, bidirectional=True),
    "packed": lambda: Recurrent(nn.LSTM, packed=True, bidirectional=True, batch_first=True),
    "packed rnn": lambda: Recurrent(nn.RNN, packed=True, num_layers=2, flatten=True),
    "cells": Cells,
    "weight norm": lambda: Apply(
        nn.utils.weight_norm(nn.LSTM(WIDTH, WIDTH), "weight_hh_l0"), lambda rnn, x: rnn(x[:, None])[0][:, 0]
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@hows
@pytest.mark.parametrize("name", KINDS)
def test_recurrent_layers(name: str, how: str, tmp_path: Path) -> None:
    check(Side(lambda: Stack(KINDS[name], 2)), how, tmp_path)


def flattening(model: nn.Module, step: int) -> Tensor:
    """The user compacts the weights, in each of the ways that do."""
    for block in model.blocks:
        block.rnn.flatten_parameters()
    model.float()
    return squared(model, step)


@hows
def test_weights_that_are_to_be_compacted(how: str, tmp_path: Path) -> None:
    check(Side(lambda: Stack(KINDS["both ways"], 2), flattening), how, tmp_path)


@tight
def test_copies_and_what_is_closed_are_plain(how: str, tmp_path: Path) -> None:
    side = Side(lambda: Stack(KINDS["two layers"], 2))
    model, optimizer = spilled(*side.made(), how, tmp_path)
    side.train(model, optimizer)
    x = torch.randn(5, WIDTH)
    model.eval()
    expected = model(x)
    plain = KINDS["two layers"]()
    plain.load_state_dict(model.blocks[0].state_dict())
    copies = [copy.deepcopy(model.blocks[0]), pickle.loads(pickle.dumps(model.blocks[0]))]
    for each in copies:
        each.rnn.flatten_parameters()
        assert {type(w) for w in each.rnn._flat_weights} == {nn.Parameter}
        assert torch.equal(each.eval()(x), plain.eval()(x))
    closed = overspill.close(model)
    assert torch.equal(closed(x), expected)
    assert all("flatten_parameters" not in vars(block.rnn) for block in closed.blocks)
