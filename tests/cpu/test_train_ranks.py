"""`overspill train` over ranks: speaks once, trains on the batches of one process, stops and resumes together."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401 - ranks are forks, which need not import it again

from overspill.cli.checkpoints import Checkpoints
from overspill.cli.ranks import Elsewhere, Ranks
from overspill.cli.settings import FineTune, resolve_resumed
from overspill.cli.verify import Verdict, distances
from overspill.comm.pulse import born, machine, origin
from overspill.errors import OptionError, OverspillError, RankError
from overspill.report import plot
from tests import ranks
from tests.commands import apart, here, log_of, weights_of
from tests.folders import TEXT, make_llama

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
TINY = ["--layers", "2", "--hidden", "64", "--heads", "2", "--seq", "32", "--batch", "2", "--steps", "4"]
OPTIONS = ["--seq", "16", "--batch", "2", "--schedule", "constant", "--lr", "1e-3", "--precision", "fp32"]
SHORT = ["--steps", "4", "--save-every", "2", "--validate-every", "2", "--validation-batches", "3"]
FOREVER = ["--steps", "1000000"]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, of which one draws random numbers, and a text of few samples, so that epochs pass."""
    path = tmp_path_factory.mktemp("given")
    make_llama(path / "llama", attention_dropout=0.0)
    make_llama(path / "drops")
    (path / "a.txt").write_text(TEXT[:1500])
    return path


def options(given: Path, model: str, run: Path) -> list[str]:
    return ["--model", str(given / model), "--data", str(given / "a.txt"), "--run-folder", str(run), *OPTIONS]


@pytest.mark.full
def test_torchrun_trains_the_built_in_model_and_is_told_of_once(tmp_path: Path) -> None:
    told = apart(TORCHRUN, "-m", "overspill", "train", *TINY, "--verify", "--run-folder", "run", cwd=tmp_path)
    stdout, stderr = told.communicate(timeout=240)
    assert told.returncode == 0, stdout + stderr
    assert "rank" not in stderr.replace("torch.distributed.run", "") and "Warning" not in stderr, stderr
    for once in (
        "118,528 parameters",
        "training 1/4",
        "training 4/4",
        "plainly 4/4",
        "the run is in run",
        "within 0.001",
    ):
        assert stdout.count(once) == 1, f"{once}\n{stdout}"
    run = tmp_path / "run"
    assert sorted(p.name for p in run.iterdir()) == ["log.jsonl", "plan.json", "plot.png", "trace.json"]
    assert json.loads((run / "plan.json").read_text())["settings"]["ranks"] == 2
    log = log_of(run)
    assert [line["step"] for line in log] == [1, 2, 3, 4]
    assert all(len(line["ranks"]) == 2 and line["ranks"][1]["sent"] and line["ranks"][1]["bytes"] for line in log)


def two_ranks(given: Path, tmp_path: Path) -> list[str]:
    """What two ranks do, one after the other: train, train again from a checkpoint, stop, and refuse."""
    here("train", *options(given, "llama", tmp_path / "run"), *SHORT, "--zero", "3")
    plot.draw = lambda folder: None  # which takes longer than all the rest
    here("train", *options(given, "drops", tmp_path / "drops"), *SHORT, "--micro-batches", "2", "--zero", "2")
    if os.environ["RANK"] == "0":
        shutil.copytree(tmp_path / "drops", tmp_path / "again")
        shutil.rmtree(tmp_path / "again/checkpoints/step-000004")
    torch.distributed.barrier()
    here("train", "--resume", "--run", str(tmp_path / "again"))

    if os.environ["RANK"] == "1":  # one of them is asked to stop, all do
        threading.Thread(target=stop_after, args=(tmp_path / "stopped", 2)).start()
    told = [here("train", *options(given, "llama", tmp_path / "stopped"), *FOREVER, code=143)]
    for bad in (["--optimizer", "lion"], ["--gpu", "1KiB"]):
        try:
            here("train", *options(given, "llama", tmp_path / "bad"), *bad)
        except OverspillError as error:
            told.append(type(error).__name__ if isinstance(error, Elsewhere) else str(error))
    return told


def stop_after(run: Path, steps: int) -> None:
    while len(log_of(run)) < steps:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


