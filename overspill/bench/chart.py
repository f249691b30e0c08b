"""A picture of a result file: how fast every engine is, and what it takes."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from overspill.bench.models import said
from overspill.errors import OptionError
from overspill.report.plot import INK, STYLE, TIER_COLORS

OURS_COLOR, PEER_COLOR = "#c8553d", "#9fb3c8"
WAY_COLORS = (INK, OURS_COLOR, "#3d7ea6", "#5b8c5a", "#8e6c8a")
GB = 1e9
TITLE = 72
"""Letters in a line of a panel's title."""
FLOOR = "compute"
"""The engine that nobody can overtake."""


def draw(body: Mapping[str, Any], path: Path) -> None:
    """Write the picture of what `overspill bench step` or `quality` found."""
    import matplotlib

    drawn = _engines if "engines" in body else _curves if "curves" in body else None
    if drawn is None:
        raise OptionError(
            f"expected a result of overspill bench step or quality, found one of {body.get('what', 'something else')}; "
            "draw one of those"
        )
    with matplotlib.rc_context(STYLE):
        figure = drawn(body)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _engines(body: Mapping[str, Any]) -> Any:
    from matplotlib.figure import Figure

    done = [row for row in body["engines"] if row["ok"]]
    figure = Figure(figsize=(12.5, 1.9 + 0.42 * max(3, len(done))), dpi=130, layout="constrained")
    speed, memory = figure.subplots(1, 2, sharey=True, width_ratios=(1.25, 1))
    _speed(speed, done)
    _memory(memory, done)
    figure.suptitle(title(body), x=0.012, ha="left", fontsize=12, fontweight="bold")
    return figure


def _curves(body: Mapping[str, Any]) -> Any:
    """A panel per case, a line per way to keep states; training losses are averages of some steps."""
    from matplotlib.figure import Figure

    cases, lesson = list(body["cases"]), body["lesson"]
    figure = Figure(figsize=(12.5, 4.2 * -(-len(cases) // 2) + 0.4), dpi=130, layout="constrained")
    panels = figure.subplots(-(-len(cases) // 2), 2, squeeze=False).flatten()
    for axes, case in zip(panels, cases, strict=False):
        rows = [row for row in body["curves"] if row["case"] == case and row["ok"]]
        seen = [loss for row in rows for _, loss in row["validation"]]
        lowest = min([*seen, *(loss for row in rows for _, loss in _training(row))], default=0.0)
        first = max(seen, default=1.0)
        for number, row in enumerate(rows):
            color, style = WAY_COLORS[number % len(WAY_COLORS)], ("-", "--", "-.", ":")[number % 4]
            axes.plot(*zip(*_training(row), strict=True), color=color, linewidth=0.8, alpha=0.35)
            name = f"{row['way']}: {row['final']:.4f}"
            axes.plot(*zip(*row["validation"], strict=True), color=color, linewidth=1.6, linestyle=style, label=name)
        # The beginning is high, and the same for all.
        axes.set(xlabel="step", ylabel="loss (validation: thick)")
        axes.set_title(textwrap.fill(f"{case}: {body['cases'][case]}", TITLE), fontsize=9)
        axes.set_ylim(lowest - 0.03, min(lowest + 1.2, first + 0.1))
        if rows:
            axes.legend(loc="upper right", title="states, and last validation loss")
    for axes in panels[len(cases) :]:
        axes.set_axis_off()
    size = f"{lesson['layers']} layers of {lesson['hidden']}, {lesson['steps']:,} steps"
    figure.suptitle(f"A small GPT of {size}", x=0.012, ha="left", fontsize=12, fontweight="bold")
    return figure


def _training(row: Mapping[str, Any]) -> Sequence[tuple[int, float]]:
    """Early files have the losses of all steps."""
    return row["training"] if "training" in row else smooth(row["losses"])


def smooth(losses: Sequence[float]) -> list[tuple[int, float]]:
    """Steps, and averages of the losses up to them: as many as a line needs."""
    width = max(1, len(losses) // 60)
    return [(end, sum(losses[end - width : end]) / width) for end in range(width, len(losses) + 1, width)]


def title(body: Mapping[str, Any]) -> str:
    training, machine = body["training"], body["machine"] or {}
    where = machine.get("gpu") or machine.get("cpu") or "no machine"
    tokens = training["seq"] * training["micro_batch"] * training["micro_batches"]
    count = next((row["parameters"] for row in body["engines"] if row["ok"]), 0)
    return f"{said(count)} parameters, {tokens:,} tokens a step; {where}"


def _speed(axes: Any, done: Sequence[Mapping[str, Any]]) -> None:
    names, speeds = [row["name"] for row in done], [row["tokens_per_second"] for row in done]
    colors = [OURS_COLOR if row["engine"] == "ours" else PEER_COLOR for row in done]
    bars = axes.barh(names, speeds, color=colors, height=0.62)
    axes.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], padding=4, fontsize=9)
    floor = [row["tokens_per_second"] for row in done if row["name"] == FLOOR]
    for speed in floor:
        axes.axvline(speed, color=INK, linewidth=1.1, linestyle="--", label="compute only")
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.99))
    axes.set(title="Tokens per second", xlabel="tokens/s")
    axes.margins(x=0.14)
    axes.invert_yaxis()


def _memory(axes: Any, done: Sequence[Mapping[str, Any]]) -> None:
    """Two bars a row: CUDA's peak of reserved memory, and the growth of used host memory."""
    places = range(len(done))
    gpu = [(row["gpu_peak"] or {}).get("reserved", 0) / GB for row in done]
    host = [row["host"]["used"] / GB for row in done]
    for offset, values, tier, name in ((-0.17, gpu, "device", "GPU (reserved)"), (0.17, host, "host", "host (used)")):
        bars = axes.barh([p + offset for p in places], values, color=TIER_COLORS[tier], height=0.3, label=name)
        labels = [f"{value:.1f}" if value else "" for value in values]
        axes.bar_label(bars, labels, padding=3, fontsize=8, color=INK)
    axes.set(title="Peak memory", xlabel="GB (10^9 bytes)")
    axes.margins(x=0.12)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.99), ncols=2)
