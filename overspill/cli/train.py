"""`overspill train`: trains a model within the budgets given, and shows what it takes."""

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any

import typer

from overspill.cli import built_in, fine_tune
from overspill.cli import options as o
from overspill.cli.app import app, need
from overspill.cli.checkpoints import Checkpoints, newest_run, settings_of
from overspill.cli.ranks import Ranks, join
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
    states: o.States = None,
    update: o.TrainedUpdate = None,
    deterministic: o.Deterministic = None,
    gpu: o.Gpu = None,
    host: o.Host = None,
    nvme: o.Nvme = None,
    zero: o.Zero = None,
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
        ranks = join()
        if resume and demo:
            raise OptionError("expected --resume or --demo, found both; the demo is not resumed, leave one out")
        code = _resume(given, run, ranks) if resume else _begin(given, run, demo, ranks)
    except KeyboardInterrupt:  # outside of the training itself, where there is nothing to save
        code = INTERRUPTED
    if code:
        raise typer.Exit(code)


def _begin(given: dict[str, Any], path: Path | None, demo: bool, ranks: Ranks) -> int:
    """A new run. Returns the exit code."""
    settings = ranks.together(lambda: _settled(given, demo, ranks))
    with contextlib.ExitStack() as stack:
        folder = ranks.from_first(lambda: RunFolder(path or RUNS / time.strftime("%Y-%m-%d-%H%M%S")).made())
        if ranks.first:
            stack.callback(_remove_if_empty, folder.path)
        if isinstance(settings, FineTune):
            return fine_tune.run(settings, folder, None, ranks)
        if demo and not settings.nvme:
            # Beside the run's folder, so that the next demo finds and removes what a killed one left.
            spill = folder.path.parent / "spill"
            settings = dataclasses.replace(settings, nvme=(spill,))
            spill.mkdir(parents=True, exist_ok=True)
            stack.callback(_remove_if_empty, spill)
        verdict = built_in.run(settings, folder, ranks)
    return 0 if verdict is None or verdict.equal else 1


def _resume(given: dict[str, Any], path: Path | None, ranks: Ranks) -> int:
    """The rest of a run that was interrupted, or more of one that was not. Returns the exit code."""
    folder, stored = ranks.from_first(lambda: _found(path))
    settings = ranks.together(
        lambda: _checked(resolve_resumed(stored, given, ranks.size), True, given["export"] is None)
    )
    assert isinstance(settings, FineTune), f"{type(settings).__name__} cannot be resumed"
    checkpoint = ranks.from_first(lambda: Checkpoints(folder.checkpoints).newest())
    return fine_tune.run(settings, folder, checkpoint, ranks)


def _found(path: Path | None) -> tuple[RunFolder, dict[str, Any]]:
    """A run's folder and its settings."""
    folder = RunFolder(path or newest_run(RUNS))
    if not folder.plan.is_file():
        raise OptionError(f"expected a run in {str(folder.path)!r} to resume, found none; name it with --run")
    settings = settings_of(folder)
    if settings is None:
        raise OptionError(
            f"expected the plan.json of a run in {str(folder.path)!r} to resume, found another file, or a torn one; "
            "name the run with --run"
        )
    return folder, settings


def _settled(given: dict[str, Any], demo: bool, ranks: Ranks) -> BuiltIn | FineTune:
    return _checked(resolve(given, demo, ranks.size), seq_is_given=given["seq"] is not None)


def _checked(settings: BuiltIn | FineTune, seq_is_given: bool, resumes: bool = False) -> BuiltIn | FineTune:
    """As far as can be seen on this machine."""
    need("transformers", "matplotlib")
    _check_folders(settings.nvme)
    return fine_tune.checked(settings, seq_is_given, resumes) if isinstance(settings, FineTune) else settings


def _check_folders(paths: tuple[Path, ...]) -> None:
    for path in paths:
        if not path.is_dir():
            raise OptionError(f"expected --nvme to be a folder, found none at {str(path)!r}; make it first")


def _remove_if_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()
