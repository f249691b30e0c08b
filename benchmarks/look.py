"""`python benchmarks/look.py "gpu=16GB,states=compact"`: one configuration of ours, and where its steps lose time.

For whoever works on the engine. Prints one JSON object: the step time, what the loop's own thread took in the package,
what each page costs who hands it out, and for every layer of a forward pass how long the host took to launch it (of
that, how long its thread ran, and how long it waited for updates to be handed out) and how long the GPU took.
"""

import argparse
import ast
import collections
import functools
import gc
import importlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import overspill
from overspill.bench import models, timing, worker
from overspill.bench.configurations import parse
from overspill.bench.engines import OURS
from overspill.bench.jobs import Job, Training
from overspill.bench.models import Batches
from overspill.cli import text_model
from overspill.cli.loop import compute_device
from overspill.plan import sharing
from overspill.plan.hands import Chosen
from overspill.runtime.cores import Cores
from overspill.runtime.engine import Engine
from overspill.runtime.executor import Executor
from overspill.runtime.gradients import Gradients
from overspill.runtime.handing import Handing
from overspill.runtime.lanes import Lanes, Ticket
from overspill.runtime.optimizer import SpilledOptimizer
from overspill.runtime.passage import Passage
from overspill.runtime.residency import Residency
from overspill.runtime.rooms import Rooms
from overspill.runtime.steps import Steps
from overspill.runtime.watch import ShapeWatch


def arguments() -> argparse.Namespace:
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("ours", help="as --ours of overspill bench step")
    found.add_argument("--warmup", type=int, default=12)
    found.add_argument("--steps", type=int, default=6)
    found.add_argument("--seq", type=int, default=2048)
    found.add_argument("--micro-batch", type=int, default=4)
    found.add_argument("--cores", choices=["split", "host"], help="the host's cores update pages too, or all of them")
    found.add_argument(
        "--set", action="append", default=[], help="MODULE.NAME=VALUE of the package, as runtime.handing.FAR=32"
    )
    found.add_argument("--layers", action="store_true", help="look at every layer of one forward pass")
    found.add_argument("--pages", action="store_true", help="look at what pages cost who hands them out")
    found.add_argument("--own", action="store_true", help="look at what the loop's own thread does in the package")
    found.add_argument("--trace", help="write a trace of three steps: what the GPU did")
    found.add_argument("--host", help="write a trace of one step: what the loop and the thread of pages did")
    return found.parse_args()


PAGES = ((Passage, "fetch"), (Passage, "update"), (Passage, "send_home"), (Cores, "take"), (Handing, "do"))
LOOP: tuple[tuple[Any, str], ...] = (
    *((Engine, name) for name in ("begin", "arrived", "hand_out")),
    *((SpilledOptimizer, name) for name in ("step", "clip_grad_norm_", "zero_grad")),
    *((Residency, name) for name in ("enter", "exit", "backward")),
    *((Lanes, name) for name in ("submit", "compute", "mark")),
    (Executor, "__call__"),
    (Rooms, "move_in"),
    (Gradients, "arrive"),
    (ShapeWatch, "check"),
    (Steps, "jobs"),
    (Ticket, "wait"),
)


def costs(step: Callable[[], Any], calls: Sequence[tuple[Any, str]], steps: int = 3) -> dict[str, Any]:
    """Calls, seconds, and seconds of the thread itself, per step; each with what it calls."""
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    before: list[tuple[Any, str, Any]] = []
    for owner, name in calls:
        run = getattr(owner, name)

        def timed(*given: Any, _run: Any = run, _name: str = f"{owner.__name__}.{name}", **more: Any) -> Any:
            wall, own = time.perf_counter(), time.thread_time()
            result = _run(*given, **more)
            found[_name].update(
                calls=1, done=int(result is True), wall=time.perf_counter() - wall, own=time.thread_time() - own
            )
            return result

        before.append((owner, name, run))
        setattr(owner, name, functools.wraps(run)(timed))
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    for owner, name, run in before:
        setattr(owner, name, run)
    return {name: {key: round(n / steps, 4) for key, n in counts.items()} for name, counts in found.items()}


