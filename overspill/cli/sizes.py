"""A decoder like Llama from nothing but its sizes, to plan for a model that is not there yet."""

import re
from dataclasses import dataclass

import torch
from torch import nn

from overspill.cli.settings import option
from overspill.errors import OptionError

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
VOCABULARY = 32_000
FEW_WORDS = 256
"""The vocabulary of a model so small that VOCABULARY would be most of it."""
EMBEDDING_SHARE = 1 / 3
"""How much of a model its vocabulary may take."""
WIDTH_PER_LAYER = 128
"""Width per layer of the models that people train: 4096 wide and 32 deep, 5120 and 40, 8192 and 64 or more."""
HEAD = 128
USUAL_FFN = 8 / 3
"""Width of the feed-forward part, as a multiple of the hidden width."""
NARROWEST, WIDEST = 0.5, 12.0
"""Between what multiples it is chosen to meet a number of parameters."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """All that decides the shapes of the parameters."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        return _outside(self.hidden, self.vocabulary) + self.layers * _layer(self.hidden, self.ffn)

    def __str__(self) -> str:
        return (
            f"a decoder like Llama: {self.layers} layers, hidden {self.hidden}, {self.heads} heads, feed-forward "
            f"{self.ffn}, vocabulary {self.vocabulary}"
        )


class Block(nn.Module):
    """The parameters of one layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden = sizes.hidden
        self.input_norm = nn.RMSNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.post_norm = nn.RMSNorm(hidden)
        self.gate, self.up = (nn.Linear(hidden, sizes.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.ffn, hidden, bias=False)


class Decoder(nn.Module):
    """Its parameters and their order; it is planned for, never run."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)


def build(sizes: Sizes) -> nn.Module:
    with torch.device("meta"):
        return Decoder(sizes)


def parse_count(text: str) -> int:
    """Parameters: "13B", "350M", "7e9"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:[eE]\d+)?)\s*([KMBT]?)\s*", text, re.IGNORECASE)
    count = int(float(match[1]) * UNITS[match[2].upper()]) if match else 0
    if count < 1:
        raise OptionError(f"expected --params as a number like 13B, 350M or 7e9, found {text!r}; write it like those")
    return count


def choose(count: int, layers: int | None, hidden: int | None, heads: int | None, words: int | None) -> Sizes:
    """Sizes with about so many parameters; what is not given is chosen as people choose it."""
    for name, value in (("layers", layers), ("hidden", hidden), ("heads", heads), ("vocab", words)):
        if value is not None and value < 1:
            raise OptionError(f"expected {option(name)} from 1, found {value}; give 1 or more")
    width = hidden or _usual_width(count, layers, words)
    vocabulary = words or _usual_words(count, width)
    depth = layers or max(1, round((count - _outside(width, vocabulary)) / _layer(width, round(USUAL_FFN * width))))
    left = count - _outside(width, vocabulary) - depth * _layer(width, 0)
    ffn = round(left / (3 * width * depth))
    low, high = (
        Sizes(depth, width, max(1, round(share * width)), 1, vocabulary).parameters for share in (NARROWEST, WIDEST)
    )
    found = Sizes(depth, width, max(1, ffn), heads or _usual_heads(width), vocabulary)
    if not low <= count <= high or abs(found.parameters - count) > count / 100:
        raise OptionError(
            f"expected --params from {low:,} to {high:,}, which {depth} layers of hidden width {width} and a "
            f"vocabulary of {vocabulary} can have, found {count:,}; change --layers, --hidden or --vocab, or leave "
            "them out"
        )
    if width % found.heads:
        raise OptionError(f"expected --heads that divides the hidden width {width}, found {found.heads}; change one")
    return found


def _outside(hidden: int, vocabulary: int) -> int:
    """Parameters outside of the layers: embedding, last norm, head."""
    return 2 * vocabulary * hidden + hidden


def _layer(hidden: int, ffn: int) -> int:
    return 4 * hidden * hidden + 3 * hidden * ffn + 2 * hidden


def _usual_width(count: int, layers: int | None, words: int | None) -> int:
    """The width at which the usual depth, or the one that is given, has that many parameters; a multiple of HEAD."""
    step = HEAD if count >= 10**8 else 8
    width = step

    def parameters(width: int) -> int:
        depth = layers or max(1, round(width / WIDTH_PER_LAYER))
        vocabulary = words or _usual_words(count, width)
        return _outside(width, vocabulary) + depth * _layer(width, round(USUAL_FFN * width))

    while parameters(width + step) <= count:
        width += step
    return min((width, width + step), key=lambda w: abs(parameters(w) - count))


def _usual_words(count: int, hidden: int) -> int:
    return VOCABULARY if 2 * VOCABULARY * hidden <= EMBEDDING_SHARE * count else FEW_WORDS


def _usual_heads(hidden: int) -> int:
    size = next((size for size in (HEAD, HEAD // 2, HEAD // 4, HEAD // 8) if hidden % size == 0), hidden)
    return hidden // size
