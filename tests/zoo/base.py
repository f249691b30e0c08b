"""What an architecture of the zoo is, and how a stock model is named."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import transformers as hf
from torch import Generator, Tensor, nn

Batch = dict[str, Any]
Batches = Callable[[Generator], Batch]
"""Makes one batch after the other."""
Builder = Callable[[], nn.Module]

VOCABULARY = 37
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

FOR_TRAINING = ("labels", "attention_mask", "return_loss")


@dataclass(frozen=True)
class Architecture:
    name: str
    family: str
    builder: Builder
    batch: Batches
    generates: bool = False
    """Whether `model.generate` makes text from what `prompt` gives."""

    def build(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.builder().train()

    def batches(self, seed: int = 7) -> Iterator[Batch]:
        """An endless stream; also starts NumPy's random numbers anew, which the speech models mask with."""
        numpy.random.seed(seed)
        generator = Generator().manual_seed(seed)
        while True:
            yield self.batch(generator)

    def prompt(self, generator: Generator) -> Batch:
        """What `generate` starts from: a batch without its answers. No row of it is padded."""
        return {name: value for name, value in self.batch(generator).items() if name not in FOR_TRAINING}


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


def stock(name: str, task: str, config: str | None = None, **settings: Any) -> Builder:
    """A builder of a stock model, by the names of its classes: those are only imported when it is built."""

    def build() -> nn.Module:
        # A config keeps, and changes, the dicts it is given.
        return getattr(hf, name + task)(getattr(hf, config or f"{name}Config")(**copy.deepcopy(settings)))

    return build


def llama_like(name: str, task: str = "ForCausalLM", **more: Any) -> Builder:
    """Sizes under the names that Llama gave them."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 40,
        "intermediate_size": 56,  # torch multiplies groups of 16-bit matrices only where rows are multiples of 16 bytes
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    }
    return stock(name, task, **{**sizes, **IDS, **more})


def bert_like(name: str, task: str = "ForMaskedLM", **more: Any) -> Builder:
    """Sizes under the names that BERT gave them."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 36,
        "intermediate_size": 50,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "max_position_embeddings": 24,
    }
    return stock(name, task, **{**sizes, **IDS, **more})
