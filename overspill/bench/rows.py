"""What became of every engine, as rows: figures, ratios, and how a table shows them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from overspill.bench.engines import Engine
from overspill.bench.jobs import Job
from overspill.bench.process import Outcome
from overspill.config import OWN_STATES
from overspill.specs import ROLES
from overspill.times import Pace, Passing, behind, times_of

Row = dict[str, Any]
GB = 1e9
OWN_PHASES = ("set-up", "warm-up", "steps")
"""Phases in which memory is the engine's own: the model is there before, whoever trains it."""
FORMULA = "model TFLOP/s = 6 x parameters x tokens / step seconds; what recomputing adds is not counted"


def row_of(job: Job, engine: Engine, outcome: Outcome) -> Row:
    """One engine's row. It has figures where the worker got so far, and a reason where it did not get through."""
    row: Row = {
        "name": job.label,
        "engine": job.engine,
        "what": engine.what,
        "settings": job.to_dict(),
        "ok": outcome.result is not None,
        "reason": outcome.reason,
        "process_seconds": outcome.seconds,
        "host": dict(outcome.host),
    }
    if outcome.reason:
        row["printed"] = outcome.printed
    if outcome.result is None:
        return row
    row |= outcome.result
    row["host"] |= host_peaks(row["host"], row.pop("host_own_peak"))
    # See watching.py, Note [Before set-up].
    row["host"]["before_set_up"] = row.pop("host_before")
    row["host"]["grown"] = row["host"]["resident"] - row["host"]["before_set_up"]
    row["host_bytes_per_parameter"] = row["host"]["used"] / row["parameters"]
    row["gpu_peak"] = gpu_peak(row["gpu"])
    return row


def gpu_peak(phases: Mapping[str, Mapping[str, int]]) -> dict[str, int] | None:
    """Most that CUDA had reserved, and that was allocated of it; None without a GPU."""
    own = [phases[name] for name in OWN_PHASES if name in phases]
    if not own:
        return None
    return {key: max(phase[key] for phase in own) for key in ("reserved", "allocated")}


def host_peaks(host: Mapping[str, Any], worker: int) -> dict[str, int]:
    """The same for the host: growth of what the machine uses, and what is resident of the worker and its children.
    `worker`: what the worker itself saw of its own, between two looks from outside too."""
    found = {}
    for name in ("used", "resident"):
        seen = host[f"{name}_by_phase"]
        own = [seen[phase] for phase in OWN_PHASES if phase in seen]
        found[name] = max(own or seen.values(), default=0)  # they may have been too short for a look
    return {"used": found["used"], "resident": max(found["resident"], worker)}


def ratios(rows: Iterable[Row], peers: Sequence[str]) -> dict[str, dict[str, float]]:
    """Tokens per second of every row over those of each peer."""
    done = {row["name"]: row["tokens_per_second"] for row in rows if row["ok"]}
    return {name: {peer: speed / done[peer] for peer in peers if peer in done} for name, speed in done.items()}


def above_compute(rows: Iterable[Row]) -> dict[str, float]:
    """Host bytes per parameter beyond what a process takes that trains nothing: code, CUDA's own, the model's build."""
    done = {row["name"]: row for row in rows if row["ok"]}
    if "compute" not in done:
        return {}
    least = done["compute"]["host"]["used"]
    return {name: (row["host"]["used"] - least) / row["parameters"] for name, row in done.items() if name != "compute"}


def floors(rows: Iterable[Row], rates: Mapping[str, float] | None) -> dict[str, dict[str, float]]:
    """For every row of ours the least that a step could take: computing alone, or moving its bytes over the link at
    the rate of both ways together, whichever is longer; how far the row is above it; and what a plan would predict."""
    done = {row["name"]: row for row in rows if row["ok"]}
    found: dict[str, dict[str, float]] = {}
    for name, row in done.items():
        if row["engine"] != "ours" or "compute" not in done or not rates:
            continue
        moved, computing = row["report"].get("moved", {}), done["compute"]["step_seconds"]
        up, down = (moved.get(lane, 0) for lane in ("up", "down"))
        least = {"compute_seconds": computing, "link_seconds": (up + down) / rates["both"]}
        floor = max(least.values())
        found[name] = {**least, "moved_bytes": up + down, "floor_seconds": floor, "above": row["step_seconds"] / floor}
        predicted = _predicted(row, computing, Pace(**rates), Passing(up, down))
        found[name] |= {} if predicted is None else {"predicted_seconds": predicted}
    return found


