"""How fast states pass over the link while that is busy with them, by a trace of ours.

Note [Stream rate]: an element has passed when its state has come up and has gone down again, so each way counts half.
The link is busy while at least one page of states is on its way, up or down: gaps do not count, and two pages that pass
each other take their time once. What pages are updated beside (gradients and weights on their way) shares the link and
is not counted, so the rate is what states have of it in a real step, and not what a link could do alone.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import overspill

PAGES = {("up", "state_fetch"), ("down", "state_store")}
"""Tracks of a trace, and spans of them: pages of states on the link."""


def stream(trace: Path, plan: overspill.Plan) -> dict[str, Any] | None:
    """See Note [Stream rate]; None: no states passed over the link."""
    events = json.loads(trace.read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [event for event in events if event["ph"] == "X" and (tracks[event["tid"]], event["name"]) in PAGES]
    if not spans:
        return None
    elements, nbytes = {"up": 0, "down": 0}, {"up": 0, "down": 0}
    for span in spans:
        lane, args = tracks[span["tid"]], span["args"]
        elements[lane] += sum(part.numel for part in plan.model.units[args["unit"]].pages[args["item"]].parts)
        nbytes[lane] += args["bytes"]
    busy = _together((span["ts"], span["ts"] + span["dur"]) for span in spans) / 1e6
    rate = sum(elements.values()) / 2 / busy if busy else None
    return {"elements": elements, "bytes": nbytes, "busy_seconds": busy, "elements_per_second": rate}


def _together(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of them lasts."""
    total, last = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total
