"""Runs one job in a worker process: hears what it says, watches what it takes, and ends it when it takes too long."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import overspill
from overspill.bench.jobs import Job
from overspill.bench.peers import ALONE
from overspill.bench.watching import Watch

_LOOK = 0.05
"""Seconds between two looks."""
_GOODBYE = 20.0
"""Seconds that a worker has to end after it has said its result."""
_TAIL = 30
"""Lines of what a failed worker printed that are kept."""
_NOT_OURS = frozenset({*ALONE, "MASTER_PORT"})
"""Who runs this may be a rank of something; the workers are not."""

Told = Callable[[str], None]
"""Hears the phases and the news of a worker."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job."""

    result: dict[str, Any] | None
    reason: str | None
    """Why there is no result; or what went wrong after it was known."""
    machine: dict[str, Any] | None
    host: dict[str, Any]
    seconds: float
    printed: list[str]
    """The last lines of what a failed worker printed."""


def run(job: Job, limit: float, told: Told, stop: threading.Event | None = None) -> Outcome:
    """Start a worker, and return when it has ended. `stop`: whether it is to be ended, where this thread is not the one
    that hears of Ctrl-C."""
    with tempfile.TemporaryDirectory(prefix="overspill-bench-") as folder:
        job_file, events, printed = (Path(folder, name) for name in ("job.json", "events.jsonl", "printed.txt"))
        job.write(job_file)
        watch, begin = Watch(), time.monotonic()
        command = [sys.executable, "-m", "overspill.bench.worker", str(job_file), str(events)]
        with printed.open("wb") as output, _started(command, output) as worker:
            heard = _attend(worker, _Ear(events, told), watch, begin + limit, stop)
        heard.listen()
        return _outcome(heard, worker.returncode, watch, (limit, time.monotonic() - begin), printed)


class _Ear:
    """Reads the events as they are written."""

    def __init__(self, path: Path, told: Told) -> None:
        self._path, self._told = path, told
        self._read = 0
        self.phase = "start"
        self.machine: dict[str, Any] | None = None
        self.measured: dict[str, Any] | None = None
        self.result: dict[str, Any] | None = None
        self.failed: str | None = None
        self.killed: str | None = None

    def listen(self) -> None:
        if not self._path.exists():
            return
        with self._path.open() as file:
            file.seek(self._read)
            for line in iter(file.readline, ""):
                if not line.endswith("\n"):
                    return  # half a line: next time
                self._read += len(line.encode())
                self._hear(json.loads(line))

    def _hear(self, event: dict[str, Any]) -> None:
        match event:
            case {"phase": str(name)}:
                self.phase = name
                self._told(name)
            case {"news": str(text)}:
                self._told(text)
            case {"machine": dict(machine)}:
                self.machine = machine
            case {"measured": dict(result)}:
                self.measured = result
            case {"result": dict(result)}:
                self.result = result
            case {"failed": str(reason)}:
                self.failed = reason


@contextlib.contextmanager
def _started(command: list[str], output: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """Leads a process group of its own, which is gone when this context ends."""
    found = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(Path(overspill.__file__).parents[1]), *([found] if found else [])])
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_OURS} | {"PYTHONPATH": path}
    worker = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment, process_group=0
    )
    try:
        yield worker
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)  # its children too, which may have outlived it
        worker.wait()


def _attend(
    worker: "subprocess.Popen[bytes]", ear: _Ear, watch: Watch, until: float, stop: threading.Event | None
) -> _Ear:
    """Until it ends, or has to be ended."""
    while not _ended(worker):
        ear.listen()
        if ear.result is not None:
            until = min(until, time.monotonic() + _GOODBYE) if ear.phase != "end" else until
            ear.phase = "end"
        if time.monotonic() > until or (stop is not None and stop.is_set()):
            ear.killed = ear.phase
            break
        watch.look(worker.pid, ear.phase)
        time.sleep(_LOOK)
    return ear


def _ended(worker: "subprocess.Popen[bytes]") -> bool:
    """Without waiting for it: until then its number stays taken, and so does its group's, which is ended by it."""
    return os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _outcome(ear: _Ear, code: int, watch: Watch, times: tuple[float, float], printed: Path) -> Outcome:
    limit, seconds = times
    result = ear.measured if ear.result is None else ear.result
    reason = None
    if ear.result is None:
        reason = ear.failed or _ending(code, limit, ear)
    tail = printed.read_text(errors="replace").splitlines()[-_TAIL:] if reason else []
    return Outcome(result, reason, ear.machine, watch.to_dict(), seconds, tail)


def _ending(code: int, limit: float, ear: _Ear) -> str:
    if ear.killed is not None:
        return f"not done after {limit:.0f} s, in phase {ear.killed!r}; ended. Give it more time with --limit"
    if code < 0:
        name = signal.Signals(-code).name
        hint = ": the kernel does that when host memory runs out" if -code == signal.SIGKILL else ""
        return f"killed by {name} in phase {ear.phase!r}{hint}"
    return f"ended with exit code {code} in phase {ear.phase!r} and no result"
