"""`python -m overspill.bench.worker JOB EVENTS`: does one job in a process of its own, and writes down what happens.

EVENTS gets one JSON object per line: {"phase": ...} when a phase begins, {"news": ...} in between, and at the end
{"result": ...} or {"failed": ...}. Whatever the engines print goes elsewhere.
"""

import ctypes
import gc
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch

import overspill
from overspill.bench import facts, learning, measuring, models, passing, searching, timing, updating
from overspill.bench.engines import Ready
from overspill.bench.jobs import Job, read_job
from overspill.bench.models import Batches
from overspill.bench.peers import ENGINES
from overspill.bench.watching import forget_own_peak, own_now, own_peak
from overspill.cli import text_model
from overspill.cli.loop import compute_device
from overspill.config import Size, parse_size
from overspill.errors import OverspillError
from overspill.tiers import rates
from overspill.trace import OwnTime

_PR_SET_PDEATHSIG = 1


class Events:
    """What the parent hears. Lines are written whole, so that a killed worker leaves nothing half said."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def say(self, **event: Any) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()

    def phase(self, name: str) -> None:
        self.say(phase=name)

    def news(self, phase: str, done: int, of: int) -> None:
        self.say(news=f"{phase} {done}/{of}")


class Phases:
    """One after the other: how long each takes, and what it takes of the GPU at most."""

    def __init__(self, events: Events, device: torch.device) -> None:
        self._events, self._device = events, device
        self._name, self._since = "", 0.0
        self.seconds: dict[str, float] = {}
        self.gpu: dict[str, dict[str, int]] = {}

    def begin(self, name: str) -> None:
        self.end()
        self._events.phase(name)
        self._name, self._since = name, time.perf_counter()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def end(self) -> None:
        if not self._name:
            return
        timing.wait(self._device)
        self.seconds[self._name] = time.perf_counter() - self._since
        if self._device.type == "cuda":
            reserved = torch.cuda.max_memory_reserved(self._device)
            self.gpu[self._name] = {"reserved": reserved, "allocated": torch.cuda.max_memory_allocated(self._device)}
        self._name = ""


def train(job: Job, events: Events) -> dict[str, Any]:
    """Build, set up, step; then look closer at one step, if that is asked for."""
    device, training, engine = compute_device(), job.training, ENGINES[job.engine]
    engine.check(device)
    phases = Phases(events, device)
    phases.begin("load")
    models.build(training, torch.bfloat16, torch.device("meta"))  # imports it all, which is nobody's set-up
    engine.load()
    timing.wait(device)  # CUDA's context is nobody's either
    cap_gpu(job.cap, device)
    phases.begin("build")
    model = engine.build(job, device)
    count, vocabulary = models.parameters(model), text_model.vocabulary(model)
    gc.collect()
    forget_own_peak()
    before = own_now()
    phases.begin("set-up")
    ready = engine.set_up(model, job)
    del model
    batches = Batches(training, vocabulary, device)

    def step() -> Any:
        return ready.step(batches)

    # See timing.py, Note [Garbage].
    gc.collect()
    gc.freeze()
    phases.begin("warm-up")
    warm = timing.warm_up(step, training.warmup, device, events.news)
    phases.begin("steps")
    timed = timing.window(step, training.steps, device, events.news, warm)
    phases.end()
    result = {
        "parameters": count,
        "tokens": training.tokens,
        "tokens_per_second": training.tokens / timed.step,
        "model_tflops": models.tflops(count, training.tokens, timed.step),
        "seconds": phases.seconds,
        "gpu": phases.gpu,
        "host_own_peak": own_peak(),
        "host_before": before,
        "report": ready.report(),
        **timed.to_dict(),
    }
    events.say(measured=result)  # what follows may fail without loss
    if job.engine == "ours":
        events.phase("own")
        result["own_host_seconds"] = own_host_seconds(ready, step, device)
        events.say(measured=result)
    if job.trace is not None:
        events.phase("trace")
        result["stream"] = traced(Path(job.trace), ready, step, device)
        events.say(measured=result)
    if job.profile is not None:
        events.phase("profile")
        profiled(job.profile, step, device)
    return result


def own_host_seconds(ready: Ready, step: Callable[[], Any], device: torch.device) -> float:
    """What a step takes of the host within ours. See trace.py, Note [Full queues]."""
    try:
        OwnTime.first = lambda: timing.wait(device)
        for _ in range(2):  # a step's count begins where the one before ended
            step()
    finally:
        OwnTime.first = None
    return float(ready.report()["host_seconds"])


def traced(path: Path, ready: Ready, step: Callable[[], Any], device: torch.device) -> dict[str, Any] | None:
    """Writes a trace of one step; what it says of states on the link."""
    timing.wait(device)
    with overspill.trace(ready.model, path):
        step()
        timing.wait(device)
    assert ready.plan is not None, "traces are of ours"
    return passing.stream(path, ready.plan())


def profiled(path: str, step: Callable[[], Any], device: torch.device) -> None:
    """Writes a step as torch's profiler sees it."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    timing.wait(device)
    with profile(activities=kinds) as seen:
        step()
        timing.wait(device)
    seen.export_chrome_trace(path)


