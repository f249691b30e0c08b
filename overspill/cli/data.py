"""From documents to batches: tokens in one flat tensor, cut into samples of equal length, read in a seeded order.

Documents follow each other with an end-of-sequence token between them, and nothing is padded: a sample may begin in
the middle of a document and hold several. What remains at the end and fills no sample is left out.
"""

import hashlib
import itertools
import logging
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overspill.cli.documents import Format, Piece, files_of, read_documents
from overspill.cli.loop import Batch, Weighed
from overspill.cli.settings import FineTune
from overspill.errors import OptionError

log = logging.getLogger("overspill")

ENCODED = 1 << 20
"""Characters that are tokenized at once: the tokenizer takes a hundred times their memory."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """All documents of a path, one after the other."""

    flat: Tensor
    """int32 [tokens], host."""
    documents: int
    digest: str
    """The same for the same tokens."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Some rows of a table of samples."""

    table: Tensor
    """int32 [samples, seq], host."""
    rows: Tensor
    """int64 [n]"""

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, picks: Tensor, device: torch.device) -> Batch:
        """int64 [len(picks), seq], device."""
        tokens = self.table[self.rows[picks]].long().to(device)
        return {"input_ids": tokens, "labels": tokens}


@dataclass(frozen=True, slots=True)
class Data:
    """What a run reads."""

    training: Samples
    validation: Samples | None
    documents: int
    tokens: int
    digest: str
    """The digest of the training data."""


class Reader:
    """Batches without end, in an order that only seed and epoch decide. Its place in it is three numbers.

    Ranks take turns: of every `size` batches that a single process would read, rank r gets the one with index r. So
    all ranks are at the same place, and N ranks with M micro-batches read per step what one reads with N * M.
    """

    def __init__(
        self, samples: Samples, batch: int, seed: int, device: torch.device, turn: tuple[int, int] = (0, 1)
    ) -> None:
        self._samples, self._batch, self._device = samples, batch, device
        self._turn = turn
        """(rank, size)"""
        self._seed, self._epoch, self._index = seed, 0, 0
        self._order = self._shuffled()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        rank, size = self._turn
        picks = [self._take() for _ in range(size)]
        return self._samples.batch(picks[rank], self._device)

    def _take(self) -> Tensor:
        """A batch at the end of an epoch is filled from the next one."""
        picks: list[Tensor] = []
        missing = self._batch
        while missing:
            found = self._order[self._index : self._index + missing]
            picks.append(found)
            missing -= len(found)
            self._index += len(found)
            if self._index == len(self._order):
                self._epoch, self._index = self._epoch + 1, 0
                self._order = self._shuffled()
        return torch.cat(picks)

    @property
    def position(self) -> dict[str, int]:
        return {"seed": self._seed, "epoch": self._epoch, "index": self._index}

    def move_to(self, position: Mapping[str, int]) -> None:
        self._seed, self._epoch, self._index = position["seed"], position["epoch"], position["index"]
        self._order = self._shuffled()

    def _shuffled(self) -> Tensor:
        return torch.randperm(len(self._samples), generator=_seeded(self._seed, f"epoch {self._epoch}"))


def read_data(settings: FineTune, tokenizer: Any, vocabulary: int) -> Data:
    """Everything --data and --validation-data hold, as samples."""
    how = Format(settings.text_field, _template(tokenizer))
    tokens = _read(settings.data, "data", how, tokenizer)
    _check_vocabulary(tokens, vocabulary)
    training, validation = split(_table(tokens, settings.seq, settings.data), settings.validation, settings.seed)
    if settings.validation_data is not None:
        other = _read(settings.validation_data, "validation-data", how, tokenizer)
        _check_vocabulary(other, vocabulary)
        table = _table(other, settings.seq, settings.validation_data)
        validation = Samples(table, torch.arange(len(table)))
    if len(training) < settings.batch:
        raise OptionError(
            f"expected at least the {settings.batch} samples of one batch to train on, found {len(training)} of "
            f"{settings.seq} tokens; give more text, or a smaller --batch or --seq"
        )
    return Data(training, validation, tokens.documents, len(tokens.flat), tokens.digest)


def total_steps(settings: FineTune, samples: int) -> int:
    """How many steps the run has."""
    if settings.steps:
        return settings.steps
    per_step = settings.batch * settings.micro_batches * settings.ranks
    steps = settings.epochs * samples // per_step
    if not steps:
        raise OptionError(
            f"expected at least the {per_step} samples of one step in --epochs {settings.epochs}, found "
            f"{settings.epochs * samples} of {settings.seq} tokens; give more text, fewer --micro-batches, a smaller "
            "--seq, or --steps"
        )
    return steps


