"""Checkpoint folders: there whole or not at all, checked when opened and read; values packed without pickle."""

import collections
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from overspill.checkpoint.folder import MANIFEST, Saved, open_folder, save_folder
from overspill.checkpoint.packing import pack, unpack
from overspill.checkpoint.staging import staged
from overspill.checkpoint.writer import Stored, stored
from overspill.errors import ModelError, StateError, TierError

# ---- values


def there_and_back(value: Any) -> Any:
    packed, tensors = pack(value)
    return unpack(json.loads(json.dumps(packed, allow_nan=False)), tensors.__getitem__)


def assert_same(found: Any, expected: Any) -> None:
    """Equal, and of the same types all the way down."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert [*found] == [*expected] and [type(k) for k in found] == [type(k) for k in expected]
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    elif isinstance(expected, np.ndarray | np.generic):
        assert found.dtype == expected.dtype and found.shape == expected.shape and np.array_equal(found, expected)
    else:
        assert repr(found) == repr(expected)  # tells nan from nan and -0.0 from 0.0


VALUES: dict[str, Any] = {
    "floats": [0.1, 1e-320, -0.0, 1 / 3, 1.7976931348623157e308, float("inf"), float("-inf"), float("nan"), 2.0],
    "plain": [None, True, False, 0, -1, 2**200, "", "ü\n\ud800 $x", [], {}, ()],
    "nested": {"a": [({"b": (1, [2])},)], "": {}},
    "keys": {2: "int", True: "bool", 1.5: "float", None: "none", (1, ("a",)): "tuple", "1": "text"},
    "dollar": {"$tensor": "no tensor", "x": {"$tuple": [1]}},
    "dicts": [collections.OrderedDict(b=1, a=2), collections.Counter({30: 1, 80: 2}), collections.OrderedDict()],
    "random": [random.Random(3).getstate(), np.random.RandomState(3).get_state(), torch.Generator().get_state()],
    "generator": np.random.default_rng(3).bit_generator.state,
    "tensors": [torch.tensor(3.5), torch.ones(0, 2), torch.ones(2, 3, dtype=torch.bfloat16), (torch.tensor(True),)],
    "arrays": [np.arange(6).reshape(2, 3).T, np.float64(0.1), np.int8(-3), np.bool_(True), np.array(2, dtype="u2")],
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_come_back_as_they_were(kind: str) -> None:
    assert_same(there_and_back(VALUES[kind]), VALUES[kind])


def test_the_state_of_torch_schedulers_can_be_packed() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    for scheduler in (
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5]),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    ):
        state = scheduler.state_dict()
        assert there_and_back(state) == state


def frozen_array() -> Any:
    array = np.ones(3)
    array.flags.writeable = False
    return array


@pytest.mark.filterwarnings("error")
def test_a_read_only_array_and_a_parameter() -> None:
    assert_same(there_and_back(frozen_array()), np.ones(3))
    assert_same(there_and_back(torch.nn.Parameter(torch.ones(2)))[0:2].detach(), torch.ones(2))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {"b": object()}]}, r"found builtins\.object at body\['a'\]\[1\]\['b'\]"),
        ({"a": (1, {2})}, r"found builtins\.set at body\['a'\]\[1\]"),
        ([lambda: 0], r"found builtins\.function at body\[0\]"),
        ([b"raw"], r"found builtins\.bytes at body\[0\]"),
        (collections.defaultdict(int), r"found collections\.defaultdict at body"),
        ({torch.ones(1): 1}, "at a key of body"),
        ({frozenset(): 1}, "at a key of body"),
        ([torch.ones(1, dtype=torch.complex128)], "a tensor .*complex128.* at body"),
        ([torch.ones(2).to_sparse()], "a tensor .*sparse"),
        ([torch.ones(2, device="meta")], "a tensor .*meta"),
        ([np.array(["text"])], "found numpy values of <U4"),
        ([np.array([None])], "found numpy values of object"),
        ([np.ones(2, dtype=">f4")], "found numpy values of >f4"),
        ([np.ones(2, dtype=np.complex128)], "found numpy values of complex128"),
    ],
)
def test_anything_else_is_refused_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        pack(value)


# ---- folders

TENSORS = {"w": torch.arange(1000.0).reshape(10, 100), "empty": torch.ones(0), "h": torch.ones(7, dtype=torch.bfloat16)}


def save(path: Path, value: float = 1.0) -> None:
    files = {
        "weights.safetensors": [stored(name, tensor * value) for name, tensor in TENSORS.items()],
        "states.safetensors": [stored("m", torch.full((33,), value))],
    }
    save_folder(path, files, {"value": value, "rng": torch.tensor([value])})


def value_of(path: Path) -> float:
    with open_folder(path) as saved:
        for name, tensor in TENSORS.items():
            assert torch.equal(saved.tensor(name), tensor * saved.body()["value"])
        assert saved.tensor("m").unique().tolist() == saved.body()["rng"].tolist() == [saved.body()["value"]]
        return float(saved.body()["value"])


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_checkpoint_comes_back_and_is_plain_safetensors_and_json(tmp_path: Path) -> None:
    path = tmp_path / "run" / "checkpoints" / "step 1"
    save(path, 2.0)
    assert value_of(path) == 2.0
    assert names(path.parent) == ["step 1"]
    assert names(path) == ["body.safetensors", MANIFEST, "states.safetensors", "weights.safetensors"]
    assert torch.equal(load_file(path / "weights.safetensors")["w"], TENSORS["w"] * 2)
    assert json.loads((path / MANIFEST).read_text())["body"]["value"] == 2.0
    with open_folder(path) as saved:
        assert saved.entries.keys() == {*TENSORS, "m", "$body.0"}
        assert [(first, len(piece)) for first, piece in saved.pieces("w", 1601)] == [(0, 400), (400, 400), (800, 200)]
        assert list(saved.pieces("empty")) == []
        assert saved.reader.bytes_read == 4000
        with pytest.raises(ModelError, match="expected tensor 'nothing'"):
            saved.tensor("nothing")


def test_an_existing_checkpoint_is_replaced(tmp_path: Path) -> None:
    save(tmp_path / "a")
    save(tmp_path / "a", 2.0)
    assert value_of(tmp_path / "a") == 2.0 and names(tmp_path) == ["a"]
    (tmp_path / "latest").symlink_to("a")
    save(tmp_path / "latest", 3.0)
    assert value_of(tmp_path / "a") == 3.0 and names(tmp_path) == ["a", "latest"]


@pytest.mark.parametrize("linked", [True, False])
def test_what_the_user_puts_into_a_checkpoint_stays(
    linked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not linked:
        refuse_links(monkeypatch)
    path = tmp_path / "latest"
    save(path, 1.0)
    own = {found.name for found in path.iterdir()}
    (path / "tokenizer.json").write_text("{}")
    (path / "model").mkdir()
    (path / "model" / "config.json").write_text("[]")
    (path / "newest").symlink_to("model")
    save(path, 2.0)
    save(path, 3.0)
    assert {found.name for found in path.iterdir()} == own | {"tokenizer.json", "model", "newest"}
    assert (path / "tokenizer.json").read_text() == "{}" and (path / "newest" / "config.json").read_text() == "[]"
    assert (path / "newest").is_symlink() and [found.name for found in tmp_path.iterdir()] == ["latest"]
    assert value_of(path) == 3.0


def refuse_links(patched: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **more: Any) -> None:
        raise OSError("no links on this file system")

    patched.setattr(os, "link", refuse)


def test_folders_of_the_user_stay_as_closed_and_as_old_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "latest"
    save(path, 1.0)
    path.chmod(0o700)
    (path / "mine" / "inner").mkdir(parents=True)
    (path / "mine" / "inner" / "secret").touch()
    for folder in (path / "mine" / "inner", path / "mine"):
        folder.chmod(0o700)
        os.utime(folder, (1e9, 1e9))
    for value in (2.0, 3.0):
        save(path, value)
        for folder in (path / "mine", path / "mine" / "inner"):
            assert (folder.stat().st_mode & 0o777, folder.stat().st_mtime) == (0o700, 1e9)
        assert path.stat().st_mode & 0o777 == 0o700


def replaced_by_nobody(elsewhere: str) -> None:
    """As a user who may not write where only root may."""
    if os.getuid() == 0:
        os.setuid(65534)
    with tempfile.TemporaryDirectory() as parent:
        path, closed = Path(parent) / "latest", Path(parent) / "latest" / "closed" / "inner"
        save(path, 1.0)
        closed.mkdir(parents=True)
        (closed / "kept").touch()
        (path / "linked").symlink_to(elsewhere)
        for folder in (closed, closed.parent):
            folder.chmod(0o500)
        for value in (2.0, 3.0):
            save(path, value)
            assert (closed / "kept").exists() and closed.stat().st_mode & 0o777 == 0o500
            assert value_of(path) == value and names(Path(parent)) == ["latest"]
        path.chmod(0o555)
        with pytest.raises(TierError, match="Permission denied"):
            save(path, 4.0)
        assert value_of(path) == 3.0 and names(Path(parent)) == ["latest"]
        for folder in (path, closed.parent, closed):
            folder.chmod(0o700)


def shared_with_another(parent: str) -> None:
    """Who saves may write to a folder of somebody else's, and may not change its mode."""
    path = Path(parent) / "latest"
    save(path, 1.0)
    notes = path / "notes"
    notes.mkdir()
    (notes / "first").touch()
    os.chown(notes, 12345, 12345)
    notes.chmod(0o777)
    os.chown(parent, 65534, 65534)
    for entry in (path, *path.iterdir()):
        if entry != notes:
            os.chown(entry, 65534, 65534)
    os.setuid(65534)
    for value in (2.0, 3.0):
        save(path, value)
        assert value_of(path) == value and names(Path(parent)) == ["latest"] and (notes / "first").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give folders away")
