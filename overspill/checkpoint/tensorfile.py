"""Reads safetensors with plain `pread`: 8 bytes with the length of the header (little endian), the header (JSON), data.

Headers are checked in full before a byte of data is trusted: every tensor's bytes must follow the ones before it, and
the last must end with the file.
"""

import ctypes
import json
import math
import os
import re
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from overspill.checkpoint.staging import disk_errors
from overspill.errors import ModelError, TierError
from overspill.specs import MiB

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
}
PIECE_BYTES = 32 * MiB
METADATA = "__metadata__"
MODEL_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_MAX_HEADER = 100 * 1000 * 1000  # the limit of the safetensors library; a longer one is garbage
_CACHE_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Entry:
    """Where the bytes of one tensor lie."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


def entries_of(path: str | os.PathLike[str]) -> dict[str, Entry]:
    """The tensors of one safetensors file, of an index file and its shards, or of a folder with any of these.

    In a folder `model.safetensors` comes first, then `model.safetensors.index.json`, then all `*.safetensors`.
    """
    path = Path(path)
    with disk_errors(f"find tensors at {str(path)!r}"):
        return _entries_of(path)


def _entries_of(path: Path) -> dict[str, Entry]:
    if not path.is_dir():
        return _indexed(path) if path.name.endswith(".index.json") else file_entries(path)
    if (path / MODEL_FILE).exists():
        return file_entries(path / MODEL_FILE)
    if (path / INDEX_FILE).exists():
        return _indexed(path / INDEX_FILE)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise TierError(_nothing_in(path))
    _check_shards(files)
    return merged(file_entries(file) for file in files)


def merged(parts: Iterator[dict[str, Entry]]) -> dict[str, Entry]:
    """The entries of several files; TierError where two hold the same tensor."""
    entries: dict[str, Entry] = {}
    for part in parts:
        for name, entry in part.items():
            if name in entries:
                raise TierError(
                    f"expected every tensor in one file, found {name!r} in both {str(entries[name].path)!r} and "
                    f"{str(entry.path)!r}; remove one of the files, or give the path of the one that is meant"
                )
            entries[name] = entry
    return entries


def file_entries(path: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file, in the order of their data."""
    header, start, size = _read_header(path)
    found = [_entry(path, name, fields, start) for name, fields in header.items() if name != METADATA]
    # A tensor without bytes shares its offset with the next one, and goes first.
    found.sort(key=lambda entry: (entry.offset, entry.nbytes))
    position = start
    for entry in found:
        if entry.offset != position:
            problem = "overlaps the one before it" if entry.offset < position else "leaves a gap before it"
            raise _torn(path, "tensors that follow each other", f"{entry.name!r} that {problem}")
        position += entry.nbytes
    if position != size:
        raise _torn(path, f"{position} bytes, as its header says", f"{size}")
    return {entry.name: entry for entry in found}


