"""How a run is shown: a live bar on a terminal, a line every few steps elsewhere, a summary at the end."""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from overspill.cli.loop import compute_device
from overspill.report.run import FIXED, TIERS, Record
from overspill.specs import human

ABOVE = (
    "the device is plain memory here, and this is all that the process took beside the host's arena: also activations, "
    "which nothing stops without a GPU, and what Python and libraries set up for this model (tens of MiB); "
    "if it is more, lower --seq or --batch, or leave more memory free than the budgets say"
)
"""Where the device took more than planned. See meters.py, Note [device without a GPU]."""
LINES = 10
"""About how many lines a run has where there is no terminal."""


def shown(records: Iterable[Record], steps: int, title: str, done: int = 0) -> Iterator[Record]:
    """The same records, each shown as it passes; so many steps were done before."""
    return (_live if sys.stdout.isatty() else _lines)(records, steps, title, done)


def _live(records: Iterable[Record], steps: int, title: str, done: int) -> Iterator[Record]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[news]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=Console()) as progress:
        task = progress.add_task(title, total=steps, completed=done, news="")
        for record in records:
            progress.update(task, advance=1, news=_news(record))
            yield record


def _lines(records: Iterable[Record], steps: int, title: str, done: int) -> Iterator[Record]:
    every = max(1, steps // LINES)
    begin = time.perf_counter()
    for record in records:
        told = record.step in (done + 1, steps) or record.step % every == 0 or record.validation is not None
        if told:
            left = (time.perf_counter() - begin) / (record.step - done) * (steps - record.step)
            print(f"{title} {record.step:>{len(str(steps))}}/{steps}  {_news(record)}  {left:.0f} s left", flush=True)
        yield record


def _news(record: Record) -> str:
    tiers = "  ".join(f"{tier} {human(record.bytes[tier])}" for tier in TIERS if tier in record.bytes)
    seen = "" if record.validation is None else f"  validation {record.validation:.3f}"
    return f"loss {record.loss:.3f}{seen}  {record.tokens_per_second:,.0f} tokens/s" + (f"  {tiers}" if tiers else "")


def summary(records: Sequence[Record], plan: Mapping[str, Mapping[str, Any]], plainly: int, earlier: int = 0) -> str:
    """Loss, speed, and what was planned for every tier beside what was measured. The plan is not that of the `earlier`
    steps, which another session did."""
    tokens = sum(r.tokens_per_second * r.seconds for r in records)
    seconds = sum(r.seconds for r in records)
    last = records[-max(1, len(records) // LINES) :]
    mean = sum(r.loss for r in last) / len(last)
    text = [
        f"loss {records[0].loss:.3f} at the first step, {records[-1].loss:.3f} at the last, "
        f"{mean:.3f} over the last {len(last)}",
        *_validation(records),
        f"{tokens / seconds:,.0f} tokens/s over {len(records)} steps in {seconds:.1f} s",
    ]
    own = [r for r in records if r.step > earlier]
    if not own:
        return "\n".join([*text, "no step was left to do: to train on, give more --steps or --epochs"])
    text += ["", f"{'peak':<8}{'measured':>12}{'planned':>12}{'budget':>12}"]
    above: list[str] = []
    for tier in TIERS:
        measured = max((r.bytes[tier] for r in own if tier in r.bytes), default=0)
        planned = plan["peak"][tier]
        verdict = "within" if measured <= planned else f"{human(measured - planned)} above the plan"
        verdict = "an arena of fixed size" if tier == FIXED and planned else verdict
        row = "".join(f"{human(n):>12}" for n in (measured, planned, plan["budget"][tier]))
        text.append(f"{tier:<8}{row}  {verdict}")
        if tier == "device" and measured > planned and compute_device().type == "cpu":
            above.append(ABOVE)
    where = "of the device" if plan["settings"]["ranks"] == 1 else "of every device, as the ranks divide them"
    return "\n".join(
        [*text, *above, f"held plainly, weights, gradients and states alone take {human(plainly)} {where}"]
    )


def _validation(records: Sequence[Record]) -> list[str]:
    seen = [(r.validation, r.step) for r in records if r.validation is not None]
    if not seen:
        return []
    best, last = min(seen), seen[-1]
    return [f"validation loss {last[0]:.3f} after step {last[1]}, at best {best[0]:.3f} after step {best[1]}"]
