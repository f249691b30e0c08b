"""plot.png of a run: the loss, and what every tier took beside what was planned. Reads the run's folder only."""

from collections.abc import Mapping, Sequence
from typing import Any

from overspill.report.run import FIXED, TIERS, Record, RunFolder, held_plainly
from overspill.specs import GiB, KiB, MiB, human

TIER_COLORS = {"device": "#c8553d", "host": "#2f6f9f", "nvme": "#4b8f6b"}
PARTS = {"weight": "weights", "grad": "gradients", "state": "optimizer states", "activations": "activations"}
"""How the lines of a plan are called; whatever else it lists is passing through."""
PASSING = "passing through"
PART_COLORS = {
    "weights": "#35507a",
    "gradients": "#6f9bc4",
    "optimizer states": "#c3d5e8",
    "activations": "#e9b872",
    PASSING: "#cfcfcf",
}
SEEN_COLOR = "#c8553d"
INK, FAINT = "#22262b", "#8b949e"
STYLE = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
}
SMOOTHING = 0.8
"""Share of the running mean that a step keeps."""


def draw(folder: RunFolder) -> None:
    """Write plot.png."""
    import matplotlib
    from matplotlib.figure import Figure

    plan, log = folder.read_plan(), folder.read_log()
    plain = held_plainly(plan)
    unit, name = next(((u, n) for u, n in ((GiB, "GiB"), (MiB, "MiB")) if plain >= 2 * u), (KiB, "KiB"))
    # A Figure of its own instead of pyplot: no backend is chosen for whoever calls this.
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12.5, 6.6), dpi=130, layout="constrained")
        grid = figure.add_gridspec(2, 2, width_ratios=(1, 1.12), height_ratios=(1.35, 1), hspace=0.07, wspace=0.05)
        _loss(figure.add_subplot(grid[:, 0]), log, "token" if plan["settings"].get("model") else "byte")
        _memory(figure.add_subplot(grid[0, 1]), log, plan, (unit, name))
        _homes(figure.add_subplot(grid[1, 1]), log, plan, (unit, name))
        figure.suptitle(_title(plan, log), x=0.012, ha="left", fontsize=13, fontweight="bold")
        figure.savefig(folder.plot)


def _title(plan: Mapping[str, Any], log: Sequence[Record]) -> str:
    budget = ", ".join(f"{tier} {human(plan['peak'][tier])}" for tier in TIERS if plan["peak"][tier])
    count = plan["parameters"]
    size = f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count / 1e6:.1f} million"
    return f"{size} parameters, {len(log)} steps; planned peaks: {budget}"


def _loss(axes: Any, log: Sequence[Record], each: str) -> None:
    steps, losses = [r.step for r in log], [r.loss for r in log]
    mean, smooth = losses[0], []
    for loss in losses:
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        smooth.append(mean)
    axes.plot(steps, losses, color=FAINT, linewidth=0.8, marker="o", markersize=2.5, label="every step")
    axes.plot(steps, smooth, color=INK, linewidth=2.2, label="running mean")
    seen = [(r.step, r.validation) for r in log if r.validation is not None]
    if seen:
        axes.plot(*zip(*seen, strict=True), color=SEEN_COLOR, linewidth=2, marker="o", markersize=5, label="validation")
    axes.set(title="Loss", xlabel="step", ylabel=f"cross-entropy (nats per {each})")
    axes.margins(x=0.02)
    axes.grid(axis="y", color="#e6e8eb")
    axes.set_axisbelow(True)
    axes.legend(loc="upper right")


def _memory(axes: Any, log: Sequence[Record], plan: Mapping[str, Any], scale: tuple[int, str]) -> None:
    """Peak of every step, measured; each tier's planned peak; what plain training holds."""
    (unit, name), steps = scale, [r.step for r in log]
    for tier in (tier for tier in TIERS if plan["peak"][tier]):
        how = "fixed" if tier == FIXED else "measured"
        measured = [r.bytes.get(tier, float("nan")) / unit for r in log]
        axes.plot(steps, measured, color=TIER_COLORS[tier], linewidth=2, label=f"{tier}, {how}")
        axes.axhline(plan["peak"][tier] / unit, color=TIER_COLORS[tier], linewidth=1.1, linestyle=":")
    axes.plot([], [], color=FAINT, linewidth=1.1, linestyle=":", label="planned peak")
    axes.axhline(held_plainly(plan) / unit, color=INK, linewidth=1.4, linestyle="--", label="held plainly")
    axes.set(title="Memory per tier", xlabel="step", ylabel=f"peak of the step ({name})")
    axes.set_ylim(0, 1.12 * max(held_plainly(plan), *plan["peak"].values()) / unit)
    axes.margins(x=0.02)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _homes(axes: Any, log: Sequence[Record], plan: Mapping[str, Any], scale: tuple[int, str]) -> None:
    """What the plan puts where, and plain training beside it."""
    unit, name = scale
    rows = {tier: _parts(plan, tier) for tier in TIERS if plan["peak"][tier]}
    roles = ("weight", "grad", "state")
    rows["plainly"] = {PARTS[role]: sum(unit["bytes"][role] for unit in plan["units"]) for role in roles}
    shown = [part for part in PART_COLORS if any(row.get(part) for row in rows.values())]
    left = dict.fromkeys(rows, 0.0)
    for part in shown:
        widths = [row.get(part, 0) / unit for row in rows.values()]
        axes.barh(list(rows), widths, left=list(left.values()), color=PART_COLORS[part], height=0.62, label=part)
        left = {row: left[row] + width for row, width in zip(left, widths, strict=True)}
    peaks = {tier: max((r.bytes[tier] for r in log if tier in r.bytes), default=0) / unit for tier in TIERS}
    marked = [tier for tier in TIERS if tier in rows and peaks[tier] and tier != FIXED]
    axes.plot([peaks[t] for t in marked], marked, "|", color=INK, markersize=19, markeredgewidth=2, label="measured")
    axes.barh(["plainly"], [left["plainly"]], height=0.62, fill=False, edgecolor=INK, linewidth=1.4, linestyle="--")
    axes.invert_yaxis()
    axes.set(title="What lives where, as planned", xlabel=name)
    axes.set_xlim(0, 1.03 * max(*left.values(), *peaks.values()))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), markerscale=0.55)


def _parts(plan: Mapping[str, Any], tier: str) -> dict[str, int]:
    found = dict.fromkeys(PART_COLORS, 0)
    for line in plan["lines"]:
        if line["tier"] == tier:
            found[PARTS.get(line["what"], PASSING)] += line["nbytes"]
    return found
