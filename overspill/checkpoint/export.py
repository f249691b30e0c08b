"""Plain safetensors in the layout of Hugging Face: one file, or shards of limited size and an index."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from overspill.checkpoint.staging import LOCK, disk_errors, fsync_folder, move_in, staged
from overspill.checkpoint.tensorfile import INDEX_FILE, MODEL_FILE
from overspill.checkpoint.writer import Stored, check_names, check_room, write_tensors
from overspill.errors import StateError

MAX_SHARD_BYTES = 5 * 1000**3
REPLACED = ".replaced"
"""How the files of an earlier model end until the new one is complete."""
_WRITTEN = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")


def plan_shards(tensors: Sequence[Stored], max_bytes: int = MAX_SHARD_BYTES) -> list[tuple[str, list[Stored]]]:
    """Cut the tensors, in their order, into files of at most `max_bytes`; a larger tensor has a file of its own."""
    shards: list[list[Stored]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.nbytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    if len(shards) == 1:
        return [(MODEL_FILE, shards[0])]
    return [(f"model-{n:05}-of-{len(shards):05}.safetensors", shard) for n, shard in enumerate(shards, start=1)]


def write_export(path: str | os.PathLike[str], tensors: Sequence[Stored], max_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write the files of a model to a folder. A model that is there is replaced when the new one is complete; other
    files stay as they are."""
    path = Path(path).resolve()
    check_names(tensors)
    shards = plan_shards(tensors, max_bytes)
    with disk_errors(f"export a model to {str(path)!r}"):
        _check_target(path)
        is_new = not path.exists()
        # An existing folder may be the root of a disk, so its files are staged inside it.
        parent = path.parent if is_new else path
        parent.mkdir(parents=True, exist_ok=True)
        check_room(parent, sum(tensor.nbytes for tensor in tensors), path)
        with staged(parent, path.name) as folder:
            for file, shard in shards:
                write_tensors(folder / file, shard, {"format": "pt"})
            if len(shards) > 1:
                _write_index(folder / INDEX_FILE, shards)
            fsync_folder(folder)
            if is_new:
                move_in(folder, path)
            else:
                _move_files(folder, path)


def _check_target(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise StateError(f"expected a folder at {str(path)!r}, found a file; give another path")


def _write_index(path: Path, shards: Sequence[tuple[str, Sequence[Stored]]]) -> None:
    weight_map = {tensor.name: file for file, shard in shards for tensor in shard}
    total = sum(tensor.nbytes for _file, shard in shards for tensor in shard)
    with open(path, "x", encoding="utf-8") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, file, indent=2, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())


def _move_files(folder: Path, path: Path) -> None:
    """The model that was there goes first, its index before its shards, and the new index comes last: an interrupted
    export is not taken for a model. The old one is gone only when the new one is there."""
    *shards, last = sorted((file.name for file in folder.iterdir() if file.name != LOCK), key=lambda n: n == INDEX_FILE)
    old = [file.name for file in path.iterdir() if _WRITTEN.fullmatch(file.name)]
    for file in sorted(old, key=lambda n: n != INDEX_FILE):
        os.rename(path / file, path / f"{file}{REPLACED}")
    for file in shards:
        os.rename(folder / file, path / file)
    fsync_folder(path)
    os.rename(folder / last, path / last)
    fsync_folder(path)
    for kept in path.iterdir():
        # Also what an interrupted export left.
        if kept.name.endswith(REPLACED) and _WRITTEN.fullmatch(kept.name.removesuffix(REPLACED)):
            os.unlink(kept)
