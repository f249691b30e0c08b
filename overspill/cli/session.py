"""A part of a run with --model, on one of its ranks: from its beginning or a checkpoint to its end or a signal."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import overspill
from overspill.cli import randomness
from overspill.cli.checkpoints import Checkpoints
from overspill.cli.data import Data, Reader, validation_batches
from overspill.cli.loop import TRACED, Step, Trainee, traced, train_steps, validate
from overspill.cli.ranks import Ranks
from overspill.cli.recording import Recorder
from overspill.cli.settings import FineTune, check_contents, check_same
from overspill.cli.signals import Interruption
from overspill.report.run import Record, RunFolder

SETTLED = 2
"""Steps after which a step is like the others: the trace begins there."""


@dataclass(slots=True)
class Session:
    """Trains, looks at the validation data, logs, and saves checkpoints."""

    settings: FineTune
    folder: RunFolder
    device: torch.device
    data: Data
    contents: Mapping[str, str]
    """Digests of what the run was given by path."""
    steps: int
    """Steps of the whole run."""
    trainee: Trainee
    reader: Reader
    recorder: Recorder
    done: int = 0
    """Steps before this session."""
    seen: dict[str, float | int] = field(default_factory=dict)
    """The last and the best loss on the validation data."""

    def resume(self, path: Path) -> None:
        """Go back to where the checkpoint was made, with everything that decides what comes next."""
        extra: Any = overspill.load(path, self.trainee.model, self.trainee.optimizer)
        check_same(extra["settings"], self.settings.to_dict())
        check_contents(extra["contents"], self.contents)
        self.done = int(extra["step"])
        self.reader.move_to(extra["position"])
        self._move_schedule(extra["scheduler"])
        self.seen = dict(extra["validation"])
        if len(extra["rng"]) == self.ranks.size:
            randomness.restore(extra["rng"][self.ranks.rank], self.device)
        else:  # other ranks than before draw anew what they draw
            randomness.seed_all(self.settings.seed + self.done, self.ranks.rank)
        if self.ranks.first:
            self.folder.rewind(self.done)

    def records(self, interruption: Interruption) -> Iterator[Record]:
        """Train: one record a step, in the log before it is shown. Ends early after an interruption."""
        for number, step in enumerate(self._stream(), start=self.done + 1):
            record = self._validated(self.recorder(number, step, interruption.caught))
            if self.ranks.first:
                self.folder.append(record)
            stop = self.recorder.stopped is not None
            if stop:
                interruption.caught = self.recorder.stopped
            if stop or number == self.steps or _due(number, self.settings.save_every):
                self._save(number)
            yield record
            if stop:
                return

    def _stream(self) -> Iterator[Step]:
        count = self.steps - self.done
        if not count:
            return iter(())
        first = min(SETTLED, max(0, (count - TRACED) // 2))
        stream = train_steps(self.trainee, self.reader, self.settings, count)
        return traced(stream, self.trainee.model, self.folder.trace, first) if self.ranks.first else stream

    @property
    def ranks(self) -> Ranks:
        return self.recorder.ranks

    def _validated(self, record: Record) -> Record:
        samples = self.data.validation
        if samples is None or not (record.step == self.steps or _due(record.step, self.settings.validate_every)):
            return record
        source = validation_batches(samples, self.settings, self.device, self.ranks.rank)
        heard = self.ranks.exchange(validate(self.trainee.model, source, self.device))
        loss = sum(total for total, _ in heard) / sum(count for _, count in heard)
        if not self.seen or loss < self.seen["best"]:
            self.seen |= {"best": loss, "best_step": record.step}
        self.seen |= {"last": loss, "last_step": record.step}
        self.recorder.meter.read()  # what this took is not the next step's
        return dataclasses.replace(record, validation=loss)

    def _save(self, step: int) -> None:
        """A checkpoint, from which `resume` continues with the very next batch; of all ranks, written by the first."""
        checkpoints = Checkpoints(self.folder.checkpoints)
        if self.ranks.first:
            checkpoints.folder.mkdir(exist_ok=True)
        extra = {
            "step": step,
            "settings": self.settings.to_dict(),
            "contents": dict(self.contents),
            "position": self.reader.position,
            "scheduler": self.trainee.scheduler.state_dict(),
            "rng": self.ranks.exchange(randomness.capture(self.device)),
            "validation": dict(self.seen),
        }
        overspill.save(checkpoints.path(step), self.trainee.model, self.trainee.optimizer, extra=extra)
        if self.ranks.first:
            checkpoints.prune(self.settings.keep)
        self.recorder.meter.read()  # nor is what this took

    def _move_schedule(self, state: dict[str, Any]) -> None:
        """To the same step, on the curve of this session: more --steps stretch it."""
        scheduler: Any = self.trainee.scheduler
        scheduler.load_state_dict(state)
        for group, base, factor in zip(
            self.trainee.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
        ):
            group["lr"] = base * factor(scheduler.last_epoch)


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0
