"""Models as they come: every sort of layer and parameter trains as in plain torch, wherever its bytes live."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests import zoo
from tests.layers import EVERY, Stack
from tests.side import Side, check, hows

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*weight_norm.*:FutureWarning", "ignore:enable_nested_tensor is True:UserWarning", "ignore:Lazy modules"
)


@hows
@pytest.mark.parametrize("name", EVERY)
def test_layers(name: str, how: str, tmp_path: Path) -> None:
    check(Side(lambda: Stack(EVERY[name])), how, tmp_path)


def resized(name: str, size: int) -> Side:
    def build() -> nn.Module:
        model = zoo.ZOO[name].build()
        model.resize_token_embeddings(size)
        return model

    def loss_of(model: nn.Module, step: int) -> Tensor:
        return zoo.loss_of(model, zoo.ZOO[name].batch(torch.Generator().manual_seed(step)))

    return Side(build, loss_of)


@hows
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_resized_embeddings(name: str, how: str, tmp_path: Path) -> None:
    """A larger vocabulary: other parameters than the model was built with, and tied anew."""
    check(resized(name, zoo.VOCABULARY + 5), how, tmp_path)
