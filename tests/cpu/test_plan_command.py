"""`overspill plan`: for a folder and for sizes, on this machine and for another."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.cli import main
from overspill.cli.app import app
from overspill.cli.plan import RATES
from overspill.cli.sizes import build, choose, parse_count
from overspill.cli.wording import as_options, options_of
from overspill.errors import BudgetError, OptionError
from overspill.specs import GiB
from tests.commands import here
from tests.folders import make_llama

FP32 = ["--precision", "fp32"]


def test_a_folder_is_planned_from_its_config(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "llama")
    (folder / "model.safetensors").unlink()
    told = here("plan", "--model", str(folder), *FP32, "--gpu", "1MiB", "--host", "2MiB")
    assert "LlamaForCausalLM of" in told and "36,768 parameters in 5 units" in told
    assert "weight fp32" in told and "peak" in told
    body = json.loads(here("plan", "--model", str(folder), *FP32, "--gpu", "1MiB", "--host", "2MiB", "--json"))
    assert body["parameters"] == 36768 and body["budget"]["device"] == 2**20


def test_thirteen_billion_parameters_are_planned_quickly() -> None:
    begin = time.process_time()
    sizes = ["--params", "13B", "--layers", "40", "--hidden", "5120"]
    told = here("plan", *sizes, *FP32, "--machine-gpu", "80GiB", "--machine-host", "512GiB", "--machine-nvme", "2TB")
    assert time.process_time() - begin < 5
    assert "40 layers, hidden 5120, 40 heads" in told and "in 42 units" in told
    body = json.loads(here("plan", *sizes, *FP32, "--machine-gpu", "80GiB", "--machine-host", "512GiB", "--json"))
    assert body["parameters"] == pytest.approx(13e9, rel=0.01)
    assert body["budget"]["device"] == int(0.92 * 80 * GiB), "what auto takes of a GPU, though there is none here"


@pytest.mark.parametrize("text", ["100K", "1M", "124M", "350M", "1.5B", "7e9", "70B", "1T"])
def test_sizes_come_close_to_the_parameters_asked_for(text: str) -> None:
    sizes = choose(parse_count(text), None, None, None, None)
    assert sizes.parameters == pytest.approx(parse_count(text), rel=0.01)
    assert 2 <= sizes.ffn / sizes.hidden <= 4 and sizes.hidden % sizes.heads == 0
    assert sum(p.numel() for p in build(sizes).parameters()) == sizes.parameters


def test_what_does_not_fit_is_refused_with_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--params", "13B", *FP32, "--gpu", "24GiB", "--host", "20GiB"]
    with pytest.raises(BudgetError, match="set host="):
        here("plan", *options)
    monkeypatch.setattr(sys, "argv", ["overspill", "plan", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    told, error = capsys.readouterr()
    assert ended.value.code == 2 and not told
    assert error.startswith("overspill: expected room for")
    assert "set --host to at least" in error and "or give --nvme a path" in error and "host=" not in error


PLANNED, TRAINED, TIMED = (options_of(app, arguments) for arguments in (["plan"], ["train"], ["bench", "step"]))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "found 2 GiB; set gpu=24 or more, or raise host=, or host= and nvme=",
            "found 2 GiB; set --gpu 24 or more, or raise --host, or --host and --nvme",
        ),
        (
            "found 'compact'; expected states='exact' or 'bf16', kernels='auto' or micro_batches=2",
            "found 'compact'; expected --states exact or bf16, kernels='auto' or --micro-batches 2",
        ),
        (
            'found none; say machine["link"] (and machine["disk"]): nvme="/scratch"',
            "found none; say --machine-link (and --machine-disk): --nvme /scratch",
        ),
        (
            "the host's cores, found '/x gpu=1 y' at \"it's host=2\" where the host's host= is",
            "the host's cores, found '/x gpu=1 y' at \"it's host=2\" where the host's --host is",
        ),
        ("found /data/host=3, prepare(gpu=1) and model.gpu=1", "found /data/host=3, prepare(gpu=1) and model.gpu=1"),
    ],
)
def test_errors_name_options_as_the_command_calls_them(text: str, told: str) -> None:
    assert as_options(text, PLANNED) == told


def test_errors_name_only_options_that_the_command_has() -> None:
    assert as_options("world=2, host=1, seed=3", PLANNED) == "--world 2, --host 1, seed=3"
    assert as_options("world=2, host=1, seed=3", TRAINED) == "world=2, --host 1, --seed 3"
    assert as_options("found gpu=peak:torch; host=", TIMED) == "found gpu=peak:torch; host=", "--ours has keywords"
    assert options_of(app, []) == options_of(app, ["--help"]) == {} != options_of(app, ["bench", "chart"])
    assert PLANNED["machine_link"] == RATES["machine_link"] and PLANNED["machine_disk"] == RATES["machine_disk"]


MACHINE = ["--machine-gpu", "80GiB", "--machine-host", "512GiB"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "found neither"),
        (["--params", "1B", "--model", "x"], "found both"),
        (["--params", "many"], "like 13B, 350M or 7e9, found 'many'"),
        (["--params", "1B", "--layers", "40", "--hidden", "5120"], "expected --params from 6,095,262,720 to"),
        (["--params", "13B", "--heads", "7"], "divides the hidden width 5120, found 7"),
        (["--params", "13B", "--machine-gpu", "80GiB"], "--machine-gpu and --machine-host together.*no --machine-host"),
        (["--params", "13B", "--machine-link", "50GB"], "found no --machine-gpu and no --machine-host"),
        (["--params", "13B", *MACHINE, "--machine-link", "auto"], "--machine-link of another machine in bytes.*'auto'"),
        (["--params", "13B", *MACHINE, "--machine-link", "0.5"], "--machine-link of another machine in bytes.*'0.5'"),
        (["--params", "13B", "--machine-gpu", "24", "--machine-host", "1TiB"], "machine_gpu= with a unit, found '24'"),
        (["--params", "13B", *MACHINE, "--machine-link", "50"], "machine_link= .* found '50', which is 50 bytes; did"),
        (["--params", "13B", *MACHINE, "--machine-nvme", "2"], "machine_nvme= .* did you mean 2GiB or 2GB"),
        (["--params", "13B", "--gpu", "24"], "gpu= with a unit, found '24'"),
        (["--params", "13B", *MACHINE, "--gpu", "200GiB"], "gpu= within the 80.00 GiB of that machine, found 200.00"),
        (["--params", "13B", "--nvme", ".", "--machine-nvme", "1TB"], "--nvme or --machine-nvme, found both"),
        (["--params", "13B", "--precision", "int4"], "--precision to be one of bf16, fp16, fp32"),
        (["--params", "13B", "--states", "int4"], "--states to be one of exact, bf16, compact, found 'int4'"),
        (["--params", "13B", "--update", "soon"], "--update to be one of lazy, eager, delayed, found 'soon'"),
        (["--params", "13B", "--states", "compact", "--precision", "fp32"], "states='exact' where the optimizer's own"),
        (["--model", "missing"], "a folder with a config.json"),
        (["--model", "missing", "--layers", "2"], "--layers with --params only"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        here("plan", *options)


def test_states_and_updates_are_planned_as_they_are_asked_for() -> None:

    def planned(*options: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(here("plan", "--params", "350M", *MACHINE, *options, "--json"))
        return found

    def states(body: dict[str, Any]) -> float:
        return float(sum(unit["bytes"]["state"] for unit in body["units"]) / body["parameters"])

    assert states(planned()) == pytest.approx(10, rel=0.01)
    small = planned("--states", "compact")
    # The embedding and the head stay exact.
    assert 3 < states(small) < 7 and small["dtypes"] != planned()["dtypes"]
    kept = [sum(unit["bytes"]["grad"] for unit in planned("--update", how)["units"]) for how in ("lazy", "delayed")]
    assert kept[1] == 2 * kept[0], "delayed updates keep the gradients of two steps"


def test_ranks_divide_what_the_stage_says() -> None:
    machine = ["--machine-gpu", "80GiB", "--machine-host", "512GiB"]

    def held(*options: str) -> tuple[int, ...]:
        body = json.loads(here("plan", "--params", "350M", *machine, *options, "--json"))
        units = body["units"]
        return tuple(sum(unit["bytes"][role] for unit in units) for role in ("weight", "grad", "state"))

    alone = held()
    assert held("--world", "4", "--zero", "0") == pytest.approx(alone, rel=0.001)
    for stage, divided in ((1, (False, False, True)), (2, (False, True, True)), (3, (True, True, True))):
        shares = [whole / 4 if part else whole for whole, part in zip(alone, divided, strict=True)]
        assert held("--world", "4", "--zero", str(stage)) == pytest.approx(shares, rel=0.05)
    with pytest.raises(OptionError, match="--zero to be one of auto, 0, 1, 2, 3, found '4'"):
        held("--zero", "4")
    with pytest.raises(OptionError, match="number of processes"):
        held("--world", "0")


def test_a_hopeless_budget_is_refused_at_once() -> None:
    """As of somebody who forgot a unit: a model of 13 B in pages of 64 KiB would take minutes."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(16_384, 16_384) for _ in range(48)))
    optimizer, began = torch.optim.AdamW(model.parameters()), time.monotonic()
    with pytest.raises(BudgetError, match=r"found 24 B") as refused:
        overspill.plan(model, optimizer, gpu=24, host="1TiB")
    assert time.monotonic() - began < 20
    overspill.plan(model, optimizer, gpu=refused.value.least, host="1TiB")