def cap_gpu(cap: Size | None, device: torch.device) -> None:
    """Let torch reserve no more than that."""
    if cap is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, parse_size("gpu", cap, total) / total), device)


def link(_: Job, events: Events) -> dict[str, Any]:
    events.phase("link")
    return dict(rates.link(compute_device()))


def measure_rates(job: Job, events: Events) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, measure in measuring.measurements(compute_device(), job.nvme):
        events.phase(name)
        found |= measure()
        events.say(measured=found)  # so that it is known if the next one ends the process
    return found


def search_by_plan(job: Job, events: Events) -> dict[str, Any]:
    events.phase("search")
    return searching.largest_planned(job, lambda text: events.say(news=text))


def search_by_trying(job: Job, events: Events) -> dict[str, Any]:
    events.phase("search")
    cap_gpu(job.cap, compute_device())
    return searching.largest_tried(job, lambda text: events.say(news=text))


def learn(job: Job, events: Events) -> dict[str, Any]:
    events.phase("learn")
    keywords = None if job.engine == learning.PLAIN else job.keywords
    return learning.learn(learning.Lesson(**job.settings), keywords, lambda done, of: events.news("learn", done, of))


def begin(job: Job, events: Events) -> dict[str, Any]:
    events.phase("begin")
    return learning.begin(learning.Lesson(**job.settings), lambda done, of: events.news("begin", done, of))


def update(job: Job, events: Events) -> dict[str, Any]:
    events.phase("update")
    case = updating.Case(**job.settings)
    rows = updating.measure(case, lambda text: events.say(news=text), lambda rows: events.say(measured={"rows": rows}))
    return {"rows": rows}


KINDS: dict[str, Callable[[Job, Events], dict[str, Any]]] = {
    "train": train,
    "link": link,
    "rates": measure_rates,
    "plan": search_by_plan,
    "fit": search_by_trying,
    "learn": learn,
    "begin": begin,
    "update": update,
}


def reason(error: BaseException) -> str:
    """In one line; what the user can do something about is told as it is."""
    text = " ".join(str(error).split())
    if isinstance(error, OverspillError):
        return text
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of GPU memory: {text}"
    return f"{type(error).__name__}: {text}"


def run(job: Job, events: Events) -> None:
    try:
        events.say(machine=facts.of_this_process())
        result = KINDS[job.kind](job, events)
    except Exception as error:
        events.say(failed=reason(error))
        raise
    events.say(result=result)


def die_with_parent() -> None:
    """Whoever is killed takes the worker with it, which would hold the GPU otherwise."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    die_with_parent()
    job_file, events_file = map(Path, arguments)
    with events_file.open("w") as file:
        run(read_job(job_file), Events(file))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
