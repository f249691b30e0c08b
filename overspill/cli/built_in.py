"""A run of the built-in training: within the budgets given, shown, drawn, and compared with the plain one if asked."""

import dataclasses
from typing import Any

from torch import Tensor

import overspill
from overspill.cli import randomness
from overspill.cli.loop import (
    TRACED,
    Trainee,
    be_deterministic,
    build_scheduler,
    compute_device,
    traced,
    train_steps,
)
from overspill.cli.meters import Meter, zero_point
from overspill.cli.ranks import Ranks
from overspill.cli.recording import Recorder, plain_record
from overspill.cli.screen import shown, summary
from overspill.cli.settings import BuiltIn
from overspill.cli.verify import Verdict, compare, distances, tensors_of
from overspill.cli.workload import batches, build_model, own_optimizer, plain_trainee, read_corpus
from overspill.report.run import RunFolder, held_plainly


def run(settings: BuiltIn, folder: RunFolder, ranks: Ranks) -> Verdict | None:
    """Train, show, draw; and train plainly if that is asked for."""
    device = compute_device()
    if settings.verify or settings.deterministic:  # two trainings can only be compared if both are
        be_deterministic(device)
    corpus = read_corpus()
    ours, losses = _train_spilled(settings, folder, corpus, ranks)
    if ranks.first:
        from overspill.report.plot import draw

        draw(folder)
        print(f"the run is in {folder.path}: {', '.join(p.name for p in sorted(folder.path.iterdir()) if p.is_file())}")
    if not settings.verify:
        return None
    expected, found = _train_plainly(settings, corpus, ranks)
    verdict = compare(ours, expected, losses, found)
    if ranks.size > 1:
        verdict = dataclasses.replace(verdict, apart=distances(ours, expected, losses, found))
    ranks.say(verdict)
    return verdict


def _train_plainly(settings: BuiltIn, corpus: Tensor, ranks: Ranks) -> tuple[dict[str, Tensor], list[float]]:
    """The same by torch alone. Returns what it ended with, and the losses."""
    device = compute_device()
    plain = plain_trainee(settings, device)
    randomness.seed_all(settings.seed, ranks.rank)
    stream = train_steps(plain, batches(corpus, settings, device, ranks.rank), settings, settings.steps)
    records = (plain_record(i, step, settings.tokens) for i, step in enumerate(stream, start=1))
    losses = [r.loss for r in (shown(records, settings.steps, "plainly") if ranks.first else records)]
    heard = ranks.exchange(losses)
    model: Any = plain.model
    ended = tensors_of(model.module if ranks.size > 1 else model, plain.optimizer)
    return ended, [sum(each) / ranks.size for each in zip(*heard, strict=True)]


def _train_spilled(
    settings: BuiltIn, folder: RunFolder, corpus: Tensor, ranks: Ranks
) -> tuple[dict[str, Tensor], list[float]]:
    """The run itself. Returns what it ended with, and the losses."""
    device = compute_device()
    zero = zero_point(device, settings.nvme, settings.precision)
    model = build_model(settings)
    own = own_optimizer(model, settings)
    model, optimizer = ranks.together(lambda: overspill.prepare(model, own, **settings.prepared_by()))
    plan = optimizer.report()["plan"]
    ranks.say(plan)
    if ranks.first:
        folder.write_plan(plan.to_json(), settings.to_dict())
    recorder = Recorder(settings, ranks, optimizer, Meter(device, plan.peak("host"), settings.nvme, zero))
    recorder.meter.start()
    scheduler = build_scheduler(optimizer, settings, settings.steps)
    trainee = Trainee(model, optimizer, scheduler, optimizer.clip_grad_norm_)
    randomness.seed_all(settings.seed, ranks.rank)
    stream = train_steps(trainee, batches(corpus, settings, device, ranks.rank), settings, settings.steps)
    if ranks.first:
        stream = traced(stream, model, folder.trace, first=max(0, (settings.steps - TRACED) // 2))
    records = (recorder(i, step) for i, step in enumerate(stream, start=1))
    seen = []
    for record in shown(records, settings.steps, "training") if ranks.first else records:
        if ranks.first:
            folder.append(record)
        seen.append(record)
    if ranks.first:
        print(summary(seen, folder.read_plan(), held_plainly(folder.read_plan())), flush=True)
    overspill.close(model)
    return tensors_of(model, own), [record.loss for record in seen]
