"""A checkpoint folder: tensor files and a manifest, there whole or not at all, whenever the process is killed.

Note [swap]. A new checkpoint is written beside its path and renamed in, see Note [staging]. Where it replaces an older
one, that one is marked and renamed to `PATH.old`, the new one is renamed in, and the old one is removed. Killed
between the renames, only the old one is there, under `PATH.old`: `open_folder` reads it there and the next save takes
it back, with what the user has put at the path meanwhile, as if that had been put into the old one; what would take the
place of the old one's own files, or of a folder, is refused, and all stays where it is. Killed after them, both are
there, and the next save removes the old one. The mark tells it from a folder of that name that the user made, which is
never touched. Other files of the user's in the old one are linked into the new one before the renames, and once more
after them, so that they are there whenever the process is killed.
"""

import contextlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from overspill.checkpoint.packing import pack, unpack
from overspill.checkpoint.staging import (
    LOCK,
    clashes,
    copied_bytes,
    discard,
    disk_errors,
    fsync_folder,
    leftovers,
    link_others,
    move_in,
    staged,
)
from overspill.checkpoint.tensorfile import (
    DTYPES,
    INDEX_FILE,
    MODEL_FILE,
    PIECE_BYTES,
    Entry,
    Reader,
    file_entries,
    merged,
    raw_bytes,
    read_json,
)
from overspill.checkpoint.writer import DTYPE_NAMES, Stored, check_names, check_room, stored, write_tensors
from overspill.errors import ModelError, StateError, TierError

MANIFEST = "manifest.json"
BODY_FILE = "body.safetensors"
_FORMAT = "overspill checkpoint"
_VERSION = 1
_MARK = ".replaced"
_NAMES = frozenset({MANIFEST, _MARK, LOCK})

log = logging.getLogger("overspill")


@dataclass(frozen=True, slots=True)
class Saved:
    """An open checkpoint; its files are opened as they are read, and closed with it."""

    path: Path
    manifest: dict[str, Any]
    entries: dict[str, Entry]
    """Every tensor of every file."""
    reader: Reader

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.reader.close()

    def body(self) -> Any:
        """What `save_folder` was given as body, its tensors on cpu."""
        return unpack(self.manifest["body"], self.tensor)

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, verified."""
        entry = self.entry(name)
        flat = torch.empty(entry.nbytes // entry.dtype.itemsize, dtype=entry.dtype, device="cpu")
        for first, piece in self.pieces(name):
            flat[first : first + piece.numel()].copy_(piece)
        return flat.reshape(entry.shape)

    def pieces(self, name: str, piece_bytes: int = PIECE_BYTES) -> Iterator[tuple[int, Tensor]]:
        """The tensor as (index of the first element, flat typed piece), each only good until the next one.

        The last is given only when the checksum of the whole is right; else TierError.
        """
        entry = self.entry(name)
        expected = self.manifest["files"][entry.path.name]["tensors"][name]["crc32"]
        crc = done = 0
        for first, piece in self.reader.pieces(entry, piece_bytes):
            data = raw_bytes(piece)
            crc, done = zlib.crc32(data, crc), done + len(data)
            if done == entry.nbytes and crc != expected:
                raise TierError(
                    f"expected crc32 {expected:08x} of tensor {name!r} in {str(entry.path)!r}, found {crc:08x}; its "
                    f"bytes have changed since they were saved, load another checkpoint. {_others(self.path)}"
                )
            yield first, piece

    def entry(self, name: str) -> Entry:
        if name not in self.entries:
            raise ModelError(
                f"expected tensor {name!r} in checkpoint {str(self.path)!r}, found {len(self.entries)} others; "
                f"load the checkpoint of this model"
            )
        return self.entries[name]


def save_folder(path: str | os.PathLike[str], files: Mapping[str, Sequence[Stored]], body: Any) -> None:
    """Write a checkpoint, safe on disk on return; until then one that was at `path` stays, see Note [swap].

    `files` are tensors by the name of their file; `body` is whatever `pack` takes, and its tensors get their own file.
    """
    path = Path(path).resolve()
    # Parameters may be named body.0, as those of a list are.
    packed, tensors = pack(body, "$body")
    every = {**files, **({BODY_FILE: [stored(name, tensor) for name, tensor in tensors.items()]} if tensors else {})}
    assert all(file == Path(file).name and file.endswith(".safetensors") for file in every), f"odd names: {[*every]}"
    check_names(tensor for group in every.values() for tensor in group)
    with disk_errors(f"save a checkpoint at {str(path)!r}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        _finish_swap(path)
        replaces = _check_target(path, every)
        with staged(path.parent, path.name) as folder:
            copied = copied_bytes(path, folder, _own(path)) if replaces else 0
            check_room(folder, copied + sum(tensor.nbytes for group in every.values() for tensor in group), path)
            listed = {file: _write_file(folder / file, group) for file, group in every.items()}
            _write_manifest(folder, {"format": _FORMAT, "version": _VERSION, "files": listed, "body": packed})
            _swap_in(folder, path)


def open_folder(path: str | os.PathLike[str]) -> Saved:
    """Open a checkpoint after a look at every file's header and size; checksums are verified as tensors are read."""
    path = Path(path).resolve()
    with disk_errors(f"load the checkpoint {str(path)!r}"):
        folder = path
        if not _is_checkpoint(path) and (_old(path) / _MARK).exists():
            folder = _old(path)
            log.warning("%s was being replaced when its process was killed; reading the old one, %s", path, folder)
        try:
            return _open(folder)
        except TierError as error:
            raise TierError(f"cannot load {str(path)!r}: {error}. {_others(path)}") from error


