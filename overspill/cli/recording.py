"""What the log says of a step: one line for all ranks, who say at the same time whether they were asked to stop."""

import signal
from dataclasses import dataclass
from typing import Any

from overspill.cli.loop import Step
from overspill.cli.meters import Meter
from overspill.cli.ranks import Ranks
from overspill.cli.settings import Settings
from overspill.report.run import TIERS, Record


@dataclass(slots=True)
class Recorder:
    """Makes the records of a run; every rank calls it after every step."""

    settings: Settings
    ranks: Ranks
    optimizer: Any
    meter: Meter
    stopped: signal.Signals | None = None
    """A signal that some rank was sent: all of them know it after the same step."""

    def __call__(self, number: int, step: Step, caught: signal.Signals | None = None) -> Record:
        report = self.optimizer.report()
        taken: dict[str, dict[str, int]] = {"bytes": self.meter.read(), "moved": report["moved"]}
        taken["sent"] = report.get("sent", {})
        heard = self.ranks.exchange((step.loss, int(caught or 0), taken))
        if sent := max(number for _, number, _ in heard):
            self.stopped = signal.Signals(sent)
        return Record(
            step=number,
            loss=sum(loss for loss, _, _ in heard) / len(heard),
            lr=step.lr,
            grad_norm=step.grad_norm,
            seconds=step.seconds,
            tokens_per_second=self.settings.tokens / step.seconds,
            moved=taken["moved"],
            bytes={tier: max(each["bytes"][tier] for _, _, each in heard) for tier in TIERS},
            ranks=[each for _, _, each in heard] if len(heard) > 1 else None,
        )


def plain_record(number: int, step: Step, tokens: int) -> Record:
    """Of a step that nothing was measured of."""
    return Record(
        step=number,
        loss=step.loss,
        lr=step.lr,
        grad_norm=step.grad_norm,
        seconds=step.seconds,
        tokens_per_second=tokens / step.seconds,
        moved={},
        bytes={},
    )
