"""Who updates what in a plan with these homes, and what that takes. See hands.py."""

from collections import Counter

from overspill.plan.hands import STREAMED, Chosen, choose, is_shareable, sizes_of
from overspill.plan.memory import Request, bytes_on, simulated
from overspill.program import Lane
from overspill.slots import CORES_STAGED, staged_bytes
from overspill.specs import ROLES, Limits, Placement, human


def shared(request: Request, placements: tuple[Placement, ...], limits: Limits, taken: int) -> tuple[Chosen, int]:
    """Who updates states in host memory, with these homes and so much of it taken beside them; and what the host's
    cores take there for it."""
    staged, sizes = CORES_STAGED * staged_bytes(request.model), sizes_of(request.model, placements)
    if request.chosen is not None:
        # Where all states moved in there is nothing left to say why of.
        chosen = request.chosen if sizes is not None else request.chosen._replace(why="")
        return chosen, staged if chosen.hands != "streamed" else 0
    there = staged if request.has_cores else 0
    if request.speeds is None or sizes is None or limits.depth == 1:
        return STREAMED, there
    if any("nvme" in (p.state, p.grad) for p in placements):
        return Chosen("streamed", "what others have on a disk passes page by page, each waited for"), there
    chosen = choose(request.speeds, sizes)
    if chosen.hands == "streamed" or there:
        return chosen, there
    taken += sum(bytes_on(request.model, placements, role, "host") for role in ROLES)
    if taken + staged > request.budget.host:
        return Chosen("streamed", f"{chosen.why}, for which there are no {human(staged)} of host memory"), 0
    return chosen, staged


def moved(request: Request, placements: tuple[Placement, ...], limits: Limits) -> dict[str, int]:
    """Bytes per step and lane; where states are updated by both, as if by the device."""
    found = Counter(simulated(request, placements, limits).moved)
    for unit, placement in zip(request.model.units, placements, strict=True):
        if limits.hands == "host" and is_shareable(placement):
            # Of what this rank updates.
            parts = [(part.numel, unit.params[part.param]) for page in unit.pages for part in page.parts]
            weights = sum(numel * spec.dtype.itemsize for numel, spec in parts)
            found[Lane.UP] += weights - unit.state_bytes
            found[Lane.DOWN] += weights - unit.state_bytes
            if placement.grad == "device":
                found[Lane.DOWN] += sum(numel * spec.grad_item for numel, spec in parts)
            else:
                found[Lane.UP] -= sum(page.grad_bytes for page in unit.pages)
    return {str(lane): n for lane, n in found.items()}
