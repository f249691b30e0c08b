"""Who updates states that live in host memory: the GPU, the host's cores, or both. Chosen by what was measured.

Note [Who updates]. States of `s` bytes for an element, weights of `w` and gradients of `g`:

| by | over the link, down (the fuller way) | of host memory, read and written |
|---|---|---|
| the GPU, as pages pass | s | 2 s |
| the cores, where the states live | w + g | 2 s + 4 w + 2 g |

Both share the link and the memory. The cores pay where the link is slow beside them; where it takes most of what the
memory gives, as on large machines, they are in its way. The GPU does it alone, unless the cores make it a quarter
faster: what is gained is less than that (docs/log.md).
"""

from dataclasses import dataclass

from overspill.specs import Hands, ModelSpec, Placement

WORTH = 1.25
"""How many times as fast it must be with the cores."""
ALONE = 0.95
"""Of what there is to do: from here on the cores do all of it."""
_STEPS = 200


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of a machine, per second."""

    link: float
    """Bytes over the link, both ways together."""
    memory: float
    """Bytes of host memory, read and written."""
    cores: float
    """Elements that all cores update, exact ones."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of an element, on average."""

    state: float
    weight: float
    gradient: float


@dataclass(frozen=True, slots=True)
class Chosen:
    hands: Hands
    why: str


def choose(speeds: Speeds | None, sizes: Sizes | None) -> Chosen:
    """See Note [Who updates]. `sizes`: None where there is nothing that the cores could do."""
    if sizes is None:
        return Chosen("link", "")
    if speeds is None:
        return Chosen("link", "whether the host's cores could help is not known: overspill probe measures it")
    link = _together(speeds, sizes, 0.0)
    best = max((_together(speeds, sizes, speeds.cores * i / _STEPS) for i in range(1, _STEPS + 1)), key=sum)
    rates = f"{sum(link) / 1e9:.1f} G elements/s over the link, {sum(best) / 1e9:.1f} with the host's cores"
    if sum(best) < WORTH * sum(link):
        return Chosen("link", rates)
    return Chosen("cores" if best[1] >= ALONE * sum(best) else "both", rates)


def _together(speeds: Speeds, sizes: Sizes, cores: float) -> tuple[float, float]:
    """Elements per second of the GPU and of the cores, if these do so many; nothing, if they cannot."""
    memory = max(speeds.memory, speeds.link)
    down = speeds.link / 2 - cores * (sizes.weight + sizes.gradient)
    left = memory - cores * (2 * sizes.state + 4 * sizes.weight + 2 * sizes.gradient)
    if min(down, left) < 0:
        return 0.0, 0.0
    return min(down / sizes.state, left / (2 * sizes.state)), cores


def sizes_of(model: ModelSpec, placements: tuple[Placement, ...]) -> Sizes | None:
    """Of what the cores could update: states in host memory, of gradients on the device; None: nothing."""
    elements = states = weights = gradients = 0
    for unit, placement in zip(model.units, placements, strict=True):
        if not could_share(placement):
            continue
        for page in unit.pages:
            states += page.state_bytes
            for part in page.parts:
                spec = unit.params[part.param]
                elements += part.numel
                weights += part.numel * spec.dtype.itemsize
                gradients += part.numel * spec.grad_item
    return Sizes(states / elements, weights / elements, gradients / elements) if elements else None


def could_share(placement: Placement) -> bool:
    return placement.state == "host" and placement.grad == "device"


def executor(placement: Placement, hands: Hands) -> str:
    """Who updates a unit."""
    if placement.state == "device":
        return "device"
    names: dict[Hands, str] = {"link": "streamed", "both": "split", "cores": "host"}
    return names[hands] if could_share(placement) else "streamed"