@pytest.mark.parametrize("machine", [{"gpu": 1}, {"device": 1}, 3])
def test_another_machine_is_said_in_full(machine: Any) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(OptionError, match=r'machine= as {"device": bytes, "host": bytes}, found'):
        overspill.plan(model, torch.optim.SGD(model.parameters(), lr=0.1), machine=machine)


def test_what_a_step_takes_is_told_or_what_would_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    here_too = here("plan", "--params", "100M", "--gpu", "2GiB", "--host", "4GiB")
    assert "say --machine-gpu, --machine-host and --machine-link" in here_too
    unknown = here("plan", "--params", "13B", "--machine-gpu", "24GiB", "--machine-host", "256GiB")
    assert "say how fast bytes pass, with --machine-link (and --machine-disk)" in unknown
    small = ["--params", "13B", "--machine-gpu", "24GiB", "--machine-host", "256GiB", "--machine-link", "50GB"]
    assert "predicted step: at least " in here("plan", *small)
    disk = ["--params", "13B", "--machine-gpu", "24GiB", "--machine-host", "64GiB", "--machine-nvme", "2TB"]
    assert "say how fast its disk is, with --machine-disk" in here("plan", *disk, "--machine-link", "50GB")
    assert "over the disk" in here("plan", *disk, "--machine-link", "50GB", "--machine-disk", "5GB")
