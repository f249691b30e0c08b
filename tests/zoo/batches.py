"""Batches of random data, one function for each way of feeding a model."""

import torch
from torch import Generator, Tensor

from tests.zoo.base import IDS, VOCABULARY, Batch, Batches


def tokens(generator: Generator, *shape: int) -> Tensor:
    """Tokens of text: none of them special."""
    return torch.randint(3, VOCABULARY, shape, generator=generator)


def classes(generator: Generator, count: int, rows: int) -> Tensor:
    return torch.randint(0, count, (rows,), generator=generator)


def text(generator: Generator, length: int = 9) -> Batch:
    """Tokens that predict themselves; the second row is padded."""
    ids = tokens(generator, 2, length)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def long_text(generator: Generator) -> Batch:
    return text(generator, length=20)


def classified(generator: Generator) -> Batch:
    return {"input_ids": tokens(generator, 3, 7), "labels": classes(generator, 2, rows=3)}


def some_global(generator: Generator, batch: Batch) -> Batch:
    """In one of two batches some tokens look at all others, with weights of their own."""
    mask = torch.zeros_like(batch["input_ids"])
    mask[:, 0] = torch.randint(0, 2, (), generator=generator)
    return {**batch, "global_attention_mask": mask}


def some_global_text(generator: Generator) -> Batch:
    return some_global(generator, text(generator))


def pairs(generator: Generator) -> Batch:
    return {"input_ids": tokens(generator, 2, 9), "labels": tokens(generator, 2, 5)}


def pairs_of_equal_length(generator: Generator) -> Batch:
    return {"input_ids": tokens(generator, 2, 7), "labels": tokens(generator, 2, 7)}


def some_global_pairs(generator: Generator) -> Batch:
    return some_global(generator, pairs(generator))


def pixels(size: int) -> Batches:
    def batch(generator: Generator) -> Batch:
        images = torch.randn(2, 3, size, size, generator=generator)
        return {"pixel_values": images, "labels": classes(generator, 3, rows=2)}

    return batch


def speech(generator: Generator) -> Batch:
    return {"input_values": torch.randn(2, 400, generator=generator), "labels": tokens(generator, 2, 3)}


def wave(generator: Generator) -> Batch:
    """Long enough for three convolutions that shorten it 384 times."""
    return {"input_values": torch.randn(2, 3000, generator=generator), "labels": tokens(generator, 2, 5)}


def mel(generator: Generator) -> Batch:
    return {"input_features": torch.randn(2, 10, 20, generator=generator), "labels": tokens(generator, 2, 5)}


def features(generator: Generator) -> Batch:
    return {"input_features": torch.randn(2, 20, 10, generator=generator), "labels": tokens(generator, 2, 5)}


def sounds(generator: Generator) -> Batch:
    return {"input_values": torch.randn(2, 20, 10, generator=generator), "labels": classes(generator, 3, rows=2)}


def captions(generator: Generator) -> Batch:
    """Images and texts that belong to each other, for contrastive losses."""
    ids = tokens(generator, 3, 6)
    ids[:, -1] = IDS["eos_token_id"]
    return {"input_ids": ids, "pixel_values": torch.randn(3, 3, 12, 12, generator=generator), "return_loss": True}


def captioned(generator: Generator) -> Batch:
    """One image for each text."""
    return {**text(generator), "pixel_values": torch.randn(2, 3, 12, 12, generator=generator)}


def answers(generator: Generator) -> Batch:
    """Questions about images, with the score of every answer."""
    images = torch.randn(2, 3, 12, 12, generator=generator)
    return {
        "input_ids": tokens(generator, 2, 7),
        "pixel_values": images,
        "labels": torch.rand(2, 3, generator=generator),
    }


def image_in_text(generator: Generator) -> Batch:
    """One image of four patches, then text."""
    ids = tokens(generator, 2, 9)
    ids[:, 1:5] = VOCABULARY
    labels = ids.masked_fill(ids == VOCABULARY, -100)
    return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 8, 8, generator=generator), "labels": labels}


def tiles_in_text(generator: Generator) -> Batch:
    """Two small images for each text; the four tokens of each come from sixteen patches."""
    ids = tokens(generator, 2, 13)
    ids[:, 1:5] = ids[:, 6:10] = VOCABULARY
    labels = ids.masked_fill(ids == VOCABULARY, -100)
    return {"input_ids": ids, "pixel_values": torch.randn(2, 2, 3, 16, 16, generator=generator), "labels": labels}


def patches_in_text(generator: Generator) -> Batch:
    """Images of different sizes, as rows of patches: four of them become one token."""
    image, begin = VOCABULARY, VOCABULARY + 2
    ids = tokens(generator, 2, 12)
    ids[:, 1] = begin
    ids[0, 2:4] = ids[1, 2:8] = image
    kinds = (ids == image).int()
    labels = ids.masked_fill(ids >= VOCABULARY, -100)
    patches = torch.randn(8 + 24, 3 * 2 * 4 * 4, generator=generator)
    grid = torch.tensor([[1, 2, 4], [1, 4, 6]])
    return {
        "input_ids": ids,
        "mm_token_type_ids": kinds,
        "pixel_values": patches,
        "image_grid_thw": grid,
        "labels": labels,
    }
