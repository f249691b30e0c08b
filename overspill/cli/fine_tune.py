"""A run with --model: plans, streams the weights in, trains on the user's text, and exports what came of it."""

import dataclasses
import shlex
from pathlib import Path

import torch

import overspill
from overspill.cli import randomness, text_model
from overspill.cli.checkpoints import Checkpoints
from overspill.cli.data import Data, Reader, read_data, total_steps
from overspill.cli.documents import files_of
from overspill.cli.loop import Trainee, be_deterministic, build_optimizer, build_scheduler, compute_device
from overspill.cli.meters import Meter, zero_point
from overspill.cli.screen import shown, summary
from overspill.cli.session import Session
from overspill.cli.settings import FineTune, check_contents
from overspill.cli.signals import Interruption
from overspill.errors import OptionError
from overspill.report.run import RunFolder, held_plainly


def checked(settings: FineTune, seq_is_given: bool) -> FineTune:
    """Refuse what can be refused before anything is made; and no longer samples than the model has positions."""
    files_of(settings.data)
    if settings.validation_data is not None:
        files_of(settings.validation_data, "validation-data")
    longest = text_model.positions(text_model.read_config(settings.model))
    text_model.check_weights(settings.model)
    if settings.export is not None:
        text_model.check_target(settings.export)
    if longest is None or settings.seq <= longest:
        return settings
    if seq_is_given:
        raise OptionError(f"expected --seq of at most the {longest} positions of the model, found {settings.seq}")
    return dataclasses.replace(settings, seq=longest)


def run(settings: FineTune, folder: RunFolder, checkpoint: Path | None) -> int:
    """Train from the beginning or a checkpoint. Returns the exit code."""
    device = compute_device()
    if settings.deterministic:
        be_deterministic(device)
    session = _session(settings, folder, device, checkpoint)
    with Interruption() as interruption:
        for _ in shown(session.records(interruption), session.steps, "training", session.done):
            pass
    if interruption.caught is not None:
        again = shlex.join(["overspill", "train", "--resume", "--run", str(folder.path)])
        print(f"stopped by {interruption.caught.name}; saved {Checkpoints(folder.checkpoints).newest()}")
        print(f"to continue: {again}", flush=True)
        return interruption.exit_code
    _finish(session)
    return 0


def _session(settings: FineTune, folder: RunFolder, device: torch.device, checkpoint: Path | None) -> Session:
    """Plan, read the text, then allocate."""
    tokenizer = text_model.read_tokenizer(settings.model)
    model = text_model.build(text_model.read_config(settings.model), settings.recompute)
    own = build_optimizer(model, settings.optimizer, settings.lr, settings.weight_decay)
    plan = overspill.plan(model, own, **settings.prepared_by())
    print(plan, flush=True)
    data = read_data(settings, tokenizer, text_model.vocabulary(model))
    steps = total_steps(settings, len(data.training))
    print(_told(settings, data, steps), flush=True)
    contents = {"model": text_model.digest(settings.model), "data": data.digest}
    if checkpoint is not None:
        check_contents(folder.read_plan()["contents"], contents)
        Checkpoints(folder.checkpoints).check_ahead(steps)

    zero = zero_point(device, settings.nvme)
    model, optimizer = overspill.prepare(model, own, place=plan, weights=settings.model, **settings.prepared_by())
    trainee = Trainee(model, optimizer, build_scheduler(optimizer, settings, steps), optimizer.clip_grad_norm_)
    session = Session(
        settings=settings,
        folder=folder,
        device=device,
        data=data,
        contents=contents,
        steps=steps,
        trainee=trainee,
        reader=Reader(data.training, settings.batch, settings.seed, device),
        meter=Meter(device, plan.peak("host"), settings.nvme, zero),
    )
    randomness.seed_all(settings.seed)
    if checkpoint is not None:
        session.resume(checkpoint)
        print(f"resuming {folder.path} after step {session.done} of {steps}", flush=True)
    folder.write_plan(plan.to_json(), settings.to_dict(), contents)
    session.meter.start()
    return session


def _told(settings: FineTune, data: Data, steps: int) -> str:
    """What the data is, in a line."""
    kept = f", {len(data.validation)} for validation" if data.validation else ""
    epochs = steps * settings.batch * settings.micro_batches / len(data.training)
    return (
        f"data: {data.documents:,} documents, {data.tokens:,} tokens; {len(data.training):,} samples of "
        f"{settings.seq} tokens{kept}; {steps:,} steps are {epochs:.2f} epochs"
    )


def _finish(session: Session) -> None:
    """The summary, the model, the plot."""
    folder = session.folder
    print(summary(folder.read_log(), folder.read_plan(), held_plainly(folder.read_plan())), flush=True)
    target = session.settings.export or folder.model
    text_model.export(session.trainee.model, session.settings.model, target)
    print(f"the model is in {target}")
    from overspill.report.plot import draw

    draw(folder)
    print(f"the run is in {folder.path}: {', '.join(p.name for p in sorted(folder.path.iterdir()))}")
