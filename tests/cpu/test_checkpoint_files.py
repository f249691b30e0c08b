"""Tensor files: what we write the safetensors library reads, and the other way round, in little memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from overspill.checkpoint.tensorfile import DTYPES, Entry, Reader, entries_of
from overspill.checkpoint.writer import Stored, stored, write_tensors
from overspill.errors import ModelError, TierError

SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (3, 0, 2), (7,), (5, 3), (2, 3, 37), (4097,))


def filled(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return (torch.arange(count) % 3 == 0).reshape(shape)
    bits = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def every_kind() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {f"{name}.{shape}": filled(dtype, shape) for name, dtype in DTYPES.items() for shape in SHAPES}


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(found[name]), bits(tensor)), name


def read_all(entries: dict[str, Entry], piece_bytes: int = 1 << 20) -> dict[str, Tensor]:
    found = {}
    with Reader() as reader:
        for name, entry in entries.items():
            pieces, position = [torch.empty(0, dtype=entry.dtype)], 0
            for first, piece in reader.pieces(entry, piece_bytes):
                assert first == position and 0 < piece.numel() * piece.element_size() <= max(piece_bytes, 16)
                position += piece.numel()
                pieces.append(piece.clone())
            found[name] = torch.cat([piece.view(torch.uint8) for piece in pieces]).view(entry.dtype)
            found[name] = found[name].reshape(entry.shape)
        assert reader.bytes_read == sum(entry.nbytes for entry in entries.values()), "each byte is read once"
    return found


# ---- round trips


@pytest.mark.parametrize("piece_bytes", [1, 10, 4096, 1 << 25])
def test_the_safetensors_library_reads_what_we_write(tmp_path: Path, piece_bytes: int) -> None:
    tensors = every_kind()
    path = tmp_path / "a.safetensors"
    sums = write_tensors(path, [stored(n, t, piece_bytes) for n, t in tensors.items()], {"format": "pt"})
    assert sums.keys() == tensors.keys()
    assert_same(load_file(path), tensors)
    assert all(entry.offset % entry.dtype.itemsize == 0 for entry in entries_of(path).values())


@pytest.mark.parametrize("piece_bytes", [1, 10, 4096, 1 << 25])
def test_we_read_what_the_safetensors_library_writes(tmp_path: Path, piece_bytes: int) -> None:
    tensors = every_kind()
    save_file(tensors, tmp_path / "a.safetensors", {"format": "pt"})
    assert_same(read_all(entries_of(tmp_path / "a.safetensors"), piece_bytes), tensors)


def test_a_file_without_tensors(tmp_path: Path) -> None:
    assert write_tensors(tmp_path / "a.safetensors", [], {}) == {}
    assert entries_of(tmp_path / "a.safetensors") == {} == load_file(tmp_path / "a.safetensors")


def test_strided_conjugate_and_odd_names(tmp_path: Path) -> None:
    tensors = {
        'a "quoted" ü\n': torch.arange(12.0).reshape(3, 4).t(),
        "conj": torch.randn(5, dtype=torch.complex64).conj(),
        "needs grad": torch.nn.Parameter(torch.randn(3)),
    }
    write_tensors(tmp_path / "a.safetensors", [stored(n, t) for n, t in tensors.items()], {})
    expected = {name: tensor.detach().resolve_conj() for name, tensor in tensors.items()}
    assert_same(load_file(tmp_path / "a.safetensors"), expected)
    assert_same(read_all(entries_of(tmp_path)), expected)


def test_any_range_of_a_tensor_can_be_read(tmp_path: Path) -> None:
    tensor = torch.arange(10_000, dtype=torch.int16)
    write_tensors(tmp_path / "a.safetensors", [stored("before", torch.zeros(3)), stored("x", tensor)], {})
    entry = entries_of(tmp_path)["x"]
    out = torch.empty(5002, dtype=torch.uint8)
    with Reader() as reader:
        reader.read(entry, 2001, out)
        assert reader.bytes_read == 5002
    assert torch.equal(out, bits(tensor)[2001:7003])
    out.untyped_storage().resize_(0)  # reading must not have frozen the storage


# ---- folders


def test_folders_with_one_file_shards_or_other_names(tmp_path: Path) -> None:
    a, b = {"a": torch.randn(3), "left out": torch.randn(1)}, {"b": torch.randn(4, 2), "c": torch.ones(0)}
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
    for shard, tensors in {"one.safetensors": a, "two.safetensors": b}.items():
        save_file(tensors, tmp_path / "x" / shard)
    assert_same(read_all(entries_of(tmp_path / "x")), a | b)
    weight_map = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    index = tmp_path / "x" / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 44}, "weight_map": weight_map}))
    listed = {"a": a["a"], **b}
    assert_same(read_all(entries_of(tmp_path / "x")), listed)
    assert_same(read_all(entries_of(index)), listed)
    save_file(b, tmp_path / "x" / "model.safetensors")
    assert_same(read_all(entries_of(str(tmp_path / "x"))), b)


# ---- what is refused


def test_missing_and_pickled(tmp_path: Path) -> None:
    with pytest.raises(TierError, match="No such file"):
        entries_of(tmp_path / "nowhere")
    with pytest.raises(TierError, match=r"expected \*\.safetensors .* found none"):
        entries_of(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(TierError, match=r"only pickles \(pytorch_model\.bin\); convert them"):
        entries_of(tmp_path)


def test_the_same_tensor_in_two_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"a": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(TierError, match=r"found 'a' in both .*one\.safetensors.*two\.safetensors"):
        entries_of(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "gone.safetensors"}}, "gone.safetensors', which is not there"),
        ({"weight_map": {"a": "../one.safetensors"}}, "which is not there"),
        ({"weight_map": {"b": "one.safetensors"}}, "expected tensor 'b', as model.safetensors.index.json says"),
        ({"weight_map": ["a"]}, "expected a weight_map"),
        ([], "expected a weight_map"),
    ],
)
def test_an_index_that_is_wrong(tmp_path: Path, index: Any, message: str) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(TierError, match=message):
        entries_of(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {')
    with pytest.raises(TierError, match="expected JSON"):
        entries_of(tmp_path)


def craft(path: Path, header: Any, data: int = 8, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data))
    return path


def field(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": field()}, 7, r"expected \d+ bytes, as its header says"),
        ({"a": field()}, 9, r"expected \d+ bytes, as its header says"),
        ({"a": field(), "b": field(offsets=(4, 12))}, 12, "'b' that overlaps"),
        ({"a": field(), "b": field()}, 8, "'b' that overlaps"),
        ({"a": field(), "b": field(offsets=(9, 17))}, 17, "'b' that leaves a gap"),
        ({"a": field(offsets=(0, 4))}, 4, "expected 8 bytes for 'a'"),
        ({"a": field(offsets=(8, 0))}, 8, "expected dtype, shape and data_offsets of 'a'"),
        ({"a": field(shape=(-2,))}, 8, "expected dtype, shape and data_offsets of 'a'"),
        ({"a": {"dtype": "F32"}}, 8, "expected dtype, shape and data_offsets of 'a'"),
        (b'{"a": {}, "a": {}}', 8, "'a' is there twice"),
        (b'{"a": ', 8, "expected a header in JSON"),
        (b"\xff\xfe{}", 8, "expected a header in JSON"),
        (b"[]", 8, "expected a header with the names of tensors"),
    ],
)
def test_a_header_that_is_wrong(tmp_path: Path, header: Any, data: int, message: str) -> None:
    path = craft(tmp_path / "a.safetensors", header, data)
    with pytest.raises(TierError, match=message) as caught:
        entries_of(path)
    assert "a.safetensors" in str(caught.value) and "; " in str(caught.value)


def test_a_header_longer_than_the_file_or_none(tmp_path: Path) -> None:
    for length in (2**63, 10**4, 101):
        with pytest.raises(TierError, match=rf"expected a header of at most \d+ bytes .* found {length}"):
            entries_of(craft(tmp_path / "a.safetensors", b"{}", 20, length))
    (tmp_path / "a.safetensors").write_bytes(b"1234")
    with pytest.raises(TierError, match="found none"):
        entries_of(tmp_path)


def test_an_unknown_dtype(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="found F6_WEIRD for 'a'"):
        entries_of(craft(tmp_path / "a.safetensors", {"a": field("F6_WEIRD")}))
    with pytest.raises(ModelError, match=r"found torch\.complex128 for 'a'"):
        stored("a", torch.zeros(1, dtype=torch.complex128))


def test_a_file_cut_after_its_header_was_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(100)}, tmp_path / "a.safetensors")
    entry = entries_of(tmp_path)["a"]
    os.truncate(entry.path, entry.offset + 33)
    with Reader() as reader, pytest.raises(TierError, match=r"expected 400 bytes of 'a' at offset .* found 33"):
        list(reader.pieces(entry))
    entry.path.unlink()
    with Reader() as reader, pytest.raises(TierError, match="No such file"):
        list(reader.pieces(entry))


@pytest.mark.parametrize("count", [0, 3, 5])
def test_pieces_that_do_not_add_up(tmp_path: Path, count: int) -> None:
    tensor = Stored("a.b", torch.float32, (4,), lambda: iter([torch.zeros(1)] * count))
    with pytest.raises(ModelError, match=r"expected pieces of 16 bytes in all for 'a\.b'"):
        write_tensors(tmp_path / "a.safetensors", [tensor], {})
    assert list(tmp_path.iterdir()) == []


def test_names_twice_and_files_that_exist(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(ModelError, match="found 'a' twice"):
        write_tensors(path, [stored("a", torch.ones(1)), stored("a", torch.ones(1))], {})
    path.write_bytes(b"mine")
    with pytest.raises(TierError, match=r"expected to make the new file .* File exists"):
        write_tensors(path, [], {})
    assert path.read_bytes() == b"mine"


# ---- room


def test_a_disk_without_room_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_bavail, f_frsize = 10, 512

    monkeypatch.setattr(os, "statvfs", lambda _path: Full)
    with pytest.raises(TierError, match=r"expected room for \d+ bytes .*a\.safetensors', found 5120 bytes free"):
        write_tensors(tmp_path / "a.safetensors", [stored("a", torch.ones(2000))], {})
    assert list(tmp_path.iterdir()) == []


def run_alone(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


FULL = """
import resource, sys, torch
from pathlib import Path
from overspill.checkpoint.writer import stored, write_tensors
from overspill.errors import TierError
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    write_tensors(Path(sys.argv[1]), [stored("a", torch.ones(int(sys.argv[2])))], {})
except TierError as error:
    print(error)
"""


@pytest.mark.parametrize("count", [300_000, 3_000_000])  # the write fails at the flush, and in the middle
def test_a_disk_that_fills_while_writing(tmp_path: Path, count: int) -> None:
    message = run_alone(FULL, str(tmp_path / "a.safetensors"), str(count))
    assert message.startswith("expected room for ") and "File too large" in message and "free" in message
    assert list(tmp_path.iterdir()) == []
