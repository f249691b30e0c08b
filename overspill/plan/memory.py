"""What a plan takes, line by line, but for activations."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from overspill.plan.hands import Chosen, Speeds
from overspill.plan.plan import CORES, LEFT, UNPLANNED, Line, Plan
from overspill.plan.simulate import Simulated, simulate
from overspill.program import WAITING, Program
from overspill.slots import ring_slot_bytes
from overspill.specs import (
    BLOCK,
    KERNEL_PIECE,
    ROLES,
    TIERS,
    Activations,
    Budget,
    KiB,
    Limits,
    MiB,
    ModelSpec,
    ParamSpec,
    Placement,
    Role,
    Stripe,
    TierName,
    UnitSpec,
    align,
)
from overspill.times import Pace, Passing

WORKSPACE = 4
"""fp32 copies of a page's parameters that an optimizer's own step may hold for a moment."""
BESIDE_MASTERS = 2
"""More such copies where the parameters are roundings of masters: those, and the widened gradients."""
KERNEL_WORKSPACE = 10
"""fp32 arrays of a piece's length that our own update holds: master, gradient, and what is in between."""
CODEC_WORKSPACE = 30
"""More such arrays where states are kept in less than fp32: integers of 8 bytes, above all."""
STAGING = (128 * KiB, 8 * MiB)


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be placed, and within what."""

    model: ModelSpec
    budget: Budget
    dtypes: Mapping[str, str]
    page_bytes: int
    micro_batches: int = 1
    place: Mapping[str, TierName] | None = None
    """Homes that are forced instead of solved for, by role."""
    copied_norms: bool = False
    """Whether the norm of a 16-bit gradient takes an fp32 copy of it, as torch does without a GPU."""
    paged: bool = False
    """Whether pages are fetched ahead of the step, as they are on a GPU."""
    speeds: Speeds | None = None
    """What decides who updates states in host memory; None: nobody could but the GPU."""
    has_cores: bool = False
    """Whether an earlier plan has taken what the host's cores need for it."""
    chosen: Chosen | None = None
    """Who does it, where that is decided already."""
    activations: Activations | None = None
    """What activations were seen to take, with a margin; None: not known yet."""
    pace: Pace | None = None
    """How fast bytes pass; None: there is no link."""
    unknown: str = ""
    """What would tell how fast bytes pass, where that is not known."""
    spread: bool = False
    """Whether updates run all through a step, or in its first forward pass."""
    locals: int = 1
    """Ranks that share the machine's host memory and disks; the budget has one's share."""
    taken: Mapping[TierName, int] = field(default_factory=dict)
    """What an earlier plan took elsewhere than on the device, and the model has until it is closed."""


def taken_bytes(unit: UnitSpec, role: Role, tier: TierName) -> int:
    """What a role of a unit takes on a tier: on nvme every slot starts on a block of its own."""
    if tier != "nvme":
        return unit.role_bytes(role)
    slots = {
        "weight": [unit.home_bytes],
        "grad": [p.grad_bytes for p in unit.params for _ in range(p.grads)],
        "state": [page.state_bytes for page in unit.pages],
    }[role]
    return sum(align(size, BLOCK) for size in slots)


def bytes_on(model: ModelSpec, placements: tuple[Placement, ...], role: Role, tier: TierName) -> int:
    pairs = zip(model.units, placements, strict=True)
    return sum(taken_bytes(u, role, tier) for u, p in pairs if p.of(role) == tier)


