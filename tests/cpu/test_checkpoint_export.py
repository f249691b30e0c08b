"""Exported models: named and cut as Hugging Face does, and read by the safetensors library."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from overspill.checkpoint.export import plan_shards, write_export
from overspill.checkpoint.tensorfile import Reader, entries_of
from overspill.checkpoint.writer import Stored, stored
from overspill.errors import ModelError, StateError, TierError


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def model(count: int = 5) -> list[Stored]:
    return [stored(f"layer.{n}", torch.full((10,), float(n))) for n in range(count)]


def shard_names(tensors: list[Stored], max_bytes: int) -> dict[str, list[str]]:
    return {file: [tensor.name for tensor in shard] for file, shard in plan_shards(tensors, max_bytes)}


def test_shards_are_named_as_hugging_face_does() -> None:
    assert shard_names(model(), 200) == {"model.safetensors": [f"layer.{n}" for n in range(5)]}
    assert shard_names([], 200) == {"model.safetensors": []}
    assert shard_names(model(), 80) == {
        "model-00001-of-00003.safetensors": ["layer.0", "layer.1"],
        "model-00002-of-00003.safetensors": ["layer.2", "layer.3"],
        "model-00003-of-00003.safetensors": ["layer.4"],
    }
    assert len(shard_names(model(), 1)) == 5, "a tensor is never cut"


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("max_bytes", [80, 1000])
def test_an_exported_model_is_read_by_others(tmp_path: Path, existing: bool, max_bytes: int) -> None:
    path = tmp_path / "sub" / "model"
    if existing:
        path.mkdir(parents=True)
        (path / "config.json").write_text("{}")
    write_export(path, model(), max_bytes)
    found = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    assert {name: tensor[0].item() for name, tensor in found.items()} == {f"layer.{n}": n for n in range(5)}
    assert (path / "config.json").exists() == existing
    if max_bytes == 80:
        index = json.loads((path / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": 200}
        assert index["weight_map"]["layer.4"] == "model-00003-of-00003.safetensors"
    assert names(path.parent) == ["model"] and not list(path.glob(".*"))
    with Reader() as reader:
        for name, entry in entries_of(path).items():
            ((_, piece),) = reader.pieces(entry)
            assert torch.equal(piece, found[name])
    write_export(path, model(3), 1000)
    written = [name for name in names(path) if name.startswith("model")]
    assert written == ["model.safetensors"], "an earlier model is replaced, whatever its shards"
    with safe_open(path / "model.safetensors", "pt") as opened:
        assert len(list(opened.keys())) == 3


def test_exports_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"found 'layer\.0' twice"):
        write_export(tmp_path / "a", [*model(3), *model(1)], 40)
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match="found a file"):
        write_export(tmp_path / "file", model())
    assert names(tmp_path) == ["file"]


def test_shards_without_index_must_be_all_there(tmp_path: Path) -> None:
    write_export(tmp_path / "a", model(), 80)
    (tmp_path / "a" / "model.safetensors.index.json").unlink()
    assert len(entries_of(tmp_path / "a")) == 5
    (tmp_path / "a" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(TierError, match=r"expected 3 files of 'model' .*found 2 and no index"):
        entries_of(tmp_path / "a")
