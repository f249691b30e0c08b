"""A run of the built-in training: within the budgets given, shown, drawn, and compared with the plain one if asked."""

import torch
from torch import Tensor

import overspill
from overspill.cli.loop import (
    TRACED,
    Step,
    Trainee,
    as_record,
    be_deterministic,
    build_scheduler,
    compute_device,
    traced,
    train_steps,
)
from overspill.cli.meters import Meter, zero_point
from overspill.cli.screen import shown, summary
from overspill.cli.settings import BuiltIn
from overspill.cli.verify import Verdict, compare, tensors_of
from overspill.cli.workload import batches, build_model, own_optimizer, plain_trainee, read_corpus
from overspill.report.run import Record, RunFolder, held_plainly


def run(settings: BuiltIn, folder: RunFolder) -> Verdict | None:
    """Train, show, draw; and train plainly if that is asked for."""
    device = compute_device()
    if settings.verify or settings.deterministic:  # two trainings can only be compared if both are
        be_deterministic(device)
    corpus = read_corpus()
    ours, losses = _train_spilled(settings, folder, corpus, device)
    from overspill.report.plot import draw

    draw(folder)
    print(f"the run is in {folder.path}: {', '.join(p.name for p in sorted(folder.path.iterdir()) if p.is_file())}")
    if not settings.verify:
        return None
    plain = plain_trainee(settings, device)
    torch.manual_seed(settings.seed)
    stream = train_steps(plain, batches(corpus, settings, device), settings, settings.steps)
    numbered = enumerate(stream, start=1)
    records = shown((as_record(i, step, settings.tokens, {}, {}) for i, step in numbered), settings.steps, "plainly")
    expected = [record.loss for record in records]
    verdict = compare(ours, tensors_of(plain.model, plain.optimizer), losses, expected)
    print(verdict)
    return verdict


def _train_spilled(
    settings: BuiltIn, folder: RunFolder, corpus: Tensor, device: torch.device
) -> tuple[dict[str, Tensor], list[float]]:
    """The run itself. Returns what it ended with, and the losses."""
    zero = zero_point(device, settings.nvme)
    model = build_model(settings)
    own = own_optimizer(model, settings)
    plan = overspill.plan(model, own, **settings.prepared_by())
    print(plan, flush=True)
    model, optimizer = overspill.prepare(model, own, place=plan, **settings.prepared_by())
    folder.write_plan(plan.to_json(), settings.to_dict())
    meter = Meter(device, plan.peak("host"), settings.nvme, zero)
    meter.start()
    scheduler = build_scheduler(optimizer, settings, settings.steps)
    trainee = Trainee(model, optimizer, scheduler, optimizer.clip_grad_norm_)
    torch.manual_seed(settings.seed)
    stream = train_steps(trainee, batches(corpus, settings, device), settings, settings.steps)
    middle = max(0, (settings.steps - TRACED) // 2)

    def measured(number: int, step: Step) -> Record:
        return as_record(number, step, settings.tokens, optimizer.report()["moved"], meter.read())

    numbered = enumerate(traced(stream, model, folder.trace, middle), start=1)
    records = []
    for record in shown((measured(i, step) for i, step in numbered), settings.steps, "training"):
        folder.append(record)
        records.append(record)
    print(summary(records, folder.read_plan(), held_plainly(folder.read_plan())), flush=True)
    overspill.close(model)
    return tensors_of(model, own), [record.loss for record in records]