def staging_bytes(host: int) -> int:
    """Of each of the two buffers through which nvme is read and written."""
    return min(max(align(host // 32, BLOCK), STAGING[0]), STAGING[1])


def tracking_bytes(total: int) -> int:
    """Blocks that a file system may charge to a file of so many bytes for keeping track of its extents."""
    return BLOCK * (2 + total // (32 * MiB)) if total else 0


def lines_elsewhere(request: Request, placements: tuple[Placement, ...], staging: int, cores: int) -> list[Line]:
    """Everything in host memory and on disks. `cores`: what updates by the host's cores take there."""
    lines = []
    for tier in TIERS[1:]:
        own = [Line(tier, role, bytes_on(request.model, placements, role, tier)) for role in ROLES]
        lines += [*own, Line(tier, LEFT, max(0, request.taken.get(tier, 0) - sum(line.nbytes for line in own)))]
    on_disk = sum(line.nbytes for line in lines if line.tier == "nvme")
    return [
        *lines,
        Line("host", "nvme staging", 2 * staging),
        Line("host", CORES, cores),
        Line("nvme", "file system", tracking_bytes(on_disk)),
    ]


def as_first(request: Request, made: Plan) -> Plan:
    """A plan as it was reported, for a model that has nothing yet: nothing is left by what moved in, and nothing was
    taken beyond it."""
    if not any(line.what in (LEFT, UNPLANNED) for line in made.lines):
        return made
    uses_nvme = any(made.bytes_of("nvme", role) for role in ROLES)
    staging = made.staging if uses_nvme else 0
    elsewhere = lines_elsewhere(request, made.placements, staging, made.bytes_of("host", CORES))
    full = made.peak("device") >= made.budget.device
    device = [line for line in made.lines if line.tier == "device" and line.what != UNPLANNED]
    if full:
        # Activations may have given room up for what was not planned.
        more = made.bytes_of("device", UNPLANNED)
        device = [replace(x, nbytes=x.nbytes + more) if x.what == "activations" else x for x in device]
    return replace(made, lines=(*device, *(line for line in elsewhere if line.nbytes)), staging=staging)


def device_lines(request: Request, placements: tuple[Placement, ...], limits: Limits) -> list[Line]:
    """What a plan takes on the device, but for activations. See program/, Note [Passing bytes]."""
    model = request.model
    passing = simulated(request, placements, limits)
    params = [p for u in model.units for p in u.params if p.trainable]
    gradients = max(passing.gradients, max(map(_arriving, params), default=0))
    if request.copied_norms and model.format.master is not None:
        gradients += max((p.numel * torch.float32.itemsize for p in params), default=0)
    lines = [Line("device", role, bytes_on(model, placements, role, "device")) for role in ROLES]
    lines.append(Line("device", "gradients before their update", limits.consumed + _most_made(model, limits)))
    lines.append(Line("device", "buffers", model.buffer_bytes))
    lines.append(Line("device", "weights passing", passing.window))
    slots = min(limits.depth, sum(len(u.pages) for u in model.units))
    ring = slots * ring_slot_bytes(model, placements) + _workspace(model)
    shared = limits.depth == 1
    lines.append(Line("device", "updates passing", 0 if shared else ring))
    both = max(gradients, ring) if shared else gradients
    lines.append(Line("device", "updates or gradients passing" if shared else "gradients passing", both))
    lines.append(Line("device", "collectives", _collectives(model)))
    return lines


def _most_made(model: ModelSpec, limits: Limits) -> int:
    """Bytes of the gradients of the unit that makes most of them, where they are not kept."""
    return max((unit.made_bytes for unit in model.units), default=0) if limits.consumed else 0


def _arriving(p: ParamSpec) -> int:
    """A gradient as autograd makes it, or its sum with others: whole, whatever this rank will keep of it."""
    return max(p.grad_bytes, p.nbytes, p.grad_item * p.numel)


def _collectives(model: ModelSpec) -> int:
    """Bytes of gradients of the unit that is being reduced and of those that wait for their others, and what
    collectives take for a stripe."""
    if not model.sharding.shared:
        return 0
    waiting = [sum(_arriving(p) for p in u.params if p.trainable) for u in model.units]
    stripes = (_striped(model, stripe) for u in model.units for stripe in u.stripes)
    return (1 + WAITING) * max(waiting, default=0) + max(stripes, default=0)


def _striped(model: ModelSpec, stripe: Stripe) -> int:
    """Bytes of the stripe as one array; beside it what all ranks send of this rank's piece, their sum, and that
    rounded; or what is gathered, twice over gloo. Sums may be fp32 where gradients are narrow."""
    wider, (begin, end) = 2 if model.format.master is not None else 1, stripe.piece(model.sharding.rank)
    whole, piece = wider * (stripe.end - stripe.begin), wider * (end - begin)
    return max(whole + (model.sharding.size + 2) * piece, 3 * whole + piece)


def _workspace(model: ModelSpec) -> int:
    """What an update holds for a moment; in the first step of the user's optimizer also the states that it makes."""
    item, format = torch.float32.itemsize, model.format
    pages = [page for u in model.units for page in u.pages]
    if format.fields is not None:
        narrow = any(page.format.name != "exact" for page in pages)
        longest = max((part.numel for page in pages for part in page.parts), default=0)
        return (KERNEL_WORKSPACE + (CODEC_WORKSPACE if narrow else 0)) * item * min(longest, KERNEL_PIECE)
    copies = WORKSPACE + (BESIDE_MASTERS if format.master is not None else 0)
    sizes = [(sum(part.numel for part in page.parts) * item, page.state_bytes) for page in pages]
    return max((max(copies * params, states) for params, states in sizes), default=0)


def simulated(request: Request, placements: tuple[Placement, ...], limits: Limits) -> Simulated:
    return simulate(Program(request.model, placements, limits), micro_batches=request.micro_batches)


def first_of(request: Request, placements: tuple[Placement, ...], limits: Limits) -> tuple[Passing, int]:
    """What passes until a first forward pass with lazy updates is over; and how much of it the ring holds before."""
    model, pairs = request.model, list(zip(request.model.units, placements, strict=True))
    come, go = dict[TierName, int](), dict[TierName, int]()
    for tier in TIERS[1:]:
        come[tier] = sum(u.role_bytes(role) for u, p in pairs for role in ROLES if p.of(role) == tier)
        weights = sum(u.home_bytes for u, p in pairs if u.pages and p.weight == tier)
        go[tier] = weights + sum(u.state_bytes for u, p in pairs if p.state == tier)
    program = Program(model, placements, limits)
    ring = limits.depth * ring_slot_bytes(model, placements) if request.paged and program.pipeable else 0
    # Only states are brought before a step.
    ring = min(ring, sum(u.state_bytes for u, p in pairs if p.state != "device"))
    return Passing(sum(come.values()), sum(go.values()), come["nvme"], go["nvme"]), ring
