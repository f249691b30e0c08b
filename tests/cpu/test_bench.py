"""`overspill bench`: the real commands in miniature, each engine in its own process."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import overspill
from overspill.bench import configurations, largest, models, passing, results, rows, searching, steps, timing
from overspill.bench.configurations import Ours
from overspill.bench.engines import OWN, Engine
from overspill.bench.jobs import Job, Training, read_job
from overspill.bench.models import LLAMA, said, sizes_of, tflops
from overspill.bench.peers import deepspeed_config
from overspill.bench.searching import search
from overspill.bench.watching import resident_of_group, used_bytes
from overspill.cli.sizes import Sizes
from overspill.errors import OptionError
from overspill.specs import Activations
from tests.commands import here

TINY = ["--params", "300K", "--seq", "16", "--micro-batch", "1"]
KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
HANGING = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(os.environ["TOLD"]).write_text(str(child.pid))
time.sleep(600)
"""


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """What a run with peers that are well and one that is killed prints, and its folder."""
    folder = tmp_path_factory.mktemp("step")
    (folder / "flashoptim.py").write_text(KILLED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        patch.chdir(folder)
        (folder / "benchmarks").mkdir()
        peers = ["--peers", "compute,flashoptim,torch,fsdp2"]
        ours = ["--ours", "gpu=64MiB,host=64MiB,place=weight:device+grad:device+state:host,name=spilled"]
        ours += ["--ours", "gpu=peak:torch,name=as torch"]
        files = ["--trace", "trace.json", "--profile", "profile.json", "--commit", "abc"]
        work = ["--steps", "2", "--warmup", "1", "--micro-batches", "2"]
        yield here("bench", "step", *TINY, *work, *peers, *ours, *files), folder


def body_of(folder: Path) -> dict[str, Any]:
    (path,) = (folder / "benchmarks/results").glob("step_cpu_*.json")
    body: dict[str, Any] = json.loads(path.read_text())
    return body


def test_every_engine_has_a_row(compared: tuple[str, Path]) -> None:
    told, folder = compared
    engines = {row["name"]: row for row in body_of(folder)["engines"]}
    assert list(engines) == ["compute", "flashoptim", "torch", "fsdp2", "spilled", "as torch"]
    assert [name for name in engines if engines[name]["ok"]] == ["compute", "torch", "spilled"]
    assert "killed by SIGKILL" in engines["flashoptim"]["reason"]
    assert "expected a cuda device, found none" in engines["fsdp2"]["reason"]
    assert "expected the GPU peak of torch as a budget" in engines["as torch"]["reason"]
    for row in engines.values():
        assert row["name"] in told and (row["ok"] or row["reason"] in told)


def test_figures_agree_with_each_other(compared: tuple[str, Path]) -> None:
    body = body_of(compared[1])
    done = {row["name"]: row for row in body["engines"] if row["ok"]}
    for row in done.values():
        # One to warm up, one from whose end on is counted, and two.
        assert row["tokens"] == 32 and len(row["steps_seconds"]) == 2 and len(row["losses"]) == 4
        assert row["step_seconds"] == pytest.approx(sum(row["steps_seconds"]) / 2, rel=0.2)
        assert row["tokens_per_second"] == pytest.approx(32 / row["step_seconds"])
        assert row["model_tflops"] == pytest.approx(6 * row["parameters"] * 32 / row["step_seconds"] / 1e12)
        assert row["host"]["resident"] > 50 << 20 and row["gpu_peak"] is None
        assert 0 < row["host"]["grown"] == row["host"]["resident"] - row["host"]["before_set_up"]
        assert row["host"]["before_set_up"] > 50 << 20, "Python and torch"
        assert row["seconds"].keys() == {"load", "build", "set-up", "warm-up", "steps"}
    assert done["compute"]["losses"][0] == pytest.approx(done["spilled"]["losses"][0], rel=0.01), "the same tokens"
    speed = {name: row["tokens_per_second"] for name, row in done.items()}
    assert body["ratios"]["spilled"]["compute"] == pytest.approx(speed["spilled"] / speed["compute"])
    report = done["spilled"]["report"]
    assert report["plan"]["parameters"] == done["spilled"]["parameters"]
    assert report["bytes"]["host"]["state"] > 0 and report["moved"]["up"] > 0


def test_a_result_says_where_it_comes_from(compared: tuple[str, Path]) -> None:
    told, folder = compared
    body = body_of(folder)
    assert body["machine"]["cores"] >= 1 and body["machine"]["host_memory"] > 0 and body["machine"]["gpu"] is None
    assert body["versions"]["torch"] == torch.__version__ and "deepspeed" in body["versions"]
    assert body["sources"]["told"] == "abc" and body["sources"]["commit"] != "abc", "git is here, and says its own"
    assert len(body["sources"]["sha256"]) == 64
    assert body["date"].endswith("+00:00") and body["command"].startswith("overspill")
    assert body["training"]["micro_batches"] == 2 and body["link"] is None
    (chart,) = (folder / "benchmarks/results").glob("step_cpu_*.png")
    assert chart.read_bytes().startswith(b"\x89PNG") and chart.name in told


def test_a_step_of_ours_is_looked_at(compared: tuple[str, Path]) -> None:
    told, folder = compared
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert json.loads((folder / "profile.json").read_text())["traceEvents"]
    (ours,) = (row for row in body_of(folder)["engines"] if row["name"] == "spilled")
    assert 0 < ours["own_host_seconds"] < ours["seconds"]["steps"]
    # Every state came up and went down once, and nothing else passed.
    stream, moved = ours["stream"], ours["report"]["moved"]
    assert stream["elements"] == {"up": ours["parameters"], "down": ours["parameters"]}
    assert stream["bytes"] == {"up": moved["up"], "down": moved["down"]}
    assert stream["elements_per_second"] == pytest.approx(ours["parameters"] / stream["busy_seconds"])
    assert f"spilled: in the traced step states of {stream['elements_per_second'] / 1e9:.2f} G elements/s" in told


@pytest.mark.full
def test_a_peer_that_hangs_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchao.py").write_text(HANGING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("TOLD", str(tmp_path / "child"))
    monkeypatch.chdir(tmp_path)
    begin = time.monotonic()
    told = here(
        "bench", "step", *TINY, "--peers", "torchao", "--ours", "none", "--limit", "6", "--out", "a/b.json", code=1
    )
    assert time.monotonic() - begin < 30
    assert "not done after 6 s, in phase 'start'; ended" in told
    child = Path("/proc", (tmp_path / "child").read_text())
    assert not child.exists() or "zombie" in (child / "status").read_text(), "a child was left"
    (row,) = json.loads((tmp_path / "a/b.json").read_text())["engines"]
    assert not row["ok"] and row["process_seconds"] >= 6


@pytest.mark.full
def test_the_largest_size_is_trained_and_the_next_refused(tmp_path: Path) -> None:
    budgets = ["--gpu", "24MiB", "--host", "24MiB"]
    work = ["--seq", "16", "--micro-batch", "1", "--from", "300K", "--ratio", "1.3"]
    both = ["--ours", "", "--ours", "states=compact,clip=0,name=small"]
    out = tmp_path / "largest.json"
    told = here("bench", "max-size", *budgets, *work, "--engine", "ours", *both, "--out", str(out))
    case, small = json.loads(out.read_text())["cases"]
    assert (case["label"], small["label"]) == ("ours", "small")
    assert small["row"]["ok"] and small["row"]["settings"]["training"]["clip"] == 0.0
    assert small["row"]["parameters"] > case["row"]["parameters"]
    assert case["row"]["ok"] and len(case["row"]["steps_seconds"]) == 3
    assert case["row"]["settings"]["training"]["clip"] == 1.0
    largest, following = case["row"]["parameters"], case["next"]["parameters"]
    assert 1.1 < following / largest < 1.5
    assert case["next"]["refused"].startswith("expected room for") and case["next"]["refused"] in told
    by_size = {each["parameters"]: each["refused"] for each in case["search"]["tries"]}
    assert by_size[largest] is None and by_size[following] == case["next"]["refused"]
    assert case["row"]["report"]["peak"]["host"] <= 24 << 20


@pytest.mark.parametrize("ratio", [1.02, 1.3, 2.0])
@pytest.mark.parametrize("limit", [1e6, 3.3e6, 47e6])
def test_a_search_ends_between_two_sizes(limit: float, ratio: float) -> None:
    asked = {"least": 1e6, "ratio": ratio}

    def attempt(sizes: Sizes) -> str | None:
        return None if sizes.parameters <= limit * 1.01 else f"{sizes.parameters} are too many"

    found = search(asked, attempt, lambda _: None)
    tried = {each["place"]: each["refused"] for each in found.tries}
    assert tried[found.place] is None and tried[found.place + 1] == found.refusal
    assert len(found.tries) == len(tried), "no size is tried twice"
    with pytest.raises(OptionError, match="a smaller --from"):
        search({**asked, "least": 2 * limit}, attempt, lambda _: None)


@pytest.mark.parametrize("said", [{}, {"update": "eager", "kernels": "auto"}])
def test_a_plan_without_room_for_activations_is_refused(said: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the first gradient of a step's only pass they may have the gradients' room, too."""
    keywords = {"gpu": 64 << 20, "host": 64 << 20, **said}
    training = Training(seq=16)

    def largest_of(taken: Activations, training: Training) -> tuple[overspill.Plan, Sizes, str]:
        monkeypatch.setattr(searching, "activations", lambda training, sizes, dtype: taken)
        job = Job(kind="plan", training=training, keywords=keywords, search={"least": 1e6, "ratio": 1.05})
        found = searching.largest_planned(job, lambda _: None)
        sizes = searching.grid(job.search, found["place"])
        return searching.plan(training, sizes, found["keywords"]), sizes, found["refusal"]

    def kept(plan: overspill.Plan) -> tuple[int, int]:
        grads = sum(plan.bytes_of("device", what) for what in ("grad", "gradients before their update"))
        return plan.bytes_of("device", "activations"), grads

    taken = 24 << 20
    free, before, after, twice = (
        largest_of(activations, replace(training, micro_batches=count))
        for activations, count in (
            (Activations(0, 0), 1),
            (Activations(taken, 0), 1),
            (Activations(0, taken), 1),
            (Activations(taken, 0), 2),
        )
    )
    assert before[1].parameters < free[1].parameters and after[1].parameters < before[1].parameters
    assert all("of activations beside what is planned" in refusal for *_, refusal in (before, after, twice))
    room, grads = kept(before[0])
    assert grads and room < searching.HOLES * taken <= room + grads
    assert all(searching.HOLES * taken <= kept(plan)[0] for plan, *_ in (after, twice))


@pytest.mark.parametrize(("precision", "item"), [("bf16", 2), ("fp16", 2), ("fp32", 4)])
def test_activations_are_measured_in_the_precision_that_is_asked_for(
    precision: str, item: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keywords = {"gpu": 64 << 20, "host": 64 << 20, "precision": precision}
    job = Job(kind="plan", training=Training(seq=16), keywords=keywords, search={"least": 1e6, "ratio": 3.0})
    seen = set[int]()

    def measured(training: Training, dtype: torch.dtype, device: torch.device) -> Activations:
        seen.add(next(models.build(training, dtype, torch.device("meta")).parameters()).itemsize)
        return Activations(0, 0)

    monkeypatch.setattr(searching, "compute_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(searching, "_beside_weights", measured)
    searching.largest_planned(job, lambda _: None)
    assert seen == {item}


@pytest.mark.parametrize(
    ("sizes", "of_torch"),
    [(["max", "5x"], ["max"]), (["5x"], ["max"]), (["1B"], ["1B"]), (["1B", "2x"], ["max", "1B"])],
)
def test_multiples_are_for_ours_and_their_unit_is_found(sizes: list[str], of_torch: list[str]) -> None:
    asked = largest.Run(training=Training(), engines=["torch", "ours"], sizes=sizes, ours=[Ours()], search={})
    asked.check()
    assert list(asked.asked_of("torch")) == of_torch and list(asked.asked_of("ours")) == sizes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["step", "--peers", "torch,lightning"], "--peers as a list of compute, torch, .*, found 'lightning'"),
        (["step", "--peers", "torch,torch"], "engines of different names, found 'torch' twice"),
        (["step", "--peers", "none", "--ours", "none"], "something to measure, found neither"),
        (["step", "--ours", "gpu"], "--ours as NAME=VALUE,NAME=VALUE, found 'gpu'"),
        (["step", "--ours", "gpus=1GB"], "found 'gpus' in 'gpus=1GB'; known are build, clip, delay_after"),
        (["step", "--ours", "gpu=lots"], "found 'lots'"),
        (["step", "--ours", "place=state:moon"], "to one of .*, found 'state': 'moon'"),
        (["step", "--ours", "clip=-1"], "clip= from 0, which means not to clip, found '-1'"),
        (["step", "--ours", "gpu=peak:deepspeed"], "add it to --peers"),
        (["step", "--ours", "update=delayed"], "delay_after= below the 3 steps .*, found 40 .*delay_after=2 or more"),
        (["step", "--build", "moon"], "--build to be one of device, host, meta, found 'moon'"),
        (["step", "--steps", "0"], "--steps from 1, found 0"),
        (["step", "--seq", "1"], "--seq from 2, found 1"),
        (["step", "--clip", "nan"], "--clip from 0, which means not to clip, found nan"),
        (["step", "--heads", "7"], "divide --hidden 3072 into even parts, found 7"),
        (["step", "--params", "1B", "--ffn", "64"], "--params or --ffn, found both"),
        (["step", "--model", "missing"], "a folder with a config.json"),
        (["step", "--model", "missing", "--layers", "2"], "--layers without --model, found both"),
        (["step", "--trace", "nowhere/trace.json"], "--trace as a file in an existing folder"),
        (["step", "--out", "."], "a file that can be written, found the folder '.'"),
        (["max-size", "--engine", "deepspeed"], "--engine as a list of ours, torch, torch-bf16, flashoptim"),
        (["max-size", "--size", "5x"], "--engine torch,ours with --size 5x, found --engine ours"),
        (["max-size", "--size", "big"], "found 'big'"),
        (["max-size", "--ours", "gpu=peak:torch"], "a gpu= of its own, found that of a peer"),
        (["max-size", "--ours", "clip=0", "--ours", "clip=0"], "engines of different names"),
        (["max-size", "--ratio", "1"], "--ratio greater than 1 and up to 2, found 1.0"),
        (["chart", "missing.json"], "a result file of overspill bench, found 'missing.json'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        here("bench", *options)


def test_the_default_model_is_one_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match="--params or --model where there is no GPU, found neither"):
        here("bench", "step")


def test_a_run_without_figures_has_failed(tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    here("bench", "step", *TINY, "--peers", "none", "--gpu", "1KB", "--out", str(out), code=1)
    assert "expected a device budget" in json.loads(out.read_text())["engines"][0]["reason"]
    assert not out.with_suffix(".png").exists()


def test_configurations_are_read_as_prepare_takes_them() -> None:
    base = {"gpu": "auto", "host": "8GiB"}
    found = configurations.parse(
        "gpu=0.5,place=weight:host+state:nvme,nvme=/a+/b,micro_batches=4,clip=0,build=meta", base
    )
    assert found.keywords == {
        "gpu": 0.5,
        "host": "8GiB",
        "place": {"weight": "host", "state": "nvme"},
        "nvme": ["/a", "/b"],
        "micro_batches": 4,
    }
    assert (found.clip, found.build, found.budget_of) == (0.0, "meta", None)
    assert configurations.parse("", {}).label == "ours" and configurations.parse("gpu=1GB", {}).label == "ours gpu=1GB"
    peak = configurations.parse("gpu=peak:deepspeed,name=small", {"host": "1GB"})
    assert peak.budget_of == "deepspeed" and peak.within(7).keywords == {"host": "1GB", "gpu": 7}


def test_a_job_crosses_the_border(tmp_path: Path) -> None:
    training = Training(sizes=LLAMA, seq=16, clip=0.5)
    job = Job(kind="train", label="x", training=training, keywords={"place": {"state": "host"}}, cap="1GB")
    job.write(tmp_path / "job.json")
    assert read_job(tmp_path / "job.json") == job


def test_the_default_model_is_that_of_the_evidence() -> None:
    assert LLAMA.parameters == 3_141_172_224 and said(LLAMA.parameters) == "3.14B"
    assert tflops(LLAMA.parameters, 8192, 0.465) == pytest.approx(332, abs=1)
    for count in (350 * 10**6, 3 * 10**9, 18 * 10**9):
        assert sizes_of(count).parameters == pytest.approx(count, rel=0.02) and sizes_of(count).ffn % 64 == 0


def test_the_stream_rate_counts_each_way_half_and_no_gaps(tmp_path: Path) -> None:
    names = enumerate(("up", "down", "read", "cores"))
    events: list[dict[str, Any]] = [{"ph": "M", "tid": tid, "args": {"name": name}} for tid, name in names]

    def passes(tid: int, kind: str, page: tuple[int, int], begin: float, end: float) -> None:
        args = {"unit": page[0], "item": page[1], "bytes": 10}
        events.append(
            {"ph": "X", "tid": tid, "name": kind, "ts": begin * 1e6, "dur": (end - begin) * 1e6, "args": args}
        )

    passes(0, "state_fetch", (0, 0), 1.0, 2.0)
    passes(0, "state_fetch", (1, 1), 2.0, 3.0)
    passes(1, "state_store", (0, 0), 2.5, 4.0)  # they pass each other
    passes(1, "state_store", (1, 1), 7.0, 8.0)  # after a gap
    passes(0, "page_grads", (0, 0), 5.0, 6.0)
    passes(2, "state_fetch", (0, 0), 5.0, 6.0)  # from a disk
    passes(3, "update", (1, 0), 0.0, 9.0)
    sizes = {(0, 0): (300, 100), (1, 0): (7,), (1, 1): (600,)}
    pages = {page: SimpleNamespace(parts=[SimpleNamespace(numel=n) for n in parts]) for page, parts in sizes.items()}
    units = [SimpleNamespace(pages=[pages[0, 0]]), SimpleNamespace(pages=[pages[1, 0], pages[1, 1]])]
    plan: Any = SimpleNamespace(model=SimpleNamespace(units=units))
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = passing.stream(path, plan)
    assert found is not None and found["busy_seconds"] == pytest.approx(4.0)
    assert found["elements"] == {"up": 1000, "down": 1000} and found["bytes"] == {"up": 20, "down": 20}
    assert found["elements_per_second"] == pytest.approx(1000 / 4.0)
    path.write_text(json.dumps({"traceEvents": events[:4]}))
    assert passing.stream(path, plan) is None


def test_the_peak_of_a_peer_is_that_of_its_steps() -> None:
    phases = {name: {"reserved": 9, "allocated": n} for name, n in (("set-up", 8), ("warm-up", 4), ("steps", 5))}
    row = {"name": "deepspeed", "ok": True, "gpu": phases, "gpu_peak": rows.gpu_peak(phases)}
    assert steps._peak_of("deepspeed", [row]) == 5 and row["gpu_peak"] == {"reserved": 9, "allocated": 8}
    assert steps._peak_of("deepspeed", [{**row, "ok": False}]) is None


def test_host_peaks_are_those_of_training() -> None:
    by_phase = {"load": 90, "set-up": 10, "steps": 30}
    host = {"used_by_phase": by_phase, "resident_by_phase": {"build": 7}}
    assert rows.host_peaks(host, 5) == {"used": 30, "resident": 7}, "phases that were too short to be seen"
    assert rows.host_peaks(host, 25) == {"used": 30, "resident": 25}


def row(name: str, engine: str, seconds: float, **more: Any) -> dict[str, Any]:
    figures = {"ok": True, "step_seconds": seconds, "tokens_per_second": 100 / seconds, "parameters": 10, "report": {}}
    return {"name": name, "engine": engine, **figures, "host": {"used": 100}, **more}


def test_the_least_possible_step_is_computing_or_moving() -> None:
    settings = {"training": {"recompute": False, "micro_batches": 1}, "keywords": {}}
    plan = {"limits": {"hands": "streamed"}, "dtypes": {"state": "exp_avg fp32"}}
    reports = [
        {"moved": {"up": n, "down": n}, "bytes": {"device": {"updates passing": 5}, "host": {"state": n}}, "plan": plan}
        for n in (10, 100)
    ]
    ours = [row(f"ours {report['moved']['up']}", "ours", 2.2, report=report, settings=settings) for report in reports]
    rates = {"up": 60.0, "down": 50.0, "both": 100.0}
    found = rows.floors([row("compute", "compute", 1.0), *ours], rates)
    assert found["ours 10"]["floor_seconds"] == 1.0 and found["ours 100"]["floor_seconds"] == 2.0
    assert found["ours 100"]["above"] == pytest.approx(1.1)
    assert found["ours 10"]["predicted_seconds"] == pytest.approx(1.0)
    assert found["ours 100"]["predicted_seconds"] == pytest.approx(2.0 + 2 / 3), "100 down at 50, then what is left"
    assert "1.100" in rows.floor_table(found) and "2.6667" in rows.floor_table(found)
    assert rows.floors(ours, rates) == {} and rows.floors([row("compute", "compute", 1.0), *ours], None) == {}


def test_host_bytes_are_counted_above_those_of_computing() -> None:
    known = [row("compute", "compute", 1.0), row("ours", "ours", 1.0, host={"used": 200})]
    assert rows.above_compute(known) == {"ours": 10.0} and rows.above_compute(known[1:]) == {}


def test_results_are_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    machine, date = {"gpu": "NVIDIA H200"}, "2026-11-15T10:00:00+00:00"
    first = results.place("step", machine, date)
    assert first == Path("runs/step_nvidia-h200_2026-11-15.json")
    results.write(first, {"a": 1})
    assert results.read(first) == {"a": 1}
    assert results.place("step", machine, date) == Path("runs/step_nvidia-h200_2026-11-15-2.json")
    (tmp_path / "benchmarks").mkdir()
    assert results.place("step", {}, date) == Path("benchmarks/results/step_cpu_2026-11-15.json")


def test_a_package_that_is_missing_is_named() -> None:
    engine = Engine("", OWN["torch"].build, OWN["torch"].set_up, packages=("no_such_package",))
    with pytest.raises(OptionError, match="expected the package no_such_package, found none; install it"):
        engine.check(torch.device("cpu"))


def test_deepspeed_is_told_the_same_step() -> None:
    job = Job(kind="train", training=Training(sizes=LLAMA, micro_batch=4, micro_batches=8))
    second, third = deepspeed_config(job, 2), deepspeed_config(job, 3)
    assert second["gradient_accumulation_steps"] == 8 and second["gradient_clipping"] == 1.0
    assert "offload_param" not in second["zero_optimization"] and "offload_param" in third["zero_optimization"]


def test_memory_is_seen_from_outside() -> None:
    assert used_bytes() > 0
    assert resident_of_group(os.getpgrp()) > 10 << 20


def test_a_window_begins_at_the_end_of_a_step() -> None:
    """What is left over from before it, and the step that it begins behind, are not counted."""
    takes = iter([0.3, 0.02, 0.02, 0.02])

    def step() -> torch.Tensor:
        time.sleep(next(takes))
        return torch.zeros(())

    timed = timing.window(step, 3, torch.device("cpu"), lambda *_: None, ([], []))
    assert 0.02 <= timed.step < 0.2 and len(timed.steps) == 3 and len(timed.losses) == 4


@pytest.mark.parametrize(("out", "chart"), [(None, "x.foo"), ("x.png", None), (None, ".")])
def test_pictures_that_cannot_be_drawn_are_refused_before_anything_is_measured(
    out: str | None, chart: str | None, tmp_path: Path
) -> None:
    there = [None if name is None else tmp_path / name for name in (out, chart)]
    with pytest.raises(OptionError, match=r"expected --(chart|out) to be"):
        results.Files("step", *there, {})
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_name_is_refused() -> None:
    told = here("plan", "--params", "1M", "--gpu", "64MiB", "--host", "64MiB", "--nvme", "", code=2)
    assert "expected a folder, found an empty name" in " ".join(told.split())
