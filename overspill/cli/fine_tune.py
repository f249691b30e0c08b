"""A run with --model: plans, streams the weights in, trains on the user's text, and exports what came of it."""

import dataclasses
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import overspill
from overspill.cli import randomness, text_model
from overspill.cli.checkpoints import Checkpoints
from overspill.cli.data import Data, Reader, read_data, total_steps
from overspill.cli.documents import files_of
from overspill.cli.loop import Trainee, be_deterministic, build_optimizer, build_scheduler, compute_device
from overspill.cli.meters import Meter, zero_point
from overspill.cli.ranks import Ranks
from overspill.cli.recording import Recorder
from overspill.cli.screen import shown, summary
from overspill.cli.session import Session
from overspill.cli.settings import FineTune, check_contents
from overspill.cli.signals import Interruption
from overspill.errors import OptionError
from overspill.report.run import RunFolder, held_plainly


def checked(settings: FineTune, seq_is_given: bool, resumes: bool = False) -> FineTune:
    """Refuse what can be refused before anything is made; and no longer samples than the model has positions."""
    files_of(settings.data)
    if settings.validation_data is not None:
        files_of(settings.validation_data, "validation-data")
    longest = text_model.positions(text_model.read_config(settings.model))
    text_model.check_weights(settings.model)
    if settings.export is not None:
        text_model.check_target(settings.export, replaces=resumes)
    if longest is None or settings.seq <= longest:
        return settings
    if seq_is_given:
        raise OptionError(
            f"expected --seq of at most the {longest} positions of the model, found {settings.seq}; give less"
        )
    return dataclasses.replace(settings, seq=longest)


def run(settings: FineTune, folder: RunFolder, checkpoint: Path | None, ranks: Ranks) -> int:
    """Train from the beginning or a checkpoint. Returns the exit code."""
    if settings.deterministic:
        be_deterministic(compute_device())
    session = _session(settings, folder, checkpoint, ranks)
    with Interruption(ranks) as interruption:
        records = session.records(interruption)
        for _ in shown(records, session.steps, "training", session.done) if ranks.first else records:
            pass
        stopped = session.recorder.stopped
        if stopped is not None and ranks.first:  # while a signal that comes again still does no harm
            print(f"stopped by {stopped.name}; saved {Checkpoints(folder.checkpoints).newest()}")
            print(f"to continue: {_again(folder, ranks)}", flush=True)
    if stopped is not None:
        return interruption.exit_code
    _finish(session)
    return 0


def _again(folder: RunFolder, ranks: Ranks) -> str:
    """The command that continues."""
    if ranks.size == 1:
        return shlex.join(["overspill", "train", "--resume", "--run", str(folder.path)])
    here = os.environ.get("LOCAL_WORLD_SIZE", str(ranks.size))
    begin = ["torchrun", "--nproc-per-node", here, *(["..."] if here != str(ranks.size) else [])]
    return shlex.join([*begin, "-m", "overspill", "train", "--resume", "--run-folder", str(folder.path)])


def _session(settings: FineTune, folder: RunFolder, checkpoint: Path | None, ranks: Ranks) -> Session:
    """Plan, read the text, then allocate. Several ranks plan together, for all their machines, when they allocate."""
    device = compute_device()
    tokenizer = text_model.read_tokenizer(settings.model)
    model = text_model.build(text_model.read_config(settings.model), settings.recompute)
    own = build_optimizer(model, settings.optimizer, settings.lr, settings.weight_decay)
    planned = overspill.plan(model, own, **settings.prepared_by()) if ranks.size == 1 else None
    if planned is not None:
        ranks.say(planned)
    data, steps = ranks.together(lambda: _read(settings, tokenizer, text_model.vocabulary(model)))
    ranks.say(_told(settings, data, steps))
    contents = {"model": text_model.digest(settings.model), "data": data.digest}
    ranks.check_alike("--model and --data", contents)
    if checkpoint is not None:
        ranks.from_first(lambda: _check_resumed(folder, contents, steps))

    zero = zero_point(device, settings.nvme, settings.precision)
    randomness.seed_all(settings.seed)
    asked = settings.prepared_by()
    if planned is not None:
        # The plan that was shown, and not place=planned: on a GPU it improves when activations are known.
        asked |= {"gpu": planned.budget.device, "host": planned.budget.host}
    model, optimizer = ranks.together(lambda: overspill.prepare(model, own, weights=settings.model, **asked))
    plan = optimizer.report()["plan"]
    if planned is None:
        ranks.say(plan)
    trainee = Trainee(model, optimizer, build_scheduler(optimizer, settings, steps), optimizer.clip_grad_norm_)
    session = Session(
        settings=settings,
        folder=folder,
        device=device,
        data=data,
        contents=contents,
        steps=steps,
        trainee=trainee,
        reader=Reader(data.training, settings.batch, settings.seed, device, (ranks.rank, ranks.size)),
        recorder=Recorder(settings, ranks, optimizer, Meter(device, plan.peak("host"), settings.nvme, zero)),
    )
    randomness.seed_all(settings.seed, ranks.rank)
    if checkpoint is not None:
        session.resume(checkpoint)
        ranks.say(f"resuming {folder.path} after step {session.done} of {steps}")
    if ranks.first:
        folder.write_plan(plan.to_json(), settings.to_dict(), contents)
    session.recorder.meter.start()
    return session


def _read(settings: FineTune, tokenizer: Any, vocabulary: int) -> tuple[Data, int]:
    """The data, and how many steps it is trained on."""
    data = read_data(settings, tokenizer, vocabulary)
    return data, total_steps(settings, len(data.training))


def _check_resumed(folder: RunFolder, contents: Mapping[str, str], steps: int) -> None:
    check_contents(folder.read_plan()["contents"], contents)
    Checkpoints(folder.checkpoints).check_ahead(steps)


def _told(settings: FineTune, data: Data, steps: int) -> str:
    """What the data is, in a line."""
    kept = f", {len(data.validation)} for validation" if data.validation else ""
    epochs = steps * settings.batch * settings.micro_batches * settings.ranks / len(data.training)
    return (
        f"data: {data.documents:,} documents, {data.tokens:,} tokens; {len(data.training):,} samples of "
        f"{settings.seq} tokens{kept}; {steps:,} steps are {epochs:.2f} epochs"
    )


def _finish(session: Session) -> None:
    """The summary, the model, the plot."""
    folder, ranks = session.folder, session.ranks
    if ranks.first:
        plan = folder.read_plan()
        print(summary(folder.read_log(), plan, held_plainly(plan), session.done), flush=True)
    target = session.settings.export or folder.model
    text_model.export(session.trainee.model, session.settings.model, target, ranks)
    if not ranks.first:
        return
    print(f"the model is in {target}")
    from overspill.report.plot import draw

    draw(folder)
    print(f"the run is in {folder.path}: {', '.join(p.name for p in sorted(folder.path.iterdir()))}")
