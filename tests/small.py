"""A small model of awkward sizes: tied head, blocks, a parameter of one element."""

from collections.abc import Iterator

import torch
from torch import nn

VOCABULARY = 11
WIDTH = 18


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 29)
        self.down = nn.Linear(29, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


class Small(nn.Module):
    """Embedding, blocks, tied head, a buffer."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.zeros(1))

    def forward(self, tokens: torch.Tensor, skip: int | None = None) -> torch.Tensor:
        x = self.embedding(tokens) + self.shift
        for i, block in enumerate(self.blocks):
            if i != skip:
                x = block(x)
        return self.head(self.last(x))


def build(seed: int = 0, blocks: int = 4) -> Small:
    torch.manual_seed(seed)
    return Small(blocks)


def batches(seed: int = 7) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(0, VOCABULARY, (3, 6), generator=generator)
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["tokens"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten().to(logits.device))
