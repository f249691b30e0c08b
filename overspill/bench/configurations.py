"""Configurations of ours as the command line says them: "gpu=16GB", "update=eager,clip=0,place=state:host"."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from overspill.bench.jobs import BUILDS
from overspill.bench.peers import NAMES
from overspill.cli.settings import budget
from overspill.config import UNTOLD, Options, options
from overspill.errors import OptionError

PEAK = "peak:"
"""A budget that is what a peer was seen to take in the same run: gpu=peak:deepspeed."""
AND = "+"
"""Between the parts of one value: place=weight:host+state:host, nvme=/a+/b."""
_NOT_HERE = frozenset({"mesh", "weights"}) | UNTOLD
_KEYWORDS = tuple(name for name in Options.__dataclass_fields__ if name not in _NOT_HERE)
_OWN = ("clip", "build", "name")
_WORDS: dict[str, Any] = {"none": None, "true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Ours:
    """One configuration of ours."""

    label: str = "ours"
    keywords: Mapping[str, Any] = field(default_factory=dict)
    """What `overspill.prepare` is told."""
    clip: float | None = None
    """The norm to clip to; None: as all others."""
    build: str | None = None
    budget_of: str | None = None
    """The peer whose peak is the GPU budget."""

    def within(self, peak: int) -> "Ours":
        """The same with that budget."""
        return dataclasses.replace(self, keywords={**self.keywords, "gpu": peak})


def parse(text: str, base: Mapping[str, Any]) -> Ours:
    """A configuration; `base` holds keywords that it has unless it says otherwise."""
    said: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = pair.partition("=")
        if not equals or not value:
            raise OptionError(
                f"expected --ours as NAME=VALUE,NAME=VALUE, found {pair!r} in {text!r}; give a name and a value"
            )
        if name not in (*_KEYWORDS, *_OWN):
            raise OptionError(
                f"expected --ours with keywords of overspill.prepare or {', '.join(_OWN)}, found {name!r} in {text!r}; "
                f"known are {', '.join(sorted((*_KEYWORDS, *_OWN)))}"
            )
        said[name] = value
    clip, build, label = (said.pop(name, None) for name in _OWN)
    peer = said["gpu"].removeprefix(PEAK) if said.get("gpu", "").startswith(PEAK) else None
    if peer is not None:
        del said["gpu"]
    keywords = {**base, **{name: _value(name, value) for name, value in said.items()}}
    options(keywords)  # refuses what `prepare` would refuse
    return Ours(
        label or (f"ours {text}" if text else "ours"),
        keywords,
        None if clip is None else _clip(clip, text),
        _build(build),
        peer,
    )


def check(configurations: Sequence[Ours], peers: Sequence[str]) -> None:
    """Refuse peers that nobody knows, budgets of peers that are not run, two of one name, and nothing at all."""
    if not peers and not configurations:
        raise OptionError("expected something to measure, found neither --peers nor --ours; give one of them")
    for name in peers:
        if name not in NAMES:
            raise OptionError(f"expected --peers as a list of {', '.join(NAMES)}, found {name!r}; name some of those")
    for ours in configurations:
        if ours.budget_of is not None and ours.budget_of not in peers:
            raise OptionError(
                f"expected a budget of a peer that is run too, found gpu={PEAK}{ours.budget_of}; add it to --peers"
            )
    labels = [*peers, *(ours.label for ours in configurations)]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise OptionError(f"expected engines of different names, found {twice[0]!r} twice; name one with name=...")


def check_delay(configurations: Sequence[Ours], warmup: int) -> None:
    """Refuse to time delayed updates before they are delayed."""
    for ours in configurations:
        after = options(ours.keywords).delay_after
        if ours.keywords.get("update") == "delayed" and after >= warmup:
            raise OptionError(
                f"expected delay_after= below the {warmup} steps before the clock starts, found {after} for "
                f"{ours.label!r}, which would time steps as usual; say update=delayed,delay_after={max(0, warmup - 1)} "
                "or more steps with --warmup"
            )


def _value(name: str, text: str) -> Any:
    """As `prepare` takes it."""
    if text in _WORDS:
        return _WORDS[text]
    match name:
        case "gpu" | "host":
            return budget(text)
        case "nvme":
            return text.split(AND)
        case "place":
            pairs = [part.partition(":") for part in text.split(AND)]
            return {role: tier for role, _, tier in pairs}
    return int(text) if text.isdecimal() else text


def _clip(text: str, whole: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise OptionError(
            f"expected clip= from 0, which means not to clip, found {text!r} in {whole!r}; give 0 or more"
        )
    return found


def _build(text: str | None) -> str | None:
    if text is not None and text not in BUILDS:
        raise OptionError(f"expected build= to be one of {', '.join(BUILDS)}, found {text!r}; give one of them")
    return text
