"""`overspill train`: trains a model within the budgets given, and shows what it takes."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from overspill.cli import built_in, fine_tune
from overspill.cli import options as o
from overspill.cli.app import app, need
from overspill.cli.checkpoints import Checkpoints, newest_run
from overspill.cli.settings import BuiltIn, FineTune, resolve, resolve_resumed
from overspill.errors import OptionError
from overspill.report.run import RunFolder

RUNS = Path("runs")
INTERRUPTED = 130
NOT_SETTINGS = ("demo", "run", "resume")


@app.command()
def train(
    demo: o.Demo = False,
    model: o.Model = None,
    layers: o.Layers = None,
    hidden: o.Hidden = None,
    heads: o.Heads = None,
    data: o.DataPath = None,
    text_field: o.TextField = None,
    validation: o.Validation = None,
    validation_data: o.ValidationData = None,
    validate_every: o.ValidateEvery = None,
    validation_batches: o.ValidationBatches = None,
    seq: o.Seq = None,
    batch: o.BatchSize = None,
    micro_batches: o.MicroBatches = None,
    steps: o.Steps = None,
    epochs: o.Epochs = None,
    optimizer: o.Optimizer = None,
    lr: o.Lr = None,
    schedule: o.Schedule = None,
    warmup: o.Warmup = None,
    weight_decay: o.WeightDecay = None,
    clip: o.Clip = None,
    seed: o.Seed = None,
    precision: o.Precision = None,
    deterministic: o.Deterministic = None,
    gpu: o.Gpu = None,
    host: o.Host = None,
    nvme: o.Nvme = None,
    recompute: o.Recompute = None,
    run: o.Run = None,
    resume: o.Resume = False,
    save_every: o.SaveEvery = None,
    keep: o.Keep = None,
    export: o.Export = None,
    verify: o.Verify = None,
) -> None:
    """Fine-tune a Transformers model on text within the budgets given, or train a small GPT on Python's own library."""
    given = {name: value for name, value in locals().items() if name not in NOT_SETTINGS}
    # A run may be resumed from another folder; what it spills to is shown as it was given.
    given |= {name: given[name] and given[name].resolve() for name in ("model", "data", "validation_data", "export")}
    given["nvme"] = tuple(nvme) if nvme else None
    try:
        code = _resume(given, run) if resume else _begin(given, run, demo)
    except KeyboardInterrupt:  # outside of the training itself, where there is nothing to save
        code = INTERRUPTED
    if code:
        raise typer.Exit(code)


def _begin(given: dict[str, Any], path: Path | None, demo: bool) -> int:
    """A new run. Returns the exit code."""
    folder = RunFolder(path or RUNS / time.strftime("%Y-%m-%d-%H%M%S"))
    with contextlib.ExitStack() as stack:
        settings = resolve(given, demo)
        need("transformers", "matplotlib")
        _check_folders(settings.nvme)
        if isinstance(settings, FineTune):
            settings = fine_tune.checked(settings, seq_is_given=given["seq"] is not None)
        _make(folder, stack.callback)
        if isinstance(settings, FineTune):
            return fine_tune.run(settings, folder, None)
        if demo and not settings.nvme:
            # Beside the run's folder, so that the next demo finds and removes what a killed one left.
            spill = folder.path.parent / "spill"
            settings = resolve({**given, "nvme": (spill,)}, demo)
            assert isinstance(settings, BuiltIn)
            spill.mkdir(exist_ok=True)
            stack.callback(_remove_if_empty, spill)
        verdict = built_in.run(settings, folder)
    return 0 if verdict is None or verdict.equal else 1


def _resume(given: dict[str, Any], path: Path | None) -> int:
    """The rest of a run that was interrupted, or more of one that was not. Returns the exit code."""
    folder = RunFolder(path or newest_run(RUNS))
    if not folder.plan.is_file():
        raise OptionError(f"expected a run in {str(folder.path)!r} to resume, found none; name it with --run")
    settings = resolve_resumed(folder.read_plan()["settings"], given)
    checkpoint = Checkpoints(folder.checkpoints).newest()
    need("transformers", "matplotlib")
    _check_folders(settings.nvme)
    return fine_tune.run(fine_tune.checked(settings, seq_is_given=True), folder, checkpoint)


def _make(folder: RunFolder, at_exit: Callable[..., Any]) -> None:
    folder.make()
    at_exit(_remove_if_empty, folder.path)


def _check_folders(paths: tuple[Path, ...]) -> None:
    for path in paths:
        if not path.is_dir():
            raise OptionError(f"expected --nvme to be a folder, found none at {str(path)!r}; make it first")


def _remove_if_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()
