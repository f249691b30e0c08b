"""Kills a save before every single call that changes the disk: `python -m tests.killed_saves FOLDER`.

Each save runs in a forked child that kills itself with SIGKILL at its n-th step. Afterwards the checkpoint that loads
must be the one before or the new one, whole, and the next save must leave nothing but its own checkpoint.
"""

import builtins
import contextlib
import itertools
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from overspill.checkpoint.export import write_export
from overspill.checkpoint.folder import open_folder, save_folder
from overspill.checkpoint.tensorfile import entries_of
from overspill.checkpoint.writer import Stored, stored
from overspill.errors import TierError

CALLS = ("mkdir", "open", "rename", "unlink", "rmdir", "fsync", "posix_fadvise", "link", "chmod", "utime")


class Fuse:
    """Kills the process at its n-th step."""

    def __init__(self, steps: float) -> None:
        self.left = steps

    def step(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*args: Any, **kwargs: Any) -> Any:
            self.step()
            return call(*args, **kwargs)

        return stepped


def tensors(value: float, fuse: Fuse) -> list[Stored]:
    def pieces() -> Iterator[torch.Tensor]:
        for _ in range(3):
            fuse.step()
            yield torch.full((1000,), value)

    return [Stored("a", torch.float32, (3000,), pieces), stored("b", torch.full((2,), value))]


def save(path: Path, value: float, fuse: Fuse) -> None:
    files = {"one.safetensors": tensors(value, fuse), "two.safetensors": [stored("c", torch.full((5,), value))]}
    save_folder(path, files, {"value": value, "rng": torch.full((3,), value)})


def value_of(path: Path) -> float:
    with open_folder(path) as saved:
        body = saved.body()
        found = {body["value"], *body["rng"].tolist()}
        for name in ("a", "b", "c"):
            found |= set(saved.tensor(name).tolist())
    (value,) = found
    return float(value)


def survives(steps: int, work: Callable[[Fuse], None]) -> bool:
    """Run `work` in a child that is killed at the given step; whether it came to its end before."""
    child = os.fork()
    if child == 0:
        fuse = Fuse(steps)
        for name in CALLS:
            setattr(os, name, fuse.wrap(getattr(os, name)))
        builtins.open = fuse.wrap(builtins.open)
        work(fuse)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), f"the child ended with {status}"
    return status == 0


def put_own(path: Path, text: str) -> None:
    """What a user has beside a checkpoint."""
    (path / "model").mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(text)
    (path / "model" / "config.json").write_text(text)
    (path / "model").chmod(0o750)


def own(path: Path) -> list[str]:
    assert (path / "model").stat().st_mode & 0o777 == 0o750
    return [(path / name).read_text() for name in ("tokenizer.json", "model/config.json")]


def kill_replacements(root: Path, again: bool) -> Counter[str]:
    """`again`: the user's own files are made again after the kill, before the next save, as a loop does that makes them
    each time."""
    seen: Counter[str] = Counter()
    for steps in itertools.count():
        path = root / str(steps) / "step"
        save(path, 1.0, Fuse(float("inf")))
        put_own(path, "first")
        done = survives(steps, lambda fuse, path=path: save(path, 2.0, fuse))
        where = "path" if path.exists() else "old"
        seen[f"{value_of(path):g} at {where}"] += 1
        assert not done or value_of(path) == 2
        assert own(path if path.exists() else path.with_name("step.old")) == ["first"] * 2
        if again:
            before = value_of(path)
            put_own(path, "second")
            assert value_of(path) == before, "whatever else is at its path"
        save(path, 3.0, Fuse(float("inf")))
        assert value_of(path) == 3
        assert own(path) == ["second" if again else "first"] * 2
        assert [file.name for file in path.parent.iterdir()] == ["step"], "a leftover"
        assert len(list(path.iterdir())) == 6, "a leftover inside"
        if done:
            return seen
    raise AssertionError


def kill_first_saves(root: Path) -> Counter[str]:
    seen: Counter[str] = Counter()
    for steps in itertools.count():
        path = root / str(steps) / "step"
        save(path.with_name("before"), 1.0, Fuse(float("inf")))
        done = survives(steps, lambda fuse, path=path: save(path, 2.0, fuse))
        try:
            assert value_of(path) == 2
            seen["whole"] += 1
        except TierError as error:
            assert not done and "before' beside it is intact" in str(error), error
            seen["interrupted" if "A save to it was interrupted" in str(error) else "missing"] += 1
        if done:
            return seen
    raise AssertionError


def kill_exports(root: Path, into_existing: bool) -> Counter[str]:
    seen: Counter[str] = Counter()
    for steps in itertools.count():
        path = root / str(steps) / "model"
        path.parent.mkdir(parents=True)
        if into_existing:
            path.mkdir()
            (path / "config.json").write_text("{}")
        done = survives(steps, lambda fuse, path=path: write_export(path, tensors(2.0, fuse), max_bytes=1000))
        assert not into_existing or (path / "config.json").exists()
        try:
            assert entries_of(path).keys() == {"a", "b"}
            seen["whole"] += 1
        except TierError:
            assert not done
            seen["nothing"] += 1
            with contextlib.suppress(FileNotFoundError):
                for file in path.glob("model-*"):  # as the error of the next export asks
                    file.unlink()
            write_export(path, tensors(3.0, Fuse(float("inf"))), max_bytes=1000)
            assert [file.name for file in path.parent.iterdir()] == ["model"], "a leftover"
        if done:
            return seen
    raise AssertionError


def main() -> None:
    root = Path(sys.argv[1])
    print("replacements", dict(kill_replacements(root / "replacements", again=False)))
    print("replacements, own files again", dict(kill_replacements(root / "again", again=True)))
    print("first", dict(kill_first_saves(root / "first")))
    print("new export", dict(kill_exports(root / "new", into_existing=False)))
    print("export", dict(kill_exports(root / "existing", into_existing=True)))


if __name__ == "__main__":
    main()
