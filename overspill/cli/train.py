"""`overspill train`: trains a byte-level GPT within the budgets given, and shows what it takes."""

import contextlib
import importlib.util
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import overspill
from overspill.cli.app import app
from overspill.cli.meters import Meter, zero_point
from overspill.cli.screen import shown, summary
from overspill.cli.settings import DEMO, Settings, budget, resolve
from overspill.cli.verify import Verdict, compare, tensors_of
from overspill.cli.workload import (
    Step,
    Trainee,
    batches,
    build_model,
    build_optimizer,
    build_scheduler,
    compute_device,
    plain_trainee,
    read_corpus,
    train_steps,
)
from overspill.errors import OptionError
from overspill.report.run import Record, RunFolder, held_plainly

TRACED = 2
"""Steps in the middle of the run that trace.json shows."""


def _option(help_text: str, default: object) -> Any:
    return typer.Option(help=help_text, show_default=str(default))


_D = Settings()


@app.command()
def train(
    demo: Annotated[
        bool,
        typer.Option("--demo", help=f"Budgets far below what it takes ({DEMO['gpu']} of GPU), and --verify."),
    ] = False,
    layers: Annotated[int | None, _option("Blocks of the model.", _D.layers)] = None,
    hidden: Annotated[int | None, _option("Width of the model.", _D.hidden)] = None,
    heads: Annotated[int | None, _option("Attention heads.", _D.heads)] = None,
    seq: Annotated[int | None, _option("Bytes of text in a sample.", _D.seq)] = None,
    batch: Annotated[int | None, _option("Samples in a micro-batch.", _D.batch)] = None,
    steps: Annotated[int | None, _option("Optimizer steps.", _D.steps)] = None,
    micro_batches: Annotated[int | None, _option("Backward passes in a step.", _D.micro_batches)] = None,
    lr: Annotated[float | None, _option("Peak learning rate.", _D.lr)] = None,
    clip: Annotated[float | None, _option("Norm to clip gradients to; 0 does not clip.", _D.clip)] = None,
    warmup: Annotated[int | None, _option("Steps until the peak learning rate.", _D.warmup)] = None,
    seed: Annotated[int | None, _option("For weights and data.", _D.seed)] = None,
    gpu: Annotated[str | None, _option('Budget of the device: "24GiB", bytes, or a fraction.', _D.gpu)] = None,
    host: Annotated[str | None, _option("Budget of host memory.", _D.host)] = None,
    nvme: Annotated[list[Path] | None, _option("Folder to spill to; may be given several times.", "none")] = None,
    recompute: Annotated[
        bool | None, typer.Option("--recompute/--no-recompute", help="Recompute activations.", show_default="yes")
    ] = None,
    verify: Annotated[
        bool | None,
        typer.Option("--verify/--no-verify", help="Train plainly too, and compare all bits.", show_default="no"),
    ] = None,
    run: Annotated[Path | None, _option("Folder for plan, log, trace and plot.", "runs/DATE-TIME")] = None,
) -> None:
    """Train a byte-level GPT on the source text of Python's own library, within the budgets given."""
    given = {name: value for name, value in locals().items() if name not in ("demo", "run", "nvme")}
    folder = RunFolder(run or Path("runs") / time.strftime("%Y-%m-%d-%H%M%S"))
    with contextlib.ExitStack() as stack:
        settings = resolve({**given, "nvme": tuple(nvme) if nvme else None}, demo)
        _check_packages()
        _check_folders(settings.nvme)
        folder.make()
        stack.callback(_remove_if_empty, folder.path)
        if demo and not settings.nvme:
            # Beside the run's folder, so that the next demo finds and removes what a killed one left.
            settings = resolve({**given, "nvme": (folder.path.parent / "spill",)}, demo)
            settings.nvme[0].mkdir(exist_ok=True)
            stack.callback(_remove_if_empty, settings.nvme[0])
        verdict = _run(settings, folder)
    if verdict is not None and not verdict.equal:
        raise typer.Exit(1)


