"""From files to batches: what is read, how it is cut, in which order, and what is refused."""

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from overspill.cli import documents
from overspill.cli.data import Reader, Samples, read_data, split, tokenize, total_steps, validation_batches
from overspill.cli.documents import Format, Piece, files_of, read_documents
from overspill.cli.settings import FineTune
from overspill.errors import OptionError
from tests.folders import TEXT, VOCABULARY, make_tokenizer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def lines(path: Path, *objects: Any) -> Path:
    path.write_text("".join(json.dumps(o) + "\n" for o in objects))
    return path


def texts(path: Path, how: Format = Format()) -> list[str]:  # noqa: B008 - frozen
    """The documents below a path, each put together again."""
    found: list[str] = []
    for piece in read_documents(files_of(path), how):
        found = [*found, piece.text] if piece.first else [*found[:-1], found[-1] + piece.text]
    return found


def table(samples: int, seq: int = 4) -> torch.Tensor:
    return torch.arange(samples * seq, dtype=torch.int32).view(samples, seq)


def firsts(batch: dict[str, torch.Tensor]) -> list[int]:
    return (batch["input_ids"][:, 0] // batch["input_ids"].shape[1]).tolist()


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "1.md").write_text("two")
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\nmore\n\nand more".encode())
    lines(tmp_path / "c.jsonl", {"text": "three"}, {"text": ""}, {"text": "four", "other": 1})
    with gzip.open(tmp_path / "d.txt.gz", "wt") as file:
        file.write("five")
    (tmp_path / "e.png").write_bytes(b"\xff")
    (tmp_path / ".hidden.txt").write_text("not this")
    (tmp_path / "empty.txt").write_text("")
    assert texts(tmp_path) == ["one\nmore\n\nand more", "two", "three", "four", "five"]
    assert "1 files" in caplog.text and "e.png" in caplog.text


def test_a_long_document_comes_in_pieces_that_end_with_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    whole = tokenize(read_documents([tmp_path / "a.txt"], Format()), tokenizer)
    monkeypatch.setattr(documents, "PIECE", 1000)
    pieces = list(read_documents([tmp_path / "a.txt"], Format()))
    assert len(pieces) > 10 and "".join(p.text for p in pieces) == TEXT
    assert all(p.text.endswith("\n") and len(p.text) < 1100 for p in pieces)
    assert [p.first for p in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [p.last for p in pieces] == [False] * (len(pieces) - 1) + [True]
    cut = tokenize(pieces, tokenizer)
    assert cut.documents == 1 and cut.digest == whole.digest


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"JSON object in line 2 of '.*a\.jsonl', found '{\"text\":'"),
        ("a.jsonl", b"[1, 2]\n", r"JSON object in line 1 of .*, found '\[1, 2\]'"),
        (
            "a.jsonl",
            b'\n\n{"body": "a", "id": 3}\n',
            "field 'text' in line 3 of .*, found 'body', 'id'; .*--text-field",
        ),
        ("a.jsonl", b'{"text": 3}\n', "text in field 'text' of line 1 .*, found int"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "UTF-8 text in line 2 of .*, found the byte 0xff"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}\n', "tokenizer with a chat template"),
        ("a.txt", b"abc\xfe", r"UTF-8 text in .*a\.txt, found the byte 0xfe"),
        ("a.txt.gz", b"abc", r"readable file, found .*a\.txt\.gz"),
        ("a.json", b"[]", "one JSON object per line"),
    ],
    ids=["not json", "no object", "field", "type", "bytes", "chat", "text", "gzip", "json"],
)
def test_what_cannot_be_read_is_named_with_its_line(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(OptionError, match=message):
        texts(tmp_path / name)


def test_a_missing_path_and_a_folder_without_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="expected --validation-data to be a file or a folder, found nothing"):
        files_of(tmp_path / "none", "validation-data")
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(OptionError, match="found 1 other files"):
        files_of(tmp_path)


