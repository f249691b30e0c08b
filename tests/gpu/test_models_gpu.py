"""On cuda: recurrent layers, whose weights cuDNN would move; graphs kept anywhere; adapters; torch's own threads."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill.errors import StateError
from tests.both import same
from tests.cpu.test_rnns import KINDS, Recurrent
from tests.cpu.test_strays import Leaking, alone
from tests.layers import EVERY, Stack
from tests.reference import differing, weights
from tests.side import WIDTH, LossOf, Side, spilled

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")]
HOWS = ["here", "host", "nvme"]
LAYERS = ["conv2d", "channels last", "batch norm", "attention", "transformer", "weight norm", "dropout"]


def on_gpu(model: nn.Module, step: int) -> Tensor:
    return model(torch.randn(5, WIDTH, device="cuda")).square().mean()


def check(build: Callable[[], nn.Module], how: str, nvme: Path, loss_of: LossOf = on_gpu) -> None:
    """As tests.side.check, with the plain model on the GPU and the spilled one built on the host."""
    side = Side(build, loss_of)
    plain, _ = side.made()
    plain.cuda()
    expected = side.train(plain, side.optimizer(plain))
    model, optimizer = spilled(*side.made(), how, nvme)
    assert same(side.train(model, optimizer), expected)
    assert differing(weights(model), weights(plain)) == []
    overspill.close(model)
    assert differing(weights(model), weights(plain)) == []


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk:UserWarning")
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", [name for name in KINDS if name != "weight norm"])
def test_recurrent_layers(name: str, how: str, tmp_path: Path) -> None:
    check(lambda: Stack(KINDS[name], 2), how, tmp_path)


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk:UserWarning")
@pytest.mark.parametrize("how", HOWS)
def test_an_rnn_that_was_compacted_before_prepare(how: str, tmp_path: Path) -> None:
    """Built on the GPU, so that all weights of an RNN lie in one piece of memory; and again after close."""

    def build() -> nn.Module:
        return Stack(lambda: Recurrent(nn.LSTM, num_layers=2, flatten=True), 2).cuda()

    side = Side(build, on_gpu)
    plain, own = side.made()
    expected = side.train(plain, own)
    model, optimizer = spilled(*side.made(), how, tmp_path)
    flats = [unit.flat.untyped_storage()._cdata for unit in overspill.api._engine(model).units]
    for block in model.blocks:
        block.rnn.flatten_parameters()
    assert same(side.train(model, optimizer), expected)
    with overspill.full(model):
        assert {p.untyped_storage()._cdata for p in model.parameters()} <= set(flats), "weights stay in their units"
    overspill.close(model)
    assert differing(weights(model), weights(plain)) == []
    for block in model.blocks:
        memory = {p.untyped_storage()._cdata for p in block.rnn.parameters()}
        assert len(memory) == 1, "a closed model's RNN is compact, as a plain one's"


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, how: str, tmp_path: Path) -> None:
    check(lambda: Stack(EVERY[name]), how, tmp_path)


@pytest.mark.parametrize("how", HOWS)
def test_a_loss_in_a_global_list(how: str, tmp_path: Path) -> None:
    check(lambda: Stack(lambda: Leaking("tensor")), how, tmp_path, alone_on_gpu)


def alone_on_gpu(model: nn.Module, step: int) -> Tensor:
    with torch.device("cuda"):
        return alone(model, step)


@pytest.mark.parametrize("how", ["here", "host"])
def test_a_gradient_taken_inside_forward(how: str, tmp_path: Path) -> None:
    """Backward runs in a thread of torch's own while a call is running: that is no other user."""

    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.other(torch.tanh(self.layer(x)))
            (slope,) = torch.autograd.grad(y.square().sum(), y if not x.requires_grad else x, create_graph=True)
            return y + slope

    check(lambda: Stack(Slope), how, tmp_path)


@pytest.mark.parametrize("how", ["here", "host"])
def test_two_threads_at_once_are_refused(how: str, tmp_path: Path) -> None:
    side = Side(lambda: Stack(lambda: nn.Linear(WIDTH, WIDTH)), on_gpu)
    model, optimizer = spilled(*side.made(), how, tmp_path)
    side.train(model, optimizer)
    found: list[BaseException] = []

    def other(*_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return

        def use() -> None:
            try:
                model(torch.randn(5, WIDTH, device="cuda"))
            except StateError as error:
                found.append(error)

        thread = threading.Thread(target=use)
        thread.start()
        thread.join()

    handle = model.blocks[1].register_forward_pre_hook(other)
    side.train(model, optimizer)
    handle.remove()
    assert len(found) == side.steps
