"""The models that are trained: decoders like Llama of given sizes, or what the config in a folder describes."""

import dataclasses
import gc
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from overspill.bench.jobs import Training
from overspill.cli import text_model
from overspill.cli.sizes import Sizes, choose

LLAMA = Sizes(layers=26, hidden=3072, ffn=8192, heads=24, vocabulary=32_000)
"""Trained unless something else is asked for: 3.14 billion parameters."""
GRAIN = 64
"""A feed-forward part is as wide as a multiple of this, because a GPU multiplies other widths much slower."""


def config_of(training: Training) -> Any:
    """The config of Transformers."""
    if training.folder is not None:
        return text_model.read_config(Path(training.folder))
    from transformers import LlamaConfig

    sizes = training.sizes
    assert sizes is not None, "a training has sizes or a folder"
    return LlamaConfig(
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        intermediate_size=sizes.ffn,
        vocab_size=sizes.vocabulary,
        max_position_embeddings=training.seq,
        use_cache=False,
    )


def build(training: Training, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A model with the first values that Transformers gives it; on meta, without values."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(training.seed)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config_of(training), dtype=dtype)
    if training.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    built: nn.Module = model.train()
    return built


def build_in_host_memory(training: Training, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The same, made on the device where there is one: random numbers take a CPU minutes."""
    model = build(training, dtype, device).to("cpu")
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return model


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def said(count: int) -> str:
    """A number of parameters as people say it."""
    unit, name = next(((u, n) for u, n in ((1e9, "B"), (1e6, "M")) if count >= u), (1e3, "K"))
    return f"{count / unit:.2f}{name}"


def sizes_of(count: int, shape: Mapping[str, int | None] | None = None) -> Sizes:
    """Sizes with about so many parameters that a GPU likes."""
    given = shape or {}
    found = choose(count, given.get("layers"), given.get("hidden"), given.get("heads"), given.get("vocab"))
    if found.ffn < 8 * GRAIN:
        return found
    return dataclasses.replace(found, ffn=GRAIN * round(found.ffn / GRAIN))


class Batches:
    """Random tokens without end, made where they are used, the same for the same seed: int64 [micro_batch, seq]."""

    def __init__(self, training: Training, vocabulary: int, device: torch.device) -> None:
        self._shape = (training.micro_batch, training.seq)
        self._vocabulary = vocabulary
        self._device = device
        self._generator = torch.Generator(device).manual_seed(training.seed)

    def __next__(self) -> Tensor:
        return torch.randint(self._vocabulary, self._shape, generator=self._generator, device=self._device)


def tflops(parameter_count: int, tokens: int, seconds: float) -> float:
    """Model TFLOP/s: 6 x parameters x tokens / seconds. What recomputing adds is not counted."""
    return 6 * parameter_count * tokens / seconds / 1e12 if seconds > 0 else math.nan