def test_folders_of_somebody_else_are_replaced() -> None:
    with tempfile.TemporaryDirectory() as parent:
        apart = multiprocessing.get_context("fork").Process(target=shared_with_another, args=(parent,))
        apart.start()
        apart.join()
        assert apart.exitcode == 0


def test_folders_that_nobody_may_write_to_are_replaced(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    apart = multiprocessing.get_context("fork").Process(target=replaced_by_nobody, args=(str(tmp_path),))
    apart.start()
    apart.join()
    assert apart.exitcode == 0 and tmp_path.stat().st_mode & 0o777 == 0o555
    tmp_path.chmod(0o755)


@pytest.mark.parametrize("linked", [True, False])
def test_room_is_asked_for_what_is_copied(linked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "latest"
    save(path, 1.0)
    before = sum(file.stat().st_size for file in path.iterdir())
    (path / "model").mkdir()
    (path / "model" / "large").write_bytes(bytes(1 << 20))

    class Nearly:
        f_bavail, f_frsize = before + 4096, 1

    monkeypatch.setattr(os, "statvfs", lambda _path: Nearly)
    if linked:
        save(path, 2.0)
    else:
        refuse_links(monkeypatch)
        with pytest.raises(TierError, match=r"expected room for 105\d{4} bytes .*latest', found \d{4,5} bytes free"):
            save(path, 2.0)
    assert value_of(path) == (2.0 if linked else 1.0)
    assert (path / "model" / "large").stat().st_size == 1 << 20 and names(tmp_path) == ["latest"]


def killed_between_renames(path: Path) -> Path:
    """A checkpoint as a killed save leaves it, which has a file and a folder of the user's."""
    old = path.with_name(f"{path.name}.old")
    save(old)
    (old / "notes").mkdir()
    (old / "notes" / "first").write_text("1")
    (old / "log").write_text("old")
    (old / ".replaced").touch()
    return old


IN_THE_WAY: dict[str, Callable[[Path], Any]] = {
    "a manifest": lambda path: (path / "manifest.json").write_text('{"app": "mine"}'),
    "a folder for a manifest": lambda path: (path / "manifest.json").mkdir(),
    "weights": lambda path: (path / "weights.safetensors").write_text("mine"),
    "a file for a folder": lambda path: (path / "notes").write_text("mine"),
    "a folder for a file": lambda path: (path / "log").mkdir(),
    "a link for a folder": lambda path: (path / "notes").symlink_to("."),
    "a file": lambda path: (path.joinpath("kept").unlink(), path.rmdir(), path.write_text("mine")),
}


@pytest.mark.parametrize("what", IN_THE_WAY)
def test_what_is_in_the_way_of_an_interrupted_checkpoint_is_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    old = killed_between_renames(path)
    path.mkdir()
    (path / "kept").write_text("mine")
    IN_THE_WAY[what](path)
    before = [[*files(path)], [*files(old)]]
    with pytest.raises(StateError, match=r"nothing in the way of .*a\.old', .*found '.*/a.*; .* move that to another"):
        save(path, 2.0)
    assert [[*files(path)], [*files(old)]] == before
    assert value_of(path) == 1.0, "of the old one"
    path.rename(tmp_path / "moved")
    save(path, 2.0)
    assert value_of(path) == 2.0 and names(tmp_path) == ["a", "moved"]
    assert (path / "notes" / "first").read_text() == "1" and (path / "log").read_text() == "old"


def files(path: Path) -> Iterator[tuple[Path, bytes | None]]:
    for found in sorted((path, *path.rglob("*"))):
        yield found, found.read_bytes() if found.is_file() else None


def test_what_is_not_in_the_way_goes_back_with_an_interrupted_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a"
    killed_between_renames(path)
    (path / "notes" / "more").mkdir(parents=True)
    (path / "notes" / "second").write_text("2")
    (path / "notes").chmod(0o700)
    (path / "log").write_text("new")
    save(path, 2.0)
    assert value_of(path) == 2.0 and names(tmp_path) == ["a"]
    assert names(path / "notes") == ["first", "more", "second"] and (path / "log").read_text() == "new"
    assert (path / "notes").stat().st_mode & 0o777 == 0o700


def test_a_manifest_that_cannot_be_read_is_not_one_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a disk fails for a moment: the new checkpoint is whole, and the old one not yet removed."""
    path = tmp_path / "a"
    old = killed_between_renames(path)
    save(tmp_path / "b", 2.0)
    (tmp_path / "b").rename(path)
    read = Path.read_bytes

    def failing(file: Path) -> bytes:
        if file == path / MANIFEST:
            raise OSError(5, "Input/output error")
        return read(file)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", failing)
        with pytest.raises(TierError, match=r"expected to save a checkpoint at .*a'.*Input/output error"):
            save(path, 3.0)
        with pytest.raises(TierError, match=r"expected to load the checkpoint .*a'.*Input/output error"):
            open_folder(path)
        with pytest.raises(TierError, match=r"a\.old' beside it is intact"):
            open_folder(tmp_path / "nothing")
    assert value_of(path) == 2.0 and value_of(old) == 1.0
    save(path, 3.0)
    assert value_of(path) == 3.0 and names(tmp_path) == ["a"]


def test_what_has_the_name_of_a_file_to_come_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save_folder(path, {"weights.safetensors": [stored("w", torch.ones(3))]}, None)
    (path / "states.safetensors").write_text("mine")
    with pytest.raises(StateError, match=r"found 'states\.safetensors', which is not of the checkpoint there"):
        save(path, 2.0)
    assert (path / "states.safetensors").read_text() == "mine"
    (path / "states.safetensors").unlink()
    save(path, 2.0)
    assert value_of(path) == 2.0


def test_what_the_user_put_there_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").touch()
    (tmp_path / "file").touch()
    for name in ("mine", "file"):
        with pytest.raises(StateError, match="found other files"):
            save(tmp_path / name)
    save(tmp_path / "a")
    save(tmp_path / "a.old", 5.0)  # a checkpoint like any other, though it bears the name that a swap uses
    with pytest.raises(StateError, match=r"expected .*a\.old' to be free"):
        save(tmp_path / "a", 2.0)
    assert value_of(tmp_path / "a") == 1.0 and value_of(tmp_path / "a.old") == 5.0
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", 4.0)
    assert value_of(tmp_path / "empty") == 4.0


def test_a_save_that_fails_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a")

    def broken() -> Any:
        yield torch.ones(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_folder(tmp_path / "a", {"x.safetensors": [Stored("x", torch.float32, (9,), broken)]}, None)
    with pytest.raises(ModelError, match="found 'x' twice"):
        group = [stored("x", torch.ones(1))]
        save_folder(tmp_path / "a", {"x.safetensors": group, "y.safetensors": group}, None)
    with monkeypatch.context() as patched:
        rename = os.rename

        def failing(source: Path, target: Path) -> None:
            if "incomplete" in str(source):
                raise OSError(5, "Input/output error")
            rename(source, target)

        patched.setattr(os, "rename", failing)
        with pytest.raises(TierError, match=r"expected to save a checkpoint at .* Input/output error"):
            save(tmp_path / "a", 2.0)

    class Full:
        f_bavail, f_frsize = 1, 512

    monkeypatch.setattr(os, "statvfs", lambda _path: Full)
    with pytest.raises(TierError, match=r"expected room for \d+ bytes .*found 512 bytes free"):
        save(tmp_path / "a", 2.0)
    assert value_of(tmp_path / "a") == 1.0 and names(tmp_path) == ["a"]


def test_staging_folders_of_the_living_stay(tmp_path: Path) -> None:
    with staged(tmp_path, "a") as living:
        dead = tmp_path / ".a.incomplete-1-00ff"
        for folder in (dead, tmp_path / ".b.incomplete-1-00ff", tmp_path / ".a.incomplete"):
            folder.mkdir()
            (folder / "data").touch()
        save(tmp_path / "a")
        assert living.exists() and not dead.exists()
    assert names(tmp_path) == [".a.incomplete", ".b.incomplete-1-00ff", "a"]


def test_a_save_killed_at_any_step_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.killed_saves", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    for outcome in ("'1 at path'", "'1 at old'", "'2 at path'", "'missing'", "'interrupted'", "'whole'", "'nothing'"):
        assert outcome in result.stdout, f"no kill gave {outcome}: {result.stdout}"


def test_a_saved_checkpoint_closes_its_files(tmp_path: Path) -> None:
    save(tmp_path / "a")
    before = len(os.listdir("/proc/self/fd"))
    saved: Saved = open_folder(tmp_path / "a")
    saved.tensor("w")
    assert len(os.listdir("/proc/self/fd")) == before + 1
    saved.close()
    assert len(os.listdir("/proc/self/fd")) == before


# ---- damage


def damage(file: Path, offset: int = -1) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


def test_a_changed_byte_is_found_when_its_tensor_is_read(tmp_path: Path) -> None:
    save(tmp_path / "before")
    save(tmp_path / "a")
    with open_folder(tmp_path / "a") as saved:
        entry = saved.entries["w"]
        damage(entry.path, entry.offset + 3)
        saved.tensor("h")
        given = []
        with pytest.raises(TierError, match=r"of tensor 'w' in .*weights\.safetensors.*before' beside it is intact"):
            given.extend(first for first, _ in saved.pieces("w", 1600))
        assert given == [0, 400], "the last piece is not given"


def refused(path: Path, message: str) -> None:
    with pytest.raises(TierError, match=message) as caught:
        open_folder(path)
    assert "before' beside it is intact" in str(caught.value)


def test_a_torn_checkpoint_is_refused_and_names_an_intact_one(tmp_path: Path) -> None:
    save(tmp_path / "long before")
    save(tmp_path / "before")
    path = tmp_path / "a"
    refused(path, "cannot load .*a': expected to read .*manifest.json', found: No such file")
    save(path)
    os.truncate(path / "states.safetensors", 100)
    refused(path, r"expected \d+ bytes in .*states\.safetensors', found 100")
    (path / "states.safetensors").unlink()
    refused(path, r"expected the file .*states\.safetensors', found it missing")
    save(path)
    file = path / "weights.safetensors"
    file.write_bytes(file.read_bytes().replace(b"[10,100]", b"[100,10]"))
    refused(path, "found another 'w'")
    save(path)
    manifest = path / MANIFEST
    text = manifest.read_text()
    manifest.write_text(text.replace('"value": 1.0', '"value": 1.5'))
    refused(path, r"expected .*manifest\.json' as it was saved, found it changed")
    manifest.write_text(text.replace('"version": 1', '"version": 2'))
    refused(path, "expected a checkpoint of version 1 .*found 2")
    manifest.write_text(text[:-20])
    refused(path, "expected JSON")
    manifest.write_text("{}")
    refused(path, "found another file")


# ---- memory

MEMORY = """
import sys, torch
from pathlib import Path
from overspill.checkpoint.folder import open_folder, save_folder
from overspill.checkpoint.writer import Stored

def peak():
    return int(next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM")).split()[1])

def pieces():
    buffer = torch.empty(1 << 22)
    for number in range(16):
        yield buffer.fill_(number)

start = peak()
save_folder(sys.argv[1], {"a.safetensors": [Stored("a", torch.float32, (16, 1 << 22), pieces)]}, None)
with open_folder(sys.argv[1]) as saved:
    for first, piece in saved.pieces("a"):
        assert piece[0] == first >> 22
    assert saved.reader.bytes_read == 1 << 28
print(peak() - start)
"""


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "a")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    grown = int(result.stdout) * 1024
    assert grown < 100 << 20, f"{grown >> 20} MiB to save and load 256 MiB"


def test_a_folder_of_plain_safetensors_is_told_from_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(TierError, match=r"found plain safetensors; give that folder to prepare as weights="):
        open_folder(tmp_path)