def _predicted(row: Row, computing: float, pace: Pace, moved: Passing) -> float | None:
    """By the rule of overspill/times.py, as a plan does, with what passed and what lives where; None: a plan would not
    say. Where blocks are recomputed a forward pass is a quarter of computing, else a third."""
    training, update = row["settings"]["training"], row["settings"]["keywords"].get("update", "lazy")
    report = row["report"]
    # How fast the disk is was not measured in this run.
    if report["plan"]["limits"].get("hands", "streamed") != "streamed" or report["bytes"].get("nvme"):
        return None
    forward = computing / (4 if training["recompute"] else 3) / training["micro_batches"]
    device, host = (report["bytes"].get(tier, {}) for tier in ("device", "host"))
    weight, grad, state = (host.get(role, 0) for role in ROLES)
    # Those that an optimizer makes itself are not brought ahead of a step.
    ours = report["plan"]["dtypes"]["state"] != OWN_STATES
    held = min(device.get("updates passing", 0), state) if ours else 0
    once = behind(Passing(weight + grad + state, weight + state), held)
    times = times_of(pace, moved, once if update == "lazy" else Passing())
    assert times is not None, "the link's rates are known"
    return times.step(forward, computing - forward)


def step_table(rows: Sequence[Row]) -> str:
    """A line per engine."""
    head = ["engine", "step s", "median", "spread", "tokens/s", "TFLOP/s", "GPU GB (alloc.)", "host GB (resident)"]
    beyond = above_compute(rows)
    head += ["B/param (- compute)" if beyond else "B/param", "set-up s", "build s"]
    timed = any("own_host_seconds" in row for row in rows)
    head += ["own host ms"] if timed else []
    lines = [[*head]]
    for row in rows:
        lines.append(_cells(row, timed, beyond) if row["ok"] else [row["name"], f"no figures: {row['reason']}"])
    notes = [f"{row['name']}: {row['reason']}" for row in rows if row["ok"] and row["reason"]]
    notes += [f"{row['name']}: {_told(row['stream'])}" for row in rows if row["ok"] and row.get("stream")]
    return "\n".join([aligned(lines), *notes])


def ratio_table(rows: Sequence[Row], peers: Sequence[str]) -> str:
    """Tokens per second of the row over those of the column."""
    found = ratios(rows, peers)
    shown = [peer for peer in peers if any(peer in ratio for ratio in found.values())]
    if not shown:
        return ""
    lines = [["tokens/s, as a multiple of", *shown]]
    lines += [[name, *(f"{ratio[peer]:.3f}" for peer in shown)] for name, ratio in found.items()]
    return aligned(lines)


def floor_table(found: Mapping[str, Mapping[str, float]]) -> str:
    """Steps of ours beside the least that they could take."""
    if not found:
        return ""
    lines = [["least possible step", "compute s", "moved GB", "over the link s", "step / least", "predicted s"]]
    for name, floor in found.items():
        seconds = [
            f"{floor['compute_seconds']:.4f}",
            f"{floor['moved_bytes'] / GB:.2f}",
            f"{floor['link_seconds']:.4f}",
        ]
        predicted = f"{floor['predicted_seconds']:.4f}" if "predicted_seconds" in floor else "-"
        lines.append([name, *seconds, f"{floor['above']:.3f}", predicted])
    return aligned(lines)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns; a line with two cells under a longer head is a name and a remark."""
    full = [line for line in lines if len(line) == len(lines[0])]
    width = [max(len(line[i]) for line in full) for i in range(len(lines[0]))]
    width[0] = max(len(line[0]) for line in lines)
    text = []
    for line in lines:
        rest = [cell.rjust(w) for cell, w in zip(line[1:], width[1:], strict=True)] if line in full else line[1:]
        text.append("  ".join([line[0].ljust(width[0]), *rest]).rstrip())
    text.insert(1, "-" * max(map(len, text[:1])))
    return "\n".join(text)


def _told(stream: Mapping[str, Any]) -> str:
    rate, busy = stream["elements_per_second"] or 0.0, stream["busy_seconds"]
    return f"in the traced step states of {rate / 1e9:.2f} G elements/s pass while they are on the link, {busy:.4f} s"


def _cells(row: Row, timed: bool, beyond: Mapping[str, float]) -> list[str]:
    gpu, host, seconds = row["gpu_peak"], row["host"], row["seconds"]
    spread = f"{row['least_seconds']:.3f}-{row['most_seconds']:.3f}"
    cells = [row["name"], f"{row['step_seconds']:.4f}", f"{row['median_seconds']:.4f}", spread]
    cells += [f"{row['tokens_per_second']:,.0f}", f"{row['model_tflops']:.1f}"]
    cells += [f"{gpu['reserved'] / GB:.2f} ({gpu['allocated'] / GB:.2f})" if gpu else "-"]
    cells += [f"{host['used'] / GB:.2f} ({host['resident'] / GB:.2f})"]
    rest = f" ({beyond[row['name']]:.2f})" if row["name"] in beyond else ""
    cells += [f"{row['host_bytes_per_parameter']:.2f}{rest}"]
    cells += [f"{seconds['set-up']:.1f}", f"{seconds['build']:.1f}"]
    own = row.get("own_host_seconds")
    return cells + ([("-" if own is None else f"{own * 1e3:.1f}")] if timed else [])