def layer_times(step: Callable[[], Any]) -> list[list[float]]:
    """[wall, own, waited, GPU] in milliseconds: from the begin of a step to its first layer, of every layer, and from
    the last one to the end."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    forward, wait, main = LlamaDecoderLayer.forward, Ticket.wait, threading.get_ident()
    marks: list[tuple[float, float, float, torch.cuda.Event]] = []
    waited = 0.0

    def mark() -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        marks.append((time.perf_counter(), time.thread_time(), waited, event))

    def marked(*given: Any, **more: Any) -> Any:
        if threading.get_ident() == main:
            mark()
        return forward(*given, **more)

    def counted(*given: Any, **more: Any) -> None:
        nonlocal waited
        begin = time.perf_counter()
        wait(*given, **more)
        waited += time.perf_counter() - begin if threading.get_ident() == main else 0.0

    LlamaDecoderLayer.forward, Ticket.wait = marked, counted  # type: ignore[method-assign]
    for _ in range(3):
        marks.clear()
        mark()
        step()
        mark()
    torch.cuda.synchronize()
    LlamaDecoderLayer.forward, Ticket.wait = forward, wait  # type: ignore[method-assign]
    pairs = itertools.pairwise(marks)
    return [
        [*(round(1000 * (y - x), 2) for x, y in zip(a[:3], b[:3], strict=True)), round(a[3].elapsed_time(b[3]), 2)]
        for a, b in pairs
    ]


def host_trace(step: Callable[[], Any], path: str) -> None:
    """Layers of the loop, and what is done for pages, by the host's clock, for Perfetto."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    spans: list[dict[str, Any]] = []
    calls = [(Passage, "fetch"), (Passage, "update"), (Passage, "send_home"), (Passage, "look"), (Handing, "waits")]
    calls += [(LlamaDecoderLayer, "forward"), (Ticket, "wait")]
    before = [(owner, name, getattr(owner, name)) for owner, name in calls]
    for owner, name, run in before:

        def timed(*given: Any, _run: Any = run, _name: str = f"{owner.__name__}.{name}", **more: Any) -> Any:
            begin, own = time.perf_counter(), time.thread_time()
            try:
                return _run(*given, **more)
            finally:
                args = {"own": 1e6 * (time.thread_time() - own)}
                where = {"ph": "X", "pid": 0, "tid": threading.get_ident(), "name": _name, "args": args}
                spans.append(where | {"ts": 1e6 * begin, "dur": 1e6 * (time.perf_counter() - begin)})

        setattr(owner, name, functools.wraps(run)(timed))
    for _ in range(3):
        spans.clear()
        step()
    torch.cuda.synchronize()
    for owner, name, run in before:
        setattr(owner, name, run)
    with open(path, "w") as file:
        json.dump({"traceEvents": spans}, file)


def set_value(given: str) -> None:
    name, value = given.split("=", 1)
    module, name = name.rsplit(".", 1)
    found = importlib.import_module(f"overspill.{module}")
    if not hasattr(found, name):
        raise SystemExit(f"overspill.{module} has no {name}")
    setattr(found, name, ast.literal_eval(value))


def main() -> None:
    asked = arguments()
    for given in asked.set:
        set_value(given)
    if asked.cores:
        sharing.choose = lambda speeds, sizes: Chosen(asked.cores, "as told")
    device, ours = compute_device(), parse(asked.ours, {})
    clip = 1.0 if ours.clip is None else ours.clip
    work = {"seq": asked.seq, "micro_batch": asked.micro_batch, "clip": clip}
    training = Training(sizes=models.LLAMA, warmup=asked.warmup, steps=asked.steps, **work)
    job = Job(kind="train", training=training, keywords=ours.keywords)
    model = OURS.build(job, device)
    vocabulary = text_model.vocabulary(model)
    ready = OURS.set_up(model, job)
    del model
    batches = Batches(training, vocabulary, device)

    def step() -> Any:
        return ready.step(batches)

    gc.collect()
    gc.freeze()
    warm = timing.warm_up(step, training.warmup, device, lambda *_: None)
    timed = timing.window(step, training.steps, device, lambda *_: None, warm)
    found: dict[str, Any] = {"ours": asked.ours, "cores": asked.cores, "set": asked.set, **timed.to_dict()}
    found["reserved"] = torch.cuda.max_memory_reserved(device)
    found["own_host_seconds"] = worker.own_host_seconds(ready, step, device)
    pager = overspill.api._engine(ready.model).executor.pager
    if asked.cores and pager is not None and pager.cores is not None:
        found["by_cores"] = {key: getattr(pager.cores, key) for key in ("elements", "seconds", "waited")}
    if asked.pages:
        found["pages"] = costs(step, PAGES)
    if asked.own:
        found["own"] = costs(step, LOOP)
    if asked.layers:
        found["layers"] = layer_times(step)
    if asked.host:
        host_trace(step, asked.host)
    if asked.trace:
        with overspill.trace(ready.model, asked.trace):
            for _ in range(3):
                step()
            torch.cuda.synchronize()
    del found["losses"]
    print(json.dumps(found), flush=True)
    os._exit(0)  # what is on its way need not come home


if __name__ == "__main__":
    main()
