"""`overspill train --model`: what it computes, what it leaves behind, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, T5Config

from overspill.cli.data import Reader, read_data
from overspill.cli.settings import FineTune, resolve
from overspill.cli.text_model import build
from overspill.errors import BudgetError, OptionError
from tests.commands import here, log_of, weights_of
from tests.folders import TEXT, VOCABULARY, make_llama

LENGTH = ["--seq", "16", "--batch", "2", "--micro-batches", "2", "--steps", "6"]
pytestmark = pytest.mark.usefixtures("command")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a text."""
    path = tmp_path_factory.mktemp("given")
    make_llama(path / "llama")
    (path / "a.txt").write_text(TEXT)
    return path


def train(given: Path, run: Path, *options: str, code: int = 0) -> str:
    files = ["--model", str(given / "llama"), "--data", str(given / "a.txt"), "--run", str(run)]
    return here("train", *files, *options, code=code)


def plain(given: Path, steps: int, warmup: int, lr: float) -> dict[str, torch.Tensor]:
    """The loop that anyone would write: two micro-batches, clipped to 1, a learning rate that only rises."""
    settings = FineTune(model=given / "llama", data=given / "a.txt", seq=16, batch=2)
    tokenizer = AutoTokenizer.from_pretrained(given / "llama")
    reader = Reader(read_data(settings, tokenizer, VOCABULARY).training, 2, 0, torch.device("cpu"))
    model = AutoModelForCausalLM.from_pretrained(given / "llama", dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    torch.manual_seed(0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * ((step + 1) / warmup)
        for _ in range(2):
            (model(**next(reader)).loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def test_training_is_the_plain_loop_bit_for_bit_and_validation_does_not_disturb_it(given: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    budgets = ["--gpu", "1MiB", "--host", "2MiB"]
    options = [*LENGTH, *budgets, "--precision", "fp32", "--lr", "1e-3", "--validate-every", "2", "--save-every", "4"]
    told = train(given, run, *options)
    expected = plain(given, steps=6, warmup=10, lr=1e-3)
    found = weights_of(run)
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []

    assert told.index("budget") < told.index("data: 1 documents") < told.index("training 1/6")
    assert "validation loss" in told and "the model is in" in told
    names = ["checkpoints", "log.jsonl", "model", "plan.json", "plot.png", "trace.json"]
    assert sorted(p.name for p in run.iterdir()) == names
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000004", "step-000006"]
    assert [line["validation"] is not None for line in log_of(run)] == [False, True] * 3
    assert json.loads((run / "plan.json").read_text())["settings"]["lr"] == 1e-3
    # The folder is whole: the same tokenizer, the same config.
    again = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    assert torch.equal(again.lm_head.weight, expected["lm_head.weight"])
    assert AutoTokenizer.from_pretrained(run / "model").encode("a text") == AutoTokenizer.from_pretrained(
        given / "llama"
    ).encode("a text")
    assert (run / "model/config.json").read_bytes() == (given / "llama/config.json").read_bytes()


def test_other_optimizers_schedules_and_places_for_the_model(given: Path, tmp_path: Path) -> None:
    lr = {}
    for schedule, optimizer in (("linear", "sgd"), ("constant", "adagrad"), ("cosine", "adam")):
        run, target = tmp_path / schedule, tmp_path / f"{schedule}-model"
        how = ["--schedule", schedule, "--optimizer", optimizer, "--warmup", "2", "--lr", "1e-3", "--validation", "0"]
        train(given, run, *LENGTH, *how, "--export", str(target), "--no-recompute", "--keep", "1", "--save-every", "1")
        log = log_of(run)
        assert all(line["validation"] is None for line in log) and not (run / "model").exists()
        assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-000006"]
        assert AutoModelForCausalLM.from_pretrained(target) is not None
        lr[schedule] = [int(line["lr"] * 1e5 + 0.01) for line in log]
    assert lr == {
        "linear": [50, 100, 100, 77, 55, 32],
        "constant": [50, 100, 100, 100, 100, 100],
        "cosine": [50, 100, 100, 86, 55, 23],
    }


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_updates_in_the_backward_pass_give_the_same_bits(precision: str, given: Path, tmp_path: Path) -> None:
    how = [*LENGTH, "--clip", "0", "--precision", precision, "--gpu", "1MiB", "--host", "2MiB"]
    for update in ("lazy", "eager"):
        train(given, tmp_path / update, *how, "--update", update)
        assert json.loads((tmp_path / update / "plan.json").read_text())["settings"]["update"] == update
    lazy, eager = weights_of(tmp_path / "lazy"), weights_of(tmp_path / "eager")
    assert [name for name, value in lazy.items() if not torch.equal(eager[name], value)] == []


def test_a_model_that_cannot_recompute_says_so(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(GPT2LMHeadModel, "supports_gradient_checkpointing", False)
    build(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=10, n_positions=8), recompute=True)
    assert "GPT2LMHeadModel does not support recomputing activations" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "missing"], "--data to be a file or a folder, found nothing at '.*missing'"),
        (["--model", "missing"], "folder with a config.json, found none in '.*missing'"),
        (["--seq", "65"], "--seq of at most the 64 positions of the model, found 65"),
        (["--seq", "8", "--batch", "9999"], "at least the 9999 samples of one batch"),
        (["--steps", "3", "--epochs", "2"], "--steps or --epochs, found both: 3 and 2"),
        (["--epochs", "0"], "expected --epochs from 1, found 0"),
        (["--layers", "3"], "no --layers here, found 3; it belongs to the built-in model"),
        (["--validation", "1"], "expected --validation from 0 and below 1"),
        (["--optimizer", "lion"], "--optimizer to be one of adamw, adam, sgd, adagrad, found 'lion'"),
        (["--demo"], "--demo without --model"),
        (["--states", "int4"], "--states to be one of exact, bf16, compact, found 'int4'"),
        (["--states", "compact", "--precision", "fp32"], "--states to be exact with --precision fp32"),
        (["--keep", "0"], "expected --keep from 1"),
        (["--update", "delayed"], r"one of lazy, eager \(delayed is for loops of your own\), found 'del"),
        (["--update", "soon"], "--update to be one of lazy, eager, found 'soon'"),
        (["--update", "eager"], "--clip to be 0 with --update eager, which begins in the backward pass, .*, found 1.0"),
        (["--update", "eager", "--clip", "0", "--precision", "fp16"], "--update to be lazy with --precision fp16"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_are_refused_before_a_run_begins(
    options: list[str], message: str, given: Path, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=message):
        train(given, tmp_path / "run", *options)
    assert not (tmp_path / "run").exists()


def test_options_of_a_model_need_one() -> None:
    with pytest.raises(OptionError, match=r"no --data here, found .*; it goes with --model DIR"):
        resolve({"data": Path("a")})
    with pytest.raises(OptionError, match="expected --data with --model"):
        resolve({"model": Path("a")})
    with pytest.raises(OptionError, match="no --update here, found eager; it goes with --model DIR"):
        resolve({"update": "eager"})
    with pytest.raises(OptionError, match="--update to be lazy over several ranks, found 'eager'"):
        resolve({"model": Path("a"), "data": Path("b"), "update": "eager", "clip": 0.0}, ranks=2)
    with pytest.raises(OptionError, match="--precision to be fp32 without --model"):
        resolve({"precision": "bf16"})


def test_folders_that_are_no_language_model_are_refused(given: Path, tmp_path: Path) -> None:
    T5Config().save_pretrained(tmp_path / "t5")
    with pytest.raises(OptionError, match=r"causal language model in .*, found t5"):
        here("train", "--model", str(tmp_path / "t5"), "--data", str(given / "a.txt"))
    make_llama(tmp_path / "llama")
    (tmp_path / "llama/model.safetensors").rename(tmp_path / "llama/pytorch_model.bin")
    with pytest.raises(OptionError, match=r"\*.safetensors in .*, found .*pytorch_model.bin"):
        here("train", "--model", str(tmp_path / "llama"), "--data", str(given / "a.txt"))
    (tmp_path / "llama/tokenizer.json").write_text("{")
    (tmp_path / "llama/pytorch_model.bin").rename(tmp_path / "llama/model.safetensors")
    with pytest.raises(OptionError, match="a tokenizer that Transformers can load"):
        here("train", "--model", str(tmp_path / "llama"), "--data", str(given / "a.txt"), "--run", str(tmp_path / "r"))
    assert not (tmp_path / "r").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(OptionError, match="--export to be a new or empty folder"):
        train(given, tmp_path / "r", "--export", str(tmp_path / "full"))


def test_a_budget_that_cannot_work_is_refused_before_the_text_is_read(given: Path, tmp_path: Path) -> None:
    with pytest.raises(BudgetError):
        train(given, tmp_path / "run", *LENGTH, "--gpu", "100KiB")
    assert not (tmp_path / "run").exists()