def read_json(path: Path) -> Any:
    """A JSON file; TierError where it cannot be read."""
    try:
        return json.loads(path.read_bytes(), object_pairs_hook=_no_twins)
    except OSError as error:
        raise _unreadable(path, error) from error
    except ValueError as error:  # also what is no UTF-8
        raise _torn(path, "JSON", str(error)) from error


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous cpu tensor; the caller keeps the tensor alive.

    Made from the address: `numpy()` would make the storage of the tensor impossible to resize for good.
    """
    assert tensor.device.type == "cpu" and tensor.is_contiguous(), "bytes are moved from and to plain cpu memory"
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())).cast("B")


def _close(fds: dict[Path, int]) -> None:
    while fds:
        os.close(fds.popitem()[1])


class Reader:
    """Reads the bytes of entries and keeps none: not in memory, not in the page cache. Threads may share one."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self._fds: dict[Path, int] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._fds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        with self._lock:
            _close(self._fds)

    def read(self, entry: Entry, begin_byte: int, out: Tensor) -> None:
        """Fill `out` (uint8, cpu, contiguous) with the bytes of the tensor from `begin_byte`."""
        into = raw_bytes(out)
        assert out.dtype == torch.uint8, "bytes are read as bytes"
        assert 0 <= begin_byte <= entry.nbytes - len(into), f"{entry.name}: a read past its end"
        fd = self._open(entry.path)
        begin, done = entry.offset + begin_byte, 0
        while done < len(into):
            try:
                got = os.preadv(fd, [into[done:]], begin + done)
            except OSError as error:
                raise _unreadable(entry.path, error) from error
            if got == 0:
                raise _torn(entry.path, f"{len(into)} bytes of {entry.name!r} at offset {begin}", f"{done}")
            done += got
        # The kernel drops whole pages only: the first is taken along with what was read before, the last is left for
        # the read that goes on there.
        first = begin // _CACHE_PAGE * _CACHE_PAGE
        os.posix_fadvise(fd, first, begin + done - first, os.POSIX_FADV_DONTNEED)
        with self._lock:
            self.bytes_read += done

    def pieces(self, entry: Entry, piece_bytes: int = PIECE_BYTES) -> Iterator[tuple[int, Tensor]]:
        """The tensor as (index of the first element, flat typed piece); a piece is only good until the next one."""
        itemsize = entry.dtype.itemsize
        step = max(1, piece_bytes // itemsize) * itemsize
        buffer = torch.empty(min(step, entry.nbytes), dtype=torch.uint8, device="cpu")
        for begin in range(0, entry.nbytes, step):
            piece = buffer[: min(step, entry.nbytes - begin)]
            self.read(entry, begin, piece)
            yield begin // itemsize, piece.view(entry.dtype)

    def _open(self, path: Path) -> int:
        with self._lock:
            if path not in self._fds:
                try:
                    self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise _unreadable(path, error) from error
            return self._fds[path]


def _indexed(index: Path) -> dict[str, Entry]:
    """What an index file lists, from its shards; a shard may hold more."""
    found = read_json(index)
    weight_map = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise _torn(index, "a weight_map of tensor names to files", "none")
    shards: dict[str, dict[str, Entry]] = {}
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file or not (index.parent / file).exists():
            raise _torn(index, "files beside it", f"{file!r}, which is not there")
        shards[file] = file_entries(index.parent / file)
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise _torn(index.parent / file, f"tensor {name!r}, as {index.name} says", "no such tensor")
    return {name: shards[file][name] for name, file in weight_map.items()}


def _check_shards(files: list[Path]) -> None:
    """Files that say "2 of 3" must be all there: without an index, nothing else tells."""
    groups: dict[tuple[str, int], list[Path]] = {}
    for file in files:
        if found := re.fullmatch(r"(.+)-\d+-of-(\d+)\.safetensors", file.name):
            groups.setdefault((found[1], int(found[2])), []).append(file)
    for (name, count), group in groups.items():
        if len(group) != count:
            raise _torn(group[0].parent, f"{count} files of {name!r}", f"{len(group)} and no index")


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header, where the data starts, and the size of the file."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                found = f"{length if size >= 8 else 'none'} (is it a file of safetensors?)"
                raise _torn(path, f"a header of at most {max(0, size - 8)} bytes", found)
            text = file.read(length)
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        header = json.loads(text, object_pairs_hook=_no_twins)
    except ValueError as error:
        raise _torn(path, "a header in JSON", str(error)) from error
    if not isinstance(header, dict):
        raise _torn(path, "a header with the names of tensors", type(header).__name__)
    return header, 8 + length, size


def _entry(path: Path, name: str, fields: Any, start: int) -> Entry:
    match fields:
        case {"dtype": str(kind), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if (
            all(isinstance(n, int) and n >= 0 for n in shape) and 0 <= begin <= end
        ):
            pass
        case _:
            raise _torn(path, f"dtype, shape and data_offsets of {name!r}", repr(fields))
    if kind not in DTYPES:
        raise ModelError(
            f"expected tensors of {', '.join(DTYPES)}, found {kind} for {name!r} in {str(path)!r}; "
            f"convert the file to one of these"
        )
    expected = math.prod(shape) * DTYPES[kind].itemsize
    if end - begin != expected:
        raise _torn(path, f"{expected} bytes for {name!r} ({kind}, {shape})", f"{end - begin}")
    return Entry(name, DTYPES[kind], tuple(shape), path, start + begin, expected)


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def _nothing_in(path: Path) -> str:
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in path.glob(pattern))
    found, cure = "none", "give the folder that has them"
    if pickles:
        more = f" and {len(pickles) - 1} more" if len(pickles) > 1 else ""
        found = f"only pickles ({pickles[0]}{more})"
        cure = "convert them: load them with torch or transformers, and save_pretrained(safe_serialization=True)"
    return f"expected *.safetensors in {str(path)!r}, found {found}; {cure}"


def _unreadable(path: Path, error: OSError) -> TierError:
    return TierError(f"expected to read {str(path)!r}, found: {error.strerror}; check the path and the disk")


def _torn(path: Path, expected: str, found: str) -> TierError:
    return TierError(
        f"expected {expected} in {str(path)!r}, found {found}; the file is damaged or incomplete, copy or save it again"
    )
