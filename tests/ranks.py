"""Runs a function in several fresh processes that see the environment of torchrun.

The processes are forks of one that has imported torch and the test file and done nothing else, on one thread.

`run` gives the results; `run_raw` gives exit codes and outputs, for ranks that are meant to die. The function must be
importable (at the top of a test file), and so must be what it is given and what it returns: both are pickled by torch.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
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
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _processes(function: Callable[..., Any], size: int, args: Any, folder: Path, timeout: float) -> list[Ended]:
    torch.save(args, folder / "args")
    source = sys.modules[function.__module__].__file__
    command = [sys.executable, "-m", "tests.ranks", str(source), function.__qualname__, str(folder)]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    environment |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "PYTHONPATH": str(ROOT)}
    with open(folder / "leader", "wb") as output:
        leader = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        )
    try:
        leader.wait(timeout)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)
        leader.wait()
    return [_ended(folder, rank, timeout) for rank in range(size)]


def _ended(folder: Path, rank: int, timeout: float) -> Ended:
    def text(name: str) -> str:
        path = folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    code, seconds = json.loads(text(f"end{rank}") or f"[null, {timeout}]")
    return Ended(code, text(f"out{rank}"), text(f"err{rank}") or text("leader"), seconds)


def _lead() -> None:
    """In a process of its own: import once, which takes longest, then become the parent of all ranks."""
    source, name, folder = sys.argv[1:]
    torch.set_num_threads(1)
    # Under its dotted name, so that what was pickled in the test's process is found again.
    path = Path(source)
    dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts) if path.is_relative_to(ROOT) else path.stem
    spec = importlib.util.spec_from_file_location(dotted, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[dotted] = module
    spec.loader.exec_module(module)
    assert threading.active_count() == 1 and not torch.cuda.is_initialized(), "a process with threads cannot be forked"
    begin = time.monotonic()
    ranks: dict[int, int] = {}
    for rank in range(int(os.environ["WORLD_SIZE"])):
        pid = os.fork()
        if pid == 0:
            _follow(rank, getattr(module, name), Path(folder))
            return  # and ends as any script does
        ranks[pid] = rank
    while ranks:
        pid, status = os.wait()
        end = json.dumps([os.waitstatus_to_exitcode(status), time.monotonic() - begin])
        (Path(folder) / f"end{ranks.pop(pid)}").write_text(end)


def _follow(rank: int, function: Callable[..., Any], folder: Path) -> None:
    """In the process of a rank: call the function, keep the result."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    for number, name in ((1, "out"), (2, "err")):
        with open(folder / f"{name}{rank}", "wb") as file:
            os.dup2(file.fileno(), number)
    args = torch.load(folder / "args", weights_only=False)
    torch.save(function(*args), folder / f"result{rank}")


if __name__ == "__main__":
    _lead()