def test_two_ranks_train_as_one_process_does_and_stop_and_resume_together(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot, "draw", lambda folder: None)
    first, second = ranks.run(two_ranks, 2, given, tmp_path)
    names = ["checkpoints", "log.jsonl", "model", "plan.json", "plot.png", "trace.json"]
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == names
    assert not (tmp_path / "bad").exists()

    # The same batches, as micro-batches of one process. Sums run in another order: a relative difference of 1e-7 in a
    # gradient is at most lr * 1e-3 in a weight after a step of Adam, where the gradient is not next to nothing.
    here("train", *options(given, "llama", tmp_path / "alone"), *SHORT, "--micro-batches", "2")
    ours, alone = weights_of(tmp_path / "run"), weights_of(tmp_path / "alone")
    for name, value in alone.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-5, msg=name)
    for line, other in zip(log_of(tmp_path / "run"), log_of(tmp_path / "alone"), strict=True):
        for key in ("loss", "grad_norm", "validation"):
            assert line[key] == other[key] or line[key] == pytest.approx(other[key], rel=1e-5)
        assert (line["step"], line["lr"], len(line["ranks"])) == (other["step"], other["lr"], 2)

    # Resumed, with dropout: the same bits.
    again, drops = weights_of(tmp_path / "again"), weights_of(tmp_path / "drops")
    assert [name for name, value in drops.items() if not torch.equal(again[name], value)] == []
    assert [line["loss"] for line in log_of(tmp_path / "again")] == [
        line["loss"] for line in log_of(tmp_path / "drops")
    ]

    # Both stopped after the same step, one of them says so; and one process goes on with the batches of both.
    done = len(log_of(tmp_path / "stopped"))
    assert Checkpoints(tmp_path / "stopped/checkpoints").steps() == [done]
    assert "stopped by SIGTERM" in first[0] and second[0] == ""
    told = here("train", "--resume", "--run", str(tmp_path / "stopped"), "--steps", str(done + 2))
    assert f"after step {done} of {done + 2}" in told
    assert json.loads((tmp_path / "stopped/plan.json").read_text())["settings"]["micro_batches"] == 2

    assert "--optimizer to be one of" in first[1] and "expected a device budget of at least" in first[2]
    assert second[1:] == ["Elsewhere", "Elsewhere"]


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_to_torchrun_saves_a_checkpoint_from_which_ranks_continue(
    given: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    command = [*TORCHRUN, "-m", "overspill", "train"]
    process = apart(command, *options(given, "llama", run), *FOREVER, cwd=tmp_path)
    limit = time.monotonic() + 240
    while len(log_of(run)) < 3:
        assert process.poll() is None and time.monotonic() < limit, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    told, error = process.communicate(timeout=120)
    done = len(log_of(run))
    assert process.returncode != 0 and f"stopped by {number.name}; saved" in told, told + error
    assert error.count("finishing this step") == 1 and "ended at once" not in error
    assert Checkpoints(run / "checkpoints").steps() == [done]
    again = apart(command, "--resume", "--run-folder", str(run), "--steps", str(done + 2), cwd=tmp_path)
    told, error = again.communicate(timeout=240)
    assert again.returncode == 0 and f"after step {done} of {done + 2}" in told, told + error
    assert [line["step"] for line in log_of(run)] == list(range(1, done + 3))


@pytest.mark.full
def test_a_rank_that_dies_ends_the_run_with_its_name(given: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = apart([*TORCHRUN, "-m", "overspill", "train"], *options(given, "llama", run), *FOREVER, cwd=tmp_path)
    limit = time.monotonic() + 240
    while len(log_of(run)) < 2:
        assert process.poll() is None and time.monotonic() < limit, process.communicate()
        time.sleep(0.05)
    workers = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    os.kill(int(workers[1]), signal.SIGKILL)
    told, error = process.communicate(timeout=120)
    assert process.returncode == 1, told + error
    assert "overspill: expected all ranks at" in error and "found that rank 1 died" in error, error


def test_other_ranks_share_the_same_batches_or_are_refused() -> None:
    before = FineTune(model=Path("a"), data=Path("b"), micro_batches=2, ranks=2).to_dict()
    assert resolve_resumed(before, {}, 4).micro_batches == 1
    assert resolve_resumed(before, {"zero": "3"}, 1).micro_batches == 4
    with pytest.raises(OptionError, match=r"divides the 4 batches of a step .* on 2 ranks.*, found 3"):
        resolve_resumed(before, {}, 3)
    with pytest.raises(OptionError, match=r"expected 4 batches a step.* found --micro-batches 3 on 2 ranks"):
        resolve_resumed(before, {"micro_batches": 3}, 2)


def test_what_is_apart_from_torch_is_judged_by_its_size() -> None:
    plain = {"a": torch.ones(4), "a (exp_avg)": torch.zeros(4)}
    near = {"a": torch.ones(4) + 1e-6, "a (exp_avg)": torch.zeros(4)}
    found = distances(near, plain, [1.0], [1.0])
    assert found.keys() == {"weights", "exp_avg", "losses"} and 0 < found["weights"] < 1e-5 and not found["losses"]
    assert Verdict(2, ("a",), 1, (), found).equal
    assert not Verdict(2, ("a",), 1, (), distances({**plain, "a": torch.zeros(4)}, plain, [1.0], [1.0])).equal
    assert not Verdict(2, (), 1, (), distances(near, plain, [1.0], [1.0, 2.0])).equal


def test_who_dies_between_steps_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks only tell each other how they are, nobody but this process looks who is there."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    seats = (origin(), (machine(), child.pid, born(child.pid) or ""))

    def broken(*_: object) -> None:
        child.kill()
        raise RuntimeError("connection reset by peer")

    monkeypatch.setattr(torch.distributed, "all_gather_object", broken)
    with pytest.raises(RankError, match=r"expected all ranks at the next step, found that rank 1 died; look"):
        Ranks(0, 2, seats).exchange(None)
    child.wait()
    monkeypatch.setattr("overspill.cli.ranks.PATIENCE", 0.1)
    with pytest.raises(RankError, match=r"one of them is gone \(connection reset by peer\)"):
        Ranks(0, 2, (origin(), origin())).exchange(None)
