"""Runs a function in several fresh processes that see the environment of torchrun.

`run` gives the results; `run_raw` gives exit codes and outputs, for ranks that are meant to die. The function must be
importable (at the top of a test file), and so must be what it is given and what it returns: both are pickled by torch.
"""

import dataclasses
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
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
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    shared |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "PYTHONPATH": str(ROOT)}
    running: list[subprocess.Popen[bytes]] = []
    begin = time.monotonic()
    seconds = [timeout] * size
    try:
        for rank in range(size):
            environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with open(folder / f"out{rank}", "wb") as out, open(folder / f"err{rank}", "wb") as err:
                running.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=out, stderr=err))
        while time.monotonic() < begin + timeout and any(process.poll() is None for process in running):
            for rank, process in enumerate(running):
                if process.poll() is not None:
                    seconds[rank] = min(seconds[rank], time.monotonic() - begin)
            time.sleep(0.02)
        codes = [process.poll() for process in running]
    finally:
        for process in running:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
    texts = [
        [(folder / f"{kind}{rank}").read_text(errors="replace") for kind in ("out", "err")] for rank in range(size)
    ]
    return [Ended(codes[rank], *texts[rank], min(seconds[rank], time.monotonic() - begin)) for rank in range(size)]


def _main() -> None:
    """In the process of a rank: load the test file under its path, call the function, keep the result."""
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
    args = torch.load(Path(folder) / "args", weights_only=False)
    result = getattr(module, name)(*args)
    torch.save(result, Path(folder) / f"result{os.environ['RANK']}")


if __name__ == "__main__":
    _main()
