"""A run that was stopped, by whatever means, continues to the bits of one that was not."""

import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from overspill.cli import randomness
from overspill.cli.checkpoints import Checkpoints, newest_run
from overspill.cli.settings import FineTune, check_same, resolve_resumed
from overspill.cli.signals import Interruption
from overspill.cli.text_model import check_target
from overspill.cli.train import _found
from overspill.errors import OptionError
from overspill.interrupts import ending_at_once
from overspill.report.run import RunFolder
from tests.commands import apart, here, log_of, weights_of
from tests.folders import TEXT, make_llama

# No schedule that depends on the number of steps, so that a run stopped anywhere can be compared with a short one.
OPTIONS = ["--seq", "16", "--batch", "2", "--schedule", "constant", "--lr", "1e-3", "--validate-every", "3"]
FOREVER = ["--steps", "1000000"]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, whose attention has dropout, and a text of few samples, so that epochs pass."""
    path = tmp_path_factory.mktemp("given")
    make_llama(path / "llama")
    (path / "a.txt").write_text(TEXT[:1500])
    (path / "other.txt").write_text(TEXT[1:1501])
    return path


def options(given: Path, run: Path) -> list[str]:
    return ["--model", str(given / "llama"), "--data", str(given / "a.txt"), "--run", str(run), *OPTIONS]


def resumed(run: Path, *more: str) -> str:
    return here("train", "--resume", "--run", str(run), *more)


def check_bits(run: Path, other: Path) -> None:
    ours, expected = weights_of(run), weights_of(other)
    assert [name for name, value in expected.items() if not torch.equal(ours[name], value)] == []
    for ours_line, line in zip(log_of(run), log_of(other), strict=True):
        keys = ("step", "loss", "lr", "grad_norm")
        assert [ours_line[key] for key in keys] == [line[key] for key in keys]


def wait_for_steps(process: "subprocess.Popen[str]", run: Path, steps: int) -> None:
    limit = time.monotonic() + 120
    while len(log_of(run)) < steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit, "the training does not begin"
        time.sleep(0.01)


def test_ctrl_c_saves_and_the_run_continues_to_the_same_bits(given: Path, tmp_path: Path, command: list[str]) -> None:
    run = tmp_path / "run"
    process = apart(command, "train", *options(given, run), *FOREVER, cwd=tmp_path)
    wait_for_steps(process, run, 3)
    process.send_signal(signal.SIGINT)
    told, error = process.communicate(timeout=60)
    assert process.returncode == 130, told + error
    assert "finishing this step" in error and "Traceback" not in error
    done = len(log_of(run))
    assert f"step-{done:06d}" in told and f"overspill train --resume --run {run}" in told
    assert Checkpoints(run / "checkpoints").steps() == [done]

    assert f"after step {done} of {done + 5}" in resumed(run, "--steps", str(done + 5))
    here("train", *options(given, tmp_path / "other"), "--steps", str(done + 5))
    check_bits(run, tmp_path / "other")


def test_a_killed_run_continues_from_its_last_checkpoint_to_the_same_bits(
    given: Path, tmp_path: Path, command: list[str]
) -> None:
    run = tmp_path / "run"
    budgets = ["--gpu", "1MiB", "--host", "2MiB", "--save-every", "2"]
    process = apart(command, "train", *options(given, run), *budgets, *FOREVER, cwd=tmp_path)
    wait_for_steps(process, run, 5)
    process.kill()
    process.communicate(timeout=60)
    # What a kill in the middle may leave: half a line, half a checkpoint, half a removal.
    with (run / "log.jsonl").open("a") as file:
        file.write('{"step": 9999, "lo')
    (run / "checkpoints/.step-999999.partial").mkdir()
    (run / "checkpoints/.removed-step-000001").mkdir()
    done = Checkpoints(run / "checkpoints").steps()[-1]
    told = resumed(run, "--steps", str(done + 5), "--gpu", "2MiB")
    assert f"after step {done} of {done + 5}" in told
    here("train", *options(given, tmp_path / "other"), "--steps", str(done + 5))
    check_bits(run, tmp_path / "other")
    assert [line["step"] for line in log_of(run)] == list(range(1, done + 6))
    assert not (run / "checkpoints/.removed-step-000001").exists()


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one_with_every_schedule(
    given: Path, tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    cosine = ["--schedule", "cosine", "--steps", "7", "--save-every", "4", "--micro-batches", "2"]
    here("train", *options(given, other), *cosine)
    shutil.copytree(other, run)
    shutil.rmtree(run / "checkpoints/step-000007")
    shutil.rmtree(run / "model")
    assert "after step 4 of 7" in resumed(run)
    check_bits(run, other)
    assert [line["validation"] for line in log_of(run)] == [line["validation"] for line in log_of(other)]

    # Nothing is left to train: the model is exported again.
    shutil.rmtree(run / "model")
    resumed(run)
    check_bits(run, other)
    # More of it: from the newest run in runs/, which is the one that was touched last.
    (tmp_path / "runs").mkdir()
    run.rename(tmp_path / "runs" / "a")
    other.rename(tmp_path / "runs" / "b")
    RunFolder(tmp_path / "runs" / "a").plan.touch()
    monkeypatch.chdir(tmp_path)
    assert "resuming runs/a after step 7 of 9" in here("train", "--resume", "--steps", "9")
    assert len(log_of(tmp_path / "runs" / "a")) == 9
    assert Checkpoints(tmp_path / "runs" / "a" / "checkpoints").steps() == [8, 9]


@pytest.mark.parametrize("text", ['{"peak": 1}', "[]", "{torn"])
def test_what_is_no_run_is_passed_over(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in (("good", '{"settings": {"model": "m"}}'), ("other", text)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "plan.json").write_text(content)
    assert newest_run(tmp_path / "runs").name == "good"
    with pytest.raises(OptionError, match=r"expected the plan.json of a run in .*other.*name the run with --run"):
        _found(tmp_path / "runs" / "other")


def test_an_export_of_the_run_itself_is_replaced_when_it_goes_on(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(OptionError, match="new or empty folder"):
        check_target(tmp_path, replaces=True)
    (tmp_path / "model.safetensors").write_text("")
    check_target(tmp_path, replaces=True)
    with pytest.raises(OptionError, match="new or empty folder"):
        check_target(tmp_path)


def test_small_states_continue_to_the_same_bits(given: Path, tmp_path: Path) -> None:
    run, other, exact = tmp_path / "run", tmp_path / "other", tmp_path / "exact"
    long = ["--steps", "6", "--save-every", "3"]
    here("train", *options(given, other), *long, "--states", "compact")
    shutil.copytree(other, run)
    for path in ("checkpoints/step-000006", "model"):
        shutil.rmtree(run / path)
    with pytest.raises(OptionError, match="expected --states compact, as the run that is resumed began with"):
        resumed(run, "--states", "exact")
    assert "after step 3 of 6" in resumed(run)
    check_bits(run, other)
    here("train", *options(given, exact), *long)
    ours, plain = weights_of(run), weights_of(exact)
    assert any(not torch.equal(ours[name], plain[name]) for name in plain), "they are not kept exactly"


def test_a_run_is_not_resumed_as_another_one(given: Path, tmp_path: Path, command: list[str]) -> None:
    run = tmp_path / "run"
    here("train", *options(given, run), "--steps", "3")
    before = (run / "log.jsonl").read_text()
    for said, message in (
        (["--lr", "0.5", "--batch", "4"], r"expected --batch 2, --lr 0.001, as .*, found --batch 4, --lr 0.5"),
        (["--seed", "1"], "expected --seed 0, as the run that is resumed began with, found --seed 1"),
        (["--seq", "8"], "--seq"),
        (["--steps", "2"], "at least the 3 steps that are done in .*, found a run of 2"),
        (["--update", "eager", "--clip", "0"], "expected --clip 1.0, --update lazy, as .*, found --clip 0.0, --up"),
        (["--layers", "2"], "no --layers here"),
        (["--data", str(given / "other.txt")], "--data to hold what it held when the run began"),
    ):
        with pytest.raises(OptionError, match=message):
            resumed(run, *said)
    assert (run / "log.jsonl").read_text() == before
    shutil.copytree(given / "llama", tmp_path / "moved")
    resumed(run, "--model", str(tmp_path / "moved"), "--steps", "4", "--validation-batches", "1", "--no-recompute")
    config = tmp_path / "moved" / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    with pytest.raises(OptionError, match="--model to hold what it held"):
        resumed(run)


def test_runs_of_before_there_were_states_and_updates_to_choose_are_resumed() -> None:
    now = FineTune(model=Path("a"), data=Path("b")).to_dict()
    before = {name: value for name, value in now.items() if name not in ("states", "update")}
    check_same(before, now)
    assert resolve_resumed(before, {}).to_dict() == now
    with pytest.raises(OptionError, match="expected --update lazy, as"):
        check_same(before, {**now, "update": "eager"})


def test_without_a_checkpoint_or_a_run_nothing_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match="a run with --model in 'runs' to resume, found none"):
        here("train", "--resume")
    with pytest.raises(OptionError, match="expected a run in 'other' to resume, found none"):
        here("train", "--resume", "--run", "other")
    (tmp_path / "checkpoints/step-000003.partial").mkdir(parents=True)
    with pytest.raises(OptionError, match="expected a checkpoint to resume from"):
        Checkpoints(tmp_path / "checkpoints").newest()
    demo = RunFolder(tmp_path / "runs" / "demo")
    demo.make()
    demo.write_plan("{}", {"layers": 2})
    with pytest.raises(OptionError, match="found none"):
        newest_run(tmp_path / "runs")
    with pytest.raises(OptionError, match="a run of this version with --model"):
        here("train", "--resume", "--run", str(demo.path))
    with pytest.raises(OptionError, match="--resume or --demo, found both"):
        here("train", "--resume", "--demo")


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    code = (
        "import os, signal, time\n"
        "from overspill.cli.signals import Interruption\n"
        "with Interruption() as interruption:\n"
        "    os.kill(os.getpid(), signal.{first})\n"
        "    assert interruption.caught is signal.{first}\n"
        "    print(interruption.exit_code, flush=True)\n"
        "    os.kill(os.getpid(), signal.{second})\n"
        "    time.sleep(60)\n"
    )
    begun = [
        apart([sys.executable, "-c"], code.format(first=first, second=second), cwd=tmp_path)
        for first, second in (("SIGINT", "SIGINT"), ("SIGTERM", "SIGINT"))
    ]
    for process, first in zip(begun, (130, 143), strict=True):
        told, error = process.communicate(timeout=60)
        assert (process.returncode, told) == (130, f"{first}\n")
        assert "ended at once" in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("started", "code", "said"),
    [
        (["-m", "overspill", "train"], 130, "overspill: interrupted\n"),
        (["{folder}/overspill", "train"], 130, "overspill: interrupted\n"),
        (["-c", "import overspill"], -signal.SIGINT, None),
    ],
    ids=["module", "script", "library"],
)
def test_ctrl_c_while_a_command_is_imported(started: list[str], code: int, said: str | None, tmp_path: Path) -> None:
    """Whatever torch would make of it; whoever imports overspill has Python's own exception."""
    (tmp_path / "torch.py").write_text("import time\nprint('imported', flush=True)\ntime.sleep(60)\n")
    (tmp_path / "overspill").write_text("from overspill.cli import main\nmain()\n")
    arguments = [part.format(folder=tmp_path) for part in started]
    searched = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), *filter(None, sys.path)))}
    with subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=searched
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "imported\n", process.stderr.read()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == code
    assert "KeyboardInterrupt" in error if said is None else error == said


def test_a_command_may_be_imported_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["overspill"])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(ending_at_once().__enter__).result()
    finally:
        signal.signal(signal.SIGINT, before)


def test_signals_are_what_they_were_afterwards() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Interruption() as interruption:
        assert interruption.exit_code == 0
        signal.raise_signal(signal.SIGTERM)
    assert interruption.exit_code == 143
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_every_generator_is_captured() -> None:
    def draw() -> list[Any]:
        import random

        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal(), torch.rand(3).tolist()]

    device = torch.device("cpu")
    randomness.seed_all(2**40)
    draw()
    state = randomness.capture(device)
    expected = draw()
    assert draw() != expected
    randomness.restore(state, device)
    assert draw() == expected