# ---- writing


def _check_target(path: Path, files: Collection[str]) -> bool:
    """Whether a checkpoint of these files replaces one that is there."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return False
    if not _is_checkpoint(path):
        raise StateError(
            f"expected a new folder or a checkpoint at {str(path)!r}, found other files; they are left alone, "
            f"give another path"
        )
    if taken := sorted({file.name for file in path.iterdir()} & {*files} - _own(path)):
        raise StateError(
            f"expected nothing of your own at {str(path)!r} that is named as a file of this save, found {taken[0]!r}, "
            "which is not of the checkpoint there; move it away"
        )
    if _old(path).exists():
        raise StateError(
            f"expected {str(_old(path))!r} to be free while {path.name!r} is replaced, found something that was not "
            f"put there by a save; move it away"
        )
    return True


def _write_file(path: Path, tensors: Sequence[Stored]) -> dict[str, Any]:
    sums = write_tensors(path, tensors, {})
    # Shapes and types are in the file as well; here they are under the checksum of the manifest.
    listed = {t.name: {"dtype": DTYPE_NAMES[t.dtype], "shape": list(t.shape), "crc32": sums[t.name]} for t in tensors}
    return {"bytes": path.stat().st_size, "tensors": listed}


def _write_manifest(folder: Path, content: dict[str, Any]) -> None:
    text = json.dumps({**content, "crc32": _checksum(content)}, indent=1, allow_nan=False)
    with open(folder / MANIFEST, "x", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def _swap_in(folder: Path, path: Path) -> None:
    old = _old(path)
    replaces = _is_checkpoint(path)
    own = _own(path) if replaces else set()
    if replaces:
        link_others(path, folder, own)
        shutil.copymode(path, folder)
    fsync_folder(folder)
    if replaces:
        (path / _MARK).touch()
        fsync_folder(path)
        os.rename(path, old)
    try:
        move_in(folder, path)
    except BaseException:
        if replaces and not path.exists():
            os.rename(old, path)
        raise
    if replaces:
        link_others(old, path, own)
        discard(old, path.name)


def _own(folder: Path) -> set[str]:
    """The names of what belongs to a checkpoint in its folder."""
    files = read_json(folder / MANIFEST).get("files")
    return {*(files if isinstance(files, dict) else {f.name for f in folder.glob("*.safetensors")}), *_NAMES}


def _finish_swap(path: Path) -> None:
    """Bring what a killed process has left half swapped into order."""
    old = _old(path)
    if not (old / _MARK).exists():
        return
    if _is_checkpoint(path):
        link_others(old, path, _own(old))
        discard(old, path.name)
        return
    if path.exists():
        # Made since by the user: it is none of a save that was killed.
        own = _own(old)
        _refuse_clashes(path, old, own)
        link_others(path, old, own, newer=True)
        discard(path, path.name)
    os.rename(old, path)
    (path / _MARK).unlink()


def _refuse_clashes(path: Path, old: Path, own: Collection[str]) -> None:
    found = [*clashes(path, old, own)] if path.is_dir() else [path]
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise StateError(
            f"expected nothing in the way of the checkpoint {str(old)!r}, which goes back to {str(path)!r} because a "
            f"save that would have replaced it was killed, found {str(found[0])!r}{more}; nothing was touched, move "
            "that to another place"
        )


def _old(path: Path) -> Path:
    return path.with_name(path.name + ".old")


# ---- reading


def _open(folder: Path) -> Saved:
    manifest = _read_manifest(folder)
    entries = merged(_check_file(folder / file, listed) for file, listed in manifest["files"].items())
    return Saved(folder, manifest, entries, Reader())


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.exists() and any((folder / name).exists() for name in (MODEL_FILE, INDEX_FILE)):
        raise TierError(
            f"expected a checkpoint of overspill.save at {str(folder)!r}, found plain safetensors; give that folder to "
            "prepare as weights="
        )
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise TierError(f"expected the manifest of a checkpoint in {str(path)!r}, found another file; give its folder")
    version = content.get("version")
    if version != _VERSION:
        raise TierError(
            f"expected a checkpoint of version {_VERSION} at {str(folder)!r}, found {version!r}; "
            f"load it with the overspill that wrote it, or a newer one"
        )
    if content.pop("crc32", None) != _checksum(content):
        raise TierError(f"expected {str(path)!r} as it was saved, found it changed; load another checkpoint")
    return content


def _check_file(path: Path, listed: dict[str, Any]) -> dict[str, Entry]:
    if not path.exists():
        raise TierError(f"expected the file {str(path)!r}, found it missing; load another checkpoint")
    size = path.stat().st_size
    if size != listed["bytes"]:
        raise TierError(f"expected {listed['bytes']} bytes in {str(path)!r}, found {size}; load another checkpoint")
    entries = file_entries(path)
    expected = {name: (DTYPES[t["dtype"]], tuple(t["shape"])) for name, t in listed["tensors"].items()}
    found = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    if found != expected:
        names = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise TierError(
            f"expected the tensors of {MANIFEST} in {str(path)!r}, found another {names[0]!r}; load another checkpoint"
        )
    return entries


def _is_checkpoint(folder: Path) -> bool:
    """Whether it is one of ours, whole or not. OSError where that cannot be told."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return False
    return isinstance(content, dict) and content.get("format") == _FORMAT


def _others(path: Path) -> str:
    """What else there is to load: the newest whole checkpoint beside `path`, and whether a save was interrupted."""
    if not path.parent.is_dir():
        return "Its parent folder does not exist"
    interrupted = "A save to it was interrupted. " if leftovers(path.parent, path.name) else ""
    beside = []
    for folder in path.parent.glob("[!.]*"):
        with contextlib.suppress(OSError):
            if folder != path and _is_checkpoint(folder):
                beside.append(((folder / MANIFEST).stat().st_mtime, folder))
    for _, folder in sorted(beside, reverse=True):
        with contextlib.suppress(TierError, OSError):
            return f"{interrupted}The checkpoint {str(_open(folder).path)!r} beside it is intact"
    return f"{interrupted}No other checkpoint is beside it"


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
