"""The Plan: what lives where, and what it will take at most."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from overspill.plan.hands import Speeds, hands_of
from overspill.program import Program
from overspill.specs import ROLES, TIERS, Budget, Limits, ModelSpec, Placement, TierName, UnitSpec, human
from overspill.times import Times

_BY = {
    "device": "updated there",
    "streamed": "updated by the device as they pass",
    "split": "updated by the device as they pass, and by the host's cores, until both meet",
    "host": "updated by the host's cores",
}

LEFT = "left by what moved in"
"""A line of host memory, or of disks: what they held by an earlier plan. They are taken once and given back when the
model is closed, so it stays taken, for whatever moves out again."""

CORES = "updates on cores"
"""A line of what the host's cores take of host memory for their updates."""

UNPLANNED = "gradients that were not planned"
"""A line of what was taken beyond the plan, but within its budget."""


@dataclass(frozen=True, slots=True)
class Line:
    """One cause of bytes on a tier."""

    tier: TierName
    what: str
    nbytes: int


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """Placements of all units, and the predicted peak of every tier, line by line."""

    model: ModelSpec
    placements: tuple[Placement, ...]
    limits: Limits
    budget: Budget
    lines: tuple[Line, ...]
    moved: dict[str, int]
    """Bytes moved per step and lane."""
    dtypes: dict[str, str]
    page_bytes: int
    staging: int
    """Bytes of each of the two host buffers through which nvme is read and written."""
    why: str = ""
    """What decided who updates states in host memory. See hands.py."""
    speeds: Speeds | None = None
    """By which it was decided; other homes may decide otherwise."""
    times: Times | None = None
    """What a step takes; None: not known, or there is no link that bytes would pass over."""
    untimed: str = ""
    """Why it is not known what a step takes."""

    @property
    def program(self) -> Program:
        return Program(self.model, self.placements, self.limits)

    def peak(self, tier: TierName) -> int:
        return sum(line.nbytes for line in self.lines if line.tier == tier)

    @property
    def peaks(self) -> dict[str, int]:
        return {tier: self.peak(tier) for tier in TIERS}

    def bytes_of(self, tier: TierName, role: str) -> int:
        return sum(line.nbytes for line in self.lines if line.tier == tier and line.what == role)

    def taken(self, tier: TierName) -> int:
        """What roles have of a tier, or had before they moved in."""
        return sum(self.bytes_of(tier, what) for what in (*ROLES, LEFT))

    def beside(self, unplanned: Mapping[TierName, int]) -> "Plan":
        """With what was taken beyond it. On the device activations give up what the budget has no room for."""
        if not any(unplanned.values()):
            return self
        over = max(0, self.peak("device") + unplanned.get("device", 0) - self.budget.device)
        lines = [replace(x, nbytes=x.nbytes - over) if x.what == "activations" else x for x in self.lines]
        more = [Line(tier, UNPLANNED, nbytes) for tier, nbytes in unplanned.items() if nbytes]
        return replace(self, lines=(*lines, *more))

    def to_json(self) -> str:
        """The whole plan, for the run's folder."""
        budgets = {"device": self.budget.device, "host": self.budget.host, "nvme": self.budget.nvme}
        units = [
            {
                "name": unit.name,
                "parameters": sum(p.nbytes // p.dtype.itemsize for p in unit.params),
                "bytes": {role: unit.role_bytes(role) for role in ROLES},
                "home": {role: placement.of(role) for role in ROLES},
                "update": hands_of(placement, self.limits.hands),
            }
            for unit, placement in zip(self.model.units, self.placements, strict=True)
        ]
        body: dict[str, Any] = {
            "parameters": self.model.parameters,
            "sharding": dataclasses.asdict(self.model.sharding),
            "dtypes": self.dtypes,
            "budget": budgets,
            "peak": self.peaks,
            "lines": [dataclasses.asdict(line) for line in self.lines],
            "limits": dataclasses.asdict(self.limits),
            "page_bytes": self.page_bytes,
            "moved_per_step": self.moved,
            "updates": self.why,
            "seconds": None if self.times is None else dataclasses.asdict(self.times),
            "units": units,
        }
        return json.dumps(body, indent=2)

    def __repr__(self) -> str:
        peaks = ", ".join(f"{tier} {human(n)}" for tier, n in self.peaks.items() if n)
        return f"Plan({self.model.parameters:,} parameters in {len(self.model.units)} units; peaks: {peaks})"

    def __str__(self) -> str:
        rows = [("what", *TIERS)]
        for what in dict.fromkeys(line.what for line in self.lines):
            sizes = [sum(x.nbytes for x in self.lines if x.what == what and x.tier == tier) for tier in TIERS]
            rows.append((what, *(human(n) if n else "-" for n in sizes)))
        rows.append(("peak", *(human(self.peak(tier)) for tier in TIERS)))
        limits = {"device": self.budget.device, "host": self.budget.host, "nvme": self.budget.nvme}
        rows.append(("budget", *(human(limits[tier]) if limits[tier] else "-" for tier in TIERS)))
        width = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        text = ["  ".join(cell.ljust(w) for cell, w in zip(row, width, strict=True)).rstrip() for row in rows]
        text.insert(1, "-" * max(map(len, text)))
        text.insert(-2, "-" * max(map(len, text)))
        return "\n".join([self._heading(), *text, *self._notes()])

    def _heading(self) -> str:
        count, sharding = len(self.model.units), self.model.sharding
        ranks = f", rank {sharding.rank} of {sharding.size} at ZeRO stage {sharding.zero}" if sharding.shared else ""
        words = ", ".join(self._dtype_words())
        return f"overspill: {self.model.parameters:,} parameters in {count} units{ranks} ({words})"

    def _dtype_words(self) -> list[str]:
        return [f"{role} {dtype}" for role, dtype in self.dtypes.items()]

    def _notes(self) -> list[str]:
        homes: dict[Placement, list[int]] = {}
        for index, placement in enumerate(self.placements):
            homes.setdefault(placement, []).append(index)
        notes = []
        for placement, indices in homes.items():
            paged = any(self.model.units[index].pages for index in indices)
            by = f", {_BY[hands_of(placement, self.limits.hands)]}" if paged else ""
            where = f"weights {placement.weight}, gradients {placement.grad}, states {placement.state}"
            notes.append(f"{_names(self.model.units, indices)}: {where}{by}")
        if self.why:
            notes.append(f"updates of states on host: {self.why}")
        moved = ", ".join(f"{lane} {human(n)}" for lane, n in self.moved.items() if n)
        most = "at most " if moved and self.limits.hands == "split" else ""
        notes.append(f"moved per step: {most}{moved or 'nothing'}")
        if self.times is not None or self.untimed:
            notes.append(f"predicted step: {self.times or f'not known: {self.untimed}'}")
        return notes


MOST_RUNS = 6
"""Runs of units that are named; of more, one less, and how many units the others have."""


def _names(units: Sequence[UnitSpec], indices: Sequence[int]) -> str:
    """Units by name: those behind each other as the first and the last of them."""
    runs = [[place for _, place in run] for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0])]
    named = runs if len(runs) <= MOST_RUNS else runs[: MOST_RUNS - 1]
    ends = [(units[run[0]].name, units[run[-1]].name) for run in named]
    names = [first if first == last else f"{first} .. {last}" for first, last in ends]
    others = sum(map(len, runs[len(named) :]))
    if others:
        names.append(f"{others} others")
    return ", ".join(names) + (f" ({len(indices)} units)" if len(indices) > 1 else "")