def test_a_named_field_and_chats_are_read(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": "no", "body": "yes"})
    assert texts(path, Format("body")) == ["yes"]
    chat = make_tokenizer(chat=True)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    lines(path, {"messages": messages}, {"text": "plain", "messages": []})
    how = Format(chat=lambda m: str(chat.apply_chat_template(m, tokenize=False)))
    assert texts(path, how) == ["<|user|>Hi\n<|assistant|>Ho\n<eos>", "plain"]
    tokens = tokenize(read_documents([path], how), chat)
    assert chat.decode(tokens.flat) == "<|user|>Hi\n<|assistant|>Ho\n<eos>plain<eos>"
    lines(path, {"messages": ["Hi"]})
    with pytest.raises(OptionError, match=r"messages in line 1 of .* that the tokenizer's chat template takes"):
        texts(path, how)


def test_documents_are_joined_by_one_end_token(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    pieces = [Piece("one"), Piece("two ", last=False), Piece("three<eos>", first=False)]
    tokens = tokenize(pieces, tokenizer)
    assert tokenizer.decode(tokens.flat) == "one<eos>two three<eos>"
    assert (tokens.documents, tokens.flat.dtype) == (2, torch.int32)
    assert tokenize(pieces[:1], tokenizer).digest != tokens.digest
    assert not caplog.text
    bare = tokenize(pieces[:1], make_tokenizer(eos=None)).flat.tolist()
    assert bare == tokenize(pieces[:1], tokenizer).flat.tolist()[:-1]
    assert "no end-of-sequence token" in caplog.text


def settings(path: Path, **said: Any) -> FineTune:
    return FineTune(**{"model": path, "data": path, "seq": 16, "batch": 2, **said})


def test_samples_are_windows_of_the_tokens_and_each_is_of_one_set(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    how = settings(tmp_path / "a.txt", validation=0.1)
    data = read_data(how, tokenizer, VOCABULARY)
    flat = tokenize([Piece(TEXT)], tokenizer).flat
    count = len(flat) // 16
    assert data.validation is not None
    assert (len(data.training) + len(data.validation), len(data.validation)) == (count, round(count / 10))
    assert sorted([*data.training.rows.tolist(), *data.validation.rows.tolist()]) == list(range(count))
    assert torch.equal(data.training.table.flatten(), flat[: count * 16])
    assert data.training.batch(torch.tensor([0]), CPU)["labels"].dtype == torch.int64
    again, other = (split(data.training.table, 0.1, seed)[1] for seed in (0, 1))
    assert again is not None and other is not None
    assert torch.equal(again.rows, data.validation.rows) and not torch.equal(other.rows, again.rows)
    first, second = ([b["labels"] for b, _ in validation_batches(data.validation, how, CPU, 0)] for _ in range(2))
    assert len(first) == 16 and all(map(torch.equal, first, second))


def test_validation_data_of_its_own_leaves_all_samples_to_training(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text(TEXT[:500])
    how = settings(tmp_path / "a.txt", validation=0.0, validation_data=tmp_path / "b.txt", batch=4)
    data = read_data(how, tokenizer, VOCABULARY)
    assert data.validation is not None and len(data.training) == len(data.training.table)
    seen = [batch for batch, _ in validation_batches(data.validation, how, CPU, 0)]
    assert sum(len(b["labels"]) for b in seen) == len(data.validation) and len(seen[-1]["labels"]) <= 4


@pytest.mark.parametrize(
    ("said", "text", "message"),
    [
        ({"seq": 10**6}, TEXT, "at least the 1000000 tokens of one sample"),
        ({"batch": 10**4}, TEXT, "at least the 10000 samples of one batch"),
        ({"seq": 2}, "a text", "beside --validation 0.05, found 1 in all"),
        ({}, "", "expected text in --data"),
    ],
    ids=["sample", "batch", "validation", "empty"],
)
def test_too_little_text_is_refused(said: Any, text: str, message: str, tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(OptionError, match=message):
        read_data(settings(tmp_path / "a.txt", **said), tokenizer, VOCABULARY)


def test_tokens_beyond_the_embedding_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    with pytest.raises(OptionError, match=r"expected tokens below 100, .* found 2"):
        read_data(settings(tmp_path / "a.txt"), tokenizer, 100)


def test_every_epoch_holds_every_sample_once_in_an_order_of_its_own() -> None:
    reader = Reader(Samples(table(10), torch.arange(10)), 4, 3, CPU)
    order = [i for _ in range(10) for i in firsts(next(reader))]
    epochs = [order[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    other = Reader(Samples(table(10), torch.arange(10)), 4, 4, CPU)
    assert [i for _ in range(10) for i in firsts(next(other))] != order


def test_a_position_is_three_numbers_and_continues_with_the_next_batch() -> None:
    samples = Samples(table(10), torch.arange(10))
    reader = Reader(samples, 4, 3, CPU)
    seen = [(reader.position, firsts(next(reader))) for _ in range(12)]
    for index, (position, _) in enumerate(seen):
        assert set(position) == {"seed", "epoch", "index"}
        later = Reader(samples, 4, 0, CPU)
        later.move_to(position)
        assert [firsts(next(later)) for _ in seen[index:]] == [batch for _, batch in seen[index:]]


def test_epochs_become_steps(tmp_path: Path) -> None:
    assert total_steps(settings(tmp_path, epochs=3, micro_batches=2), 10) == 7
    assert total_steps(settings(tmp_path, epochs=0, steps=5), 1) == 5
    with pytest.raises(OptionError, match="the 16 samples of one step in --epochs 1, found 10"):
        total_steps(settings(tmp_path, micro_batches=8), 10)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_read_together_what_one_process_reads(size: int) -> None:
    table = torch.arange(14, dtype=torch.int32).view(7, 2)
    samples = Samples(table, torch.arange(7))
    alone = Reader(samples, 2, 5, CPU)
    ranks = [Reader(samples, 2, 5, CPU, (rank, size)) for rank in range(size)]
    for _ in range(6):
        for rank in ranks:
            assert torch.equal(next(rank)["labels"], next(alone)["labels"])
        assert all(rank.position == alone.position for rank in ranks)
    # Other ranks continue where these are.
    fewer = Reader(samples, 2, 5, CPU)
    fewer.move_to(ranks[0].position)
    assert torch.equal(next(fewer)["labels"], next(ranks[0])["labels"])


def test_ranks_share_the_validation_and_take_as_many_batches_each() -> None:
    samples = Samples(torch.arange(18, dtype=torch.int32).view(9, 2), torch.arange(9))
    how = settings(Path("a"), batch=2)
    alone = validation_batches(samples, how, CPU, 0)
    shares = [validation_batches(samples, dataclasses.replace(how, ranks=3), CPU, rank) for rank in range(3)]
    assert [[count for _, count in share] for share in shares] == [[2, 2], [2, 1], [2, 0]]
    turns = [pair for turn in zip(*shares, strict=True) for pair in turn if pair[1]]
    assert all(torch.equal(a["labels"], b["labels"]) for (a, _), (b, _) in zip(turns, alone, strict=True))


def test_half_a_character_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n{"text": "bad \\ud83d end"}\n')
    with pytest.raises(OptionError, match=r"expected text in line 2 of .*a\.jsonl.*half a character \('\\ud83d'\)"):
        texts(path)


def test_json_that_never_ends_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ' + "[" * 100_000 + "\n")
    with pytest.raises(OptionError, match=r"expected a JSON object in line 1"):
        texts(path)


def test_damaged_gzip_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    whole = gzip.compress(("some text " * 500).encode())
    for at in range(12, len(whole) - 8):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises(OptionError, match=r"expected (a readable file|.*UTF-8)"):
            texts(path)