def _check_packages() -> None:
    for name in ("transformers", "matplotlib"):
        if importlib.util.find_spec(name) is None:
            raise OptionError(f"expected the package {name}, found none; install it: pip install 'overspill[demo]'")


def _check_folders(paths: tuple[Path, ...]) -> None:
    for path in paths:
        if not path.is_dir():
            raise OptionError(f"expected --nvme to be a folder, found none at {str(path)!r}; make it first")


def _remove_if_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()


def _run(settings: Settings, folder: RunFolder) -> Verdict | None:
    """Train, show, draw; and train plainly if that is asked for."""
    device = compute_device()
    if settings.verify and device.type == "cuda":
        # Two trainings can only be compared if neither takes a shortcut whose sums come in any order.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "128")
        torch.use_deterministic_algorithms(True)
    corpus = read_corpus()
    ours, losses = _train_spilled(settings, folder, corpus, device)
    from overspill.report.plot import draw

    draw(folder)
    print(f"the run is in {folder.path}: {', '.join(p.name for p in sorted(folder.path.iterdir()) if p.is_file())}")
    if not settings.verify:
        return None
    plain = plain_trainee(settings, device)
    stream = train_steps(plain, batches(corpus, settings, device), settings)
    records = shown((_record(settings, i, step) for i, step in enumerate(stream)), settings.steps, "plainly")
    expected = [record.loss for record in records]
    verdict = compare(ours, tensors_of(plain.model, plain.optimizer), losses, expected)
    print(verdict)
    return verdict


def _train_spilled(
    settings: Settings, folder: RunFolder, corpus: Tensor, device: torch.device
) -> tuple[dict[str, Tensor], list[float]]:
    """The run itself. Returns what it ended with, and the losses."""
    zero = zero_point(corpus, device, settings.nvme)
    model = build_model(settings)
    own = build_optimizer(model, settings)
    keywords: dict[str, Any] = {
        "gpu": budget(settings.gpu),
        "host": budget(settings.host),
        "nvme": list(settings.nvme) or None,
        "micro_batches": settings.micro_batches,
    }
    plan = overspill.plan(model, own, **keywords)
    print(plan, flush=True)
    model, optimizer = overspill.prepare(model, own, place=plan, **keywords)
    folder.write_plan(plan.to_json(), settings.to_dict())
    meter = Meter(device, plan.peak("host"), settings.nvme, zero)
    meter.start()
    trainee = Trainee(model, optimizer, build_scheduler(optimizer, settings), optimizer.clip_grad_norm_)
    records = []
    stream = _traced(trainee, batches(corpus, settings, device), settings, folder.trace)
    measured = (_record(settings, i, step, optimizer.report()["moved"], meter.read()) for i, step in enumerate(stream))
    for record in shown(measured, settings.steps, "training"):
        folder.append(record)
        records.append(record)
    print(summary(records, folder.read_plan(), held_plainly(folder.read_plan())), flush=True)
    overspill.close(model)
    return tensors_of(model, own), [record.loss for record in records]


def _traced(trainee: Trainee, source: Iterator[Any], settings: Settings, path: Path) -> Iterator[Step]:
    """The training, with a trace of the steps in its middle."""
    first = max(0, (settings.steps - TRACED) // 2)
    stream = train_steps(trainee, source, settings)
    with contextlib.ExitStack() as stack:
        for index in range(settings.steps):
            if index == first:
                stack.enter_context(overspill.trace(trainee.model, path))
            yield next(stream)
            if index == first + TRACED - 1:
                stack.close()


def _record(
    settings: Settings,
    index: int,
    step: Step,
    moved: dict[str, int] | None = None,
    tiers: dict[str, int] | None = None,
) -> Record:
    return Record(
        step=index + 1,
        loss=step.loss,
        lr=step.lr,
        grad_norm=step.grad_norm,
        seconds=step.seconds,
        tokens_per_second=settings.tokens / step.seconds,
        moved=moved or {},
        bytes=tiers or {},
    )
