"""Who updates states that live in host memory: the GPU, the host's cores, or both. Chosen by what was measured.

Note [Who updates]. For an element with `s` bytes of state, `w` of weight and `g` of gradient:

| hands | by | over the link, down (the fuller way) | of host memory, read and written |
|---|---|---|---|
| streamed | the GPU, as pages pass | s | 2 s |
| host | the cores, where the states live | w + g | 2 s + 4 w + 2 g |
| split | both: some pages each | | |

Both share the link and the memory. The cores pay where the link is slow beside them; where it takes most of what the
memory gives, they are in its way. Computed gains are not always had (docs/log.md), so the GPU does it alone unless the
cores are to make it a quarter faster.
"""

from collections import Counter
from collections.abc import Mapping
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


class Sizes(NamedTuple):
    """Bytes of an element, on average."""

    state: float
    weight: float
    gradient: float


class Chosen(NamedTuple):
    hands: Hands = "streamed"
    why: str = ""
    kept: bool = False
    """Whether it is in force, and not to be chosen anew."""


STREAMED = Chosen()
"""Nobody else could."""


def choose(speeds: Speeds | None, sizes: Sizes) -> Chosen:
    """See Note [Who updates]."""
    if speeds is None or min(speeds.link, speeds.memory, speeds.cores) <= 0:
        return Chosen("streamed", "whether the host's cores could help is not known: overspill probe measures it")
    alone, best = _by_link(speeds, sizes, 0.0), max(_corners(speeds, sizes), key=sum)
    why = f"{sum(alone) / 1e9:.1f} G elements/s over the link, {sum(best) / 1e9:.1f} with the host's cores"
    if sum(best) < WORTH * sum(alone):
        return Chosen("streamed", why)
    return Chosen("host" if best[1] >= ALONE * sum(best) else "split", why)


def _corners(speeds: Speeds, sizes: Sizes) -> list[tuple[float, float]]:
    """Where one of the bounds ends and another begins: the most is at one of these."""
    down, memory = _cores_bytes(sizes)
    half, room = speeds.link / 2, _memory(speeds)
    most = min(speeds.cores, half / down, room / memory)
    # Link and memory are full together here, if anywhere.
    slope = memory - 2 * down
    both = (room - 2 * half) / slope if slope > 0 else 0.0
    return [_by_link(speeds, sizes, cores) for cores in (0.0, min(max(both, 0.0), most), most)]


def _by_link(speeds: Speeds, sizes: Sizes, cores: float) -> tuple[float, float]:
    """Elements per second of the GPU, if the cores do so many; and those."""
    down, memory = _cores_bytes(sizes)
    left = min((speeds.link / 2 - cores * down) / sizes.state, (_memory(speeds) - cores * memory) / (2 * sizes.state))
    return max(left, 0.0), cores


def _cores_bytes(sizes: Sizes) -> tuple[float, float]:
    """Down over the link, and of host memory, for an element that the cores update."""
    return sizes.weight + sizes.gradient, 2 * sizes.state + 4 * sizes.weight + 2 * sizes.gradient


def _memory(speeds: Speeds) -> float:
    """What passes over the link is read from host memory or written there, so that gives at least as much."""
    return max(speeds.memory, speeds.link)


def sizes_of(model: ModelSpec) -> Sizes | None:
    """Of all that is updated; None: nothing is."""
    elements = states = weights = gradients = 0
    for unit in model.units:
        for page in unit.pages:
            states += page.state_bytes
            for part in page.parts:
                spec = unit.params[part.param]
                elements += part.numel
                weights += part.numel * spec.dtype.itemsize
                gradients += part.numel * spec.grad_item
    return Sizes(states / elements, weights / elements, gradients / elements) if elements and states else None


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
    return placement.state == "host" and placement.grad == "device"


def hands_of(placement: Placement, hands: Hands) -> str:
    """Who updates a unit: the words of Note [Who updates], or "device", where its states live there."""
    if placement.state == "device":
        return "device"
    return hands if is_shareable(placement) else "streamed"
