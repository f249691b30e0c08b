"""Runs a function in several fresh processes that see the environment of torchrun.

The processes are forks of one that has imported torch and the test file and done nothing else, on one thread. That one
is kept for the next call from the same file and environment, because importing takes longer than most tests.

`run` gives the results; `run_raw` gives exit codes and outputs, for ranks that are meant to die. The function must be
importable (at the top of a test file), and so must be what it is given and what it returns: both are pickled by torch.
"""

import atexit
import contextlib
import dataclasses
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Ended:
    """How one rank ended; `code` is negative for a signal, None if it had to be stopped at the end of the time."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float


def run(function: Callable[..., Any], size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call `function(*args)` on `size` ranks; the results by rank. Fails with the output of every rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ended = _processes(function, size, args, folder, timeout)
        bad = [rank for rank, end in enumerate(ended) if end.code != 0]
        shown = "\n".join(
            f"---- rank {rank}: exit code {end.code}\n{end.stdout}{end.stderr}" for rank, end in enumerate(ended)
        )
        assert not bad, f"ranks {bad} failed\n{shown}"
        return [torch.load(folder / f"result{rank}", weights_only=False) for rank in range(size)]


def run_raw(function: Callable[..., Any], size: int, *args: Any, timeout: float = 60.0) -> list[Ended]:
    """Call `function(*args)` on `size` ranks; how each of them ended."""
    with tempfile.TemporaryDirectory() as name:
        return _processes(function, size, args, Path(name), timeout)


def free_port() -> int:
    """Not one that the system may give to whoever connects next."""
    while True:
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", random.randrange(10000, 32768)))
            return int(listener.getsockname()[1])


OWN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PYTEST_CURRENT_TEST")
"""What may differ from call to call: nobody looks at it while modules are imported."""


class Origin:
    """The process that all others are forks of."""

    def __init__(self, source: str, environment: dict[str, str]) -> None:
        self.made_for = (source, _lasting(environment))
        command = [sys.executable, "-m", "tests.ranks", source]
        self.process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, function: str, folder: Path, environment: dict[str, str], timeout: float) -> None:
        """Returns when all ranks ended or are stopped."""
        assert self.process.stdin is not None and self.process.stdout is not None, "they are pipes"
        self.process.stdin.write(json.dumps([function, str(folder), environment]) + "\n")
        self.process.stdin.flush()
        told = self.process.stdout.readline()
        assert told, f"the process that imports {self.made_for[0]} ended"
        alarm = threading.Timer(timeout, _stop, (int(told),))
        alarm.start()
        assert self.process.stdout.readline(), "nobody waited for the ranks"
        alarm.cancel()
        _stop(int(told))

    def end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None, "they are pipes"
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


_origin: list[Origin] = []
"""The last one, if any."""


@atexit.register
def _end() -> None:
    while _origin:
        _origin.pop().end()


def _lasting(environment: dict[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset((name, value) for name, value in environment.items() if name not in OWN)


def _stop(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _processes(function: Callable[..., Any], size: int, args: Any, folder: Path, timeout: float) -> list[Ended]:
    torch.save(args, folder / "args")
    source = str(sys.modules[function.__module__].__file__)
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    environment |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "PYTHONPATH": str(ROOT)}
    if not _origin or _origin[0].made_for != (source, _lasting(environment)):
        _end()
        _origin.append(Origin(source, environment))
    _origin[0].run(function.__qualname__, folder, environment, timeout)
    return [_ended(folder, rank, timeout) for rank in range(size)]


def _ended(folder: Path, rank: int, timeout: float) -> Ended:
    def text(name: str) -> str:
        path = folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    code, seconds = json.loads(text(f"end{rank}") or f"[null, {timeout}]")
    return Ended(code, text(f"out{rank}"), text(f"err{rank}") or text("leader"), seconds)


def _serve(source: str) -> None:
    """In a process of its own: import once, then fork whatever is asked for."""
    torch.set_num_threads(1)
    if torch.version.cuda is None:
        # What the first optimizer imports, here once for all. It may look at a GPU, and then no fork could.
        importlib.import_module("torch._dynamo")
    # Under its dotted name, so that what was pickled in the test's process is found again.
    path = Path(source)
    dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts) if path.is_relative_to(ROOT) else path.stem
    spec = importlib.util.spec_from_file_location(dotted, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[dotted] = module
    spec.loader.exec_module(module)
    assert threading.active_count() == 1 and not torch.cuda.is_initialized(), "a process with threads cannot be forked"
    while line := sys.stdin.readline():
        function, folder, environment = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _lead(getattr(module, function), Path(folder), environment)
            return  # and ends as any script does
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("over", flush=True)


def _lead(function: Callable[..., Any], folder: Path, environment: dict[str, str]) -> None:
    """The parent of all ranks, in a group of their own; in a rank, its work."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    _redirect(0, os.devnull, os.O_RDONLY)
    for number in (1, 2):
        _redirect(number, folder / "leader", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    begin = time.monotonic()
    ranks: dict[int, int] = {}
    for rank in range(int(environment["WORLD_SIZE"])):
        pid = os.fork()
        if pid == 0:
            _follow(rank, function, folder)
            return
        ranks[pid] = rank
    while ranks:
        pid, status = os.wait()
        end = json.dumps([os.waitstatus_to_exitcode(status), time.monotonic() - begin])
        (folder / f"end{ranks.pop(pid)}").write_text(end)


def _redirect(number: int, path: str | Path, flags: int) -> None:
    file = os.open(path, flags, 0o600)
    os.dup2(file, number)
    os.close(file)


def _follow(rank: int, function: Callable[..., Any], folder: Path) -> None:
    """In the process of a rank: call the function, keep the result."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    for number, name in ((1, "out"), (2, "err")):
        _redirect(number, folder / f"{name}{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    args = torch.load(folder / "args", weights_only=False)
    torch.save(function(*args), folder / f"result{rank}")


if __name__ == "__main__":
    _serve(sys.argv[1])