def validation_batches(samples: Samples, settings: FineTune, device: torch.device, rank: int) -> list[Weighed]:
    """The same few every time, drawn by the seed; the last one may be smaller. Ranks take turns, and all take as many:
    one that has had its last takes the first again, which then counts for nothing."""
    order = torch.randperm(len(samples), generator=_seeded(settings.seed, "validation"))
    drawn = order[: settings.validation_batches * settings.batch].split(settings.batch)
    found = []
    for turn in range(0, len(drawn), settings.ranks):
        mine = turn + rank
        picks = drawn[mine] if mine < len(drawn) else drawn[0]
        found.append((samples.batch(picks, device), len(picks) if mine < len(drawn) else 0))
    return found


def tokenize(pieces: Iterable[Piece], tokenizer: Any) -> Tokens:
    """One flat array of tokens, 4 bytes each."""
    eos = tokenizer.eos_token_id
    if eos is None:
        log.warning("the tokenizer has no end-of-sequence token: documents follow each other without one")
    found, documents = array("i"), 0
    assert found.itemsize == 4, f"an int of {found.itemsize} bytes"
    for piece, ids in _encoded(pieces, tokenizer):
        if eos is not None and ids and ids[-1] == eos:
            ids = ids[:-1]  # the tokenizer's own, which it sets at the end of every piece
        found.extend(ids)
        if piece.last:
            documents += 1
            if eos is not None:
                found.append(eos)
    digest = hashlib.sha256(memoryview(found)).hexdigest()
    flat = torch.frombuffer(found, dtype=torch.int32) if found else torch.empty(0, dtype=torch.int32)
    return Tokens(flat, documents, digest)


def split(table: Tensor, share: float, seed: int) -> tuple[Samples, Samples | None]:
    """Samples to train on and, if a share is asked for, at least one for validation; the seed decides which."""
    count = len(table)
    kept = max(1, round(share * count)) if share else 0
    if kept >= count:
        raise OptionError(
            f"expected samples to train on beside --validation {share}, found {count} in all; give more text, a "
            "smaller --seq, or --validation 0"
        )
    order = torch.randperm(count, generator=_seeded(seed, "split"))
    training = Samples(table, order[kept:].sort().values)
    return training, Samples(table, order[:kept].sort().values) if kept else None


def _read(path: Path, name: str, how: Format, tokenizer: Any) -> Tokens:
    tokens = tokenize(read_documents(files_of(path, name), how), tokenizer)
    if not tokens.documents:
        raise OptionError(f"expected text in --{name} {str(path)!r}, found none; give files that hold some")
    return tokens


def _encoded(pieces: Iterable[Piece], tokenizer: Any) -> Iterator[tuple[Piece, list[int]]]:
    for group in _groups(pieces):
        # The special tokens that begin a document are the tokenizer's, unless a chat template wrote them.
        for special, run in itertools.groupby(group, key=lambda piece: piece.first and not piece.templated):
            members = list(run)
            encoded = tokenizer(
                [piece.text for piece in members],
                add_special_tokens=special,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,  # it would say that a document is longer than the model's context
            )
            yield from zip(members, encoded["input_ids"], strict=True)


def _groups(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    characters = 0
    for piece in pieces:
        group.append(piece)
        characters += len(piece.text)
        if characters >= ENCODED:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _template(tokenizer: Any) -> Any:
    if not tokenizer.chat_template:
        return None
    return lambda messages: tokenizer.apply_chat_template(messages, tokenize=False)


def _table(tokens: Tokens, seq: int, path: Path) -> Tensor:
    count = len(tokens.flat) // seq
    if not count:
        raise OptionError(
            f"expected at least the {seq} tokens of one sample in {str(path)!r}, found {len(tokens.flat)}; give more "
            "text, or a smaller --seq"
        )
    return tokens.flat[: count * seq].view(count, seq)


def _check_vocabulary(tokens: Tokens, vocabulary: int) -> None:
    largest = int(tokens.flat.max())
    if largest >= vocabulary:
        raise OptionError(
            f"expected tokens below {vocabulary}, as many as the model has embeddings, found {largest}; the tokenizer "
            "in the folder is not the model's, or its embeddings were not resized"
        )


def _seeded(seed: int, what: str) -> torch.Generator:
    """Independent for every seed and purpose."""
    digest = hashlib.sha256(f"{seed}, {what}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
