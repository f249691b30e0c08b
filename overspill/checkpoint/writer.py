"""Writes safetensors piece by piece. Sizes are known ahead, so the header goes first and the data follows as it comes.

Note [cache of written files]. Telling the kernel that written pages are not needed starts to write the dirty ones and
drops the clean ones, without waiting. Repeated from the start of the file after every piece it keeps the page cache
small while the disk is always busy.
"""

import contextlib
import errno
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from overspill.checkpoint.tensorfile import DTYPES, METADATA, PIECE_BYTES, raw_bytes
from overspill.errors import ModelError, TierError
from overspill.specs import MiB, align, human
from overspill.tiers import disk_free

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BUFFER = 4 * MiB  # gathers small pieces; larger ones are written from where they are
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor that is to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Tensor]]
    """Gives flat cpu tensors of `dtype` in row-major order; each may reuse the memory of the one before."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_NAMES:
            raise ModelError(
                f"expected a tensor of {', '.join(DTYPES)}, found {self.dtype} for {self.name!r}; "
                f"safetensors has no such type, convert it"
            )

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def stored(name: str, tensor: Tensor, piece_bytes: int = PIECE_BYTES) -> Stored:
    """A tensor that is whole in memory, on any device."""

    def pieces() -> Iterator[Tensor]:
        flat = tensor.detach().reshape(-1)
        step = max(1, piece_bytes // flat.element_size())
        for begin in range(0, flat.numel(), step):
            yield flat[begin : begin + step].resolve_conj().resolve_neg().cpu()

    return Stored(name, tensor.dtype, tuple(tensor.shape), pieces)


def write_tensors(path: Path, tensors: Sequence[Stored], metadata: Mapping[str, str]) -> dict[str, int]:
    """Write a new safetensors file, safe on disk on return; gives the crc32 of each tensor's bytes."""
    # Widest first, so that every tensor starts on a multiple of its item size.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header = _header(ordered, metadata)
    check_room(path.parent, total := len(header) + sum(tensor.nbytes for tensor in ordered), path)
    opened = _new_file(path)
    try:
        # Closing flushes once more, and may fail as a write does: so the handlers are outside.
        with opened as file:
            file.write(header)
            sums = {tensor.name: _write_tensor(file, tensor, path) for tensor in ordered}
            file.flush()
            os.fsync(file.fileno())
            _drop_cache(file)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(path)
        if isinstance(error, OSError) and error.errno in _FULL:
            raise _no_room(path, total, disk_free(path.parent), str(error.strerror)) from error
        if isinstance(error, OSError):
            raise TierError(f"expected to write {str(path)!r}, found: {error}; check the disk") from error
        raise
    return sums


def check_names(tensors: Iterable[Stored]) -> None:
    """ModelError unless every tensor has a name of its own."""
    seen = {METADATA}  # reserved by the format
    for tensor in tensors:
        if tensor.name in seen:
            raise ModelError(
                f"expected a name of its own for every tensor, found {tensor.name!r} twice or reserved; rename one"
            )
        seen.add(tensor.name)


def check_room(folder: Path, nbytes: int, path: Path) -> None:
    """TierError unless the disk of `folder` has room for `nbytes` at `path`."""
    free = disk_free(folder)
    if nbytes > free:
        raise _no_room(path, nbytes, free, "the disk is too full")


def _header(tensors: Sequence[Stored], metadata: Mapping[str, str]) -> bytes:
    check_names(tensors)
    fields: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    position = 0
    for tensor in tensors:
        end = position + tensor.nbytes
        dtype = DTYPE_NAMES[tensor.dtype]
        fields[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    text = text.ljust(align(len(text), 8))  # with spaces, so that the data is aligned
    return len(text).to_bytes(8, "little") + text


def _new_file(path: Path) -> BinaryIO:
    try:
        return open(path, "xb", buffering=_BUFFER)
    except OSError as error:
        raise TierError(
            f"expected to make the new file {str(path)!r}, found: {error.strerror}; give another path"
        ) from error


def _write_tensor(file: BinaryIO, tensor: Stored, path: Path) -> int:
    total = crc = 0
    expected = tensor.nbytes
    for piece in tensor.pieces():
        data = piece.detach().contiguous()
        assert data.dtype == tensor.dtype, f"{tensor.name}: pieces of {data.dtype}, not {tensor.dtype}"
        view = raw_bytes(data)
        total += len(view)
        if total > expected:
            break
        crc = zlib.crc32(view, crc)
        before = file.tell()
        file.write(view)
        if file.tell() // PIECE_BYTES > before // PIECE_BYTES:
            _drop_cache(file)
    if total != expected:
        raise ModelError(
            f"expected pieces of {expected} bytes in all for {tensor.name!r} in {str(path)!r}, found "
            f"{'at least ' if total > expected else ''}{total}; the tensor changed while it was saved"
        )
    return crc


def _drop_cache(file: BinaryIO) -> None:
    # See Note [cache of written files]. Length 0 is up to the end.
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _no_room(path: Path, needed: int, free: int, found: str) -> TierError:
    return TierError(
        f"expected room for {needed} bytes ({human(needed)}) at {str(path)!r}, found {free} bytes free "
        f"({human(free)}): {found}; free some space or give another path"
    )
