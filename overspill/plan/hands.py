"""Who updates states that live in host memory: the GPU, the host's cores, or both. Chosen by what was measured.

Note [Who updates]. For an element with `s` bytes of state, `w` of weight, and of gradient `g` on the device or `h` in
host memory (its way there is the same whoever updates):

| hands | by | up over the link | down | of host memory, read and written |
|---|---|---|---|---|
| streamed | the GPU, as pages pass | s + h | s | 2 s + h |
| host | the cores, where the states live | w | w + g | 2 s + 4 w + 2 g + h |
| split | both: some pages each | | | |

Both share the link and the memory. The cores pay where the link is slow beside them; where it takes most of what the
memory gives, they are in its way. Computed gains are not always had (docs/log.md), so the GPU does it alone unless the
cores are to make it a quarter faster.

It is one choice for all units that the cores can update: those with states in host memory, and gradients there or on
the device. States on the device are updated there, and what lives on a disk is updated by the GPU as it passes.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from overspill.specs import Hands, ModelSpec, Placement

WORTH = 1.25
"""How many times as fast it must be with the cores."""
ALONE = 0.95
"""Of what there is to do: from here on the cores do all of it."""


class Speeds(NamedTuple):
    """Of a machine, as far as one rank has it, per second."""

    link: float
    """Bytes over the link, both ways together."""
    memory: float
    """Bytes of host memory, read and written."""
    cores: float
    """Elements that the cores update."""


UNKNOWN = Speeds(0.0, 0.0, 0.0)
"""Nobody has measured."""


class Sizes(NamedTuple):
    """Bytes of an element, on average."""

    state: float
    weight: float
    gradient: float
    """On the device."""
    at_home: float = 0.0
    """Of gradients in host memory."""


class Chosen(NamedTuple):
    hands: Hands = "streamed"
    why: str = ""


STREAMED = Chosen()
"""Nobody else could."""


def choose(speeds: Speeds, sizes: Sizes) -> Chosen:
    """See Note [Who updates]."""
    if min(speeds) <= 0:
        return Chosen("streamed", "whether the host's cores could help is not known: overspill probe measures it")
    alone, best = _by_link(speeds, sizes, 0.0), max(_corners(speeds, sizes), key=sum)
    why = f"{sum(alone) / 1e9:.1f} G elements/s over the link, {sum(best) / 1e9:.1f} with the host's cores"
    if sum(best) < WORTH * sum(alone):
        return Chosen("streamed", why)
    return Chosen("host" if best[1] >= ALONE * sum(best) else "split", why)


class _Bound(NamedTuple):
    """Of what the GPU and the cores share."""

    there: float
    """Bytes per second."""
    streamed: float
    """Bytes for an element that the GPU updates."""
    cores: float
    """For one that the cores update."""


def _bounds(speeds: Speeds, sizes: Sizes) -> tuple[_Bound, _Bound, _Bound]:
    """Of the way up, of the way down, and of host memory."""
    (s, w, g, h), half = sizes, speeds.link / 2
    memory = _Bound(_memory(speeds), 2 * s + h, 2 * s + 4 * w + 2 * g + h)
    return _Bound(half, s + h, w), _Bound(half, s, w + g), memory


def _corners(speeds: Speeds, sizes: Sizes) -> list[tuple[float, float]]:
    """Where one of the bounds ends and another begins: the most is at one of these."""
    bounds = _bounds(speeds, sizes)
    most = min(speeds.cores, *(bound.there / bound.cores for bound in bounds))
    found = [0.0, most]
    for one, other in itertools.combinations(bounds, 2):
        # Both are full here, if anywhere.
        slope = one.cores / one.streamed - other.cores / other.streamed
        both = (one.there / one.streamed - other.there / other.streamed) / slope if slope else 0.0
        found.append(min(max(both, 0.0), most))
    return [_by_link(speeds, sizes, cores) for cores in found]


def _by_link(speeds: Speeds, sizes: Sizes, cores: float) -> tuple[float, float]:
    """Elements per second of the GPU, if the cores do so many; and those."""
    left = min((bound.there - cores * bound.cores) / bound.streamed for bound in _bounds(speeds, sizes))
    return max(left, 0.0), cores


def _memory(speeds: Speeds) -> float:
    """What passes over the link is read from host memory or written there, so that gives at least as much."""
    return max(speeds.memory, speeds.link)


def sizes_of(model: ModelSpec, placements: Sequence[Placement]) -> Sizes | None:
    """Of all that the cores could update; None: nothing."""
    elements, found = 0, Counter[str]()
    for unit, placement in zip(model.units, placements, strict=True):
        for page in unit.pages if is_shareable(placement) else ():
            found["state"] += page.state_bytes
            for part in page.parts:
                spec = unit.params[part.param]
                elements += part.numel
                found["weight"] += part.numel * spec.dtype.itemsize
                found[placement.grad] += part.numel * spec.grad_item
    if not elements or not found["state"]:
        return None
    return Sizes(*(found[what] / elements for what in ("state", "weight", "device", "host")))


def rate_of_cores(model: ModelSpec, rates: Mapping[str, float | None]) -> float | None:
    """Elements per second, of a model with states in these formats; None: one of them was not measured."""
    elements: Counter[str] = Counter()
    for page in (page for unit in model.units for page in unit.pages):
        elements[page.format.name] += sum(part.numel for part in page.parts)
    known = {format: rates.get(format) for format in elements}
    seconds = [count / rate for format, count in elements.items() if (rate := known[format])]
    return sum(elements.values()) / sum(seconds) if seconds and len(seconds) == len(elements) else None


def is_shareable(placement: Placement) -> bool:
    """Whether the cores can update a unit that lives there."""
    return placement.state == "host" and placement.grad != "nvme"


def hands_of(placement: Placement, hands: Hands) -> str:
    """Who updates a unit: the words of Note [Who updates], or "device", where its states live there."""
    if placement.state == "device":
        return "device"
    return hands if is_shareable(placement) else "streamed"
