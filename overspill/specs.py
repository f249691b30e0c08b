"""What is to be trained and where its bytes live, as frozen data.

A model becomes a `ModelSpec` (units, parameters, pages); a plan gives every unit a `Placement`. Nothing here
holds a tensor, so all of it can be made and printed on a machine without a GPU.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

TierName = Literal["device", "host", "nvme", "null"]
Role = Literal["weight", "grad", "state"]
Phase = Literal["train", "eval"]

TIERS: tuple[TierName, ...] = ("device", "host", "nvme")
ROLES: tuple[Role, ...] = ("weight", "grad", "state")
STAGES: dict[Role, int] = {"state": 1, "grad": 2, "weight": 3}

ALIGNMENT = 512
"""Every parameter starts on such a boundary inside its unit's flat buffer."""

KiB, MiB, GiB = 2**10, 2**20, 2**30

CUT = 4096
"""A parameter is cut at multiples of this many elements, so that its gradient can be read from disk in pieces."""
BLOCK = 4096
"""Bytes of a disk's block: offset, length and address of every transfer are multiples of it, as O_DIRECT asks."""
STRIPE = 64 * MiB
"""Bytes of a unit's flat buffer that one collective works on, however large the unit is."""

KERNEL_PIECE = 2**18
"""Elements that our own update in plain torch works on at a time: it needs memory for these beside the page."""


def align(nbytes: int, to: int = ALIGNMENT) -> int:
    """The next multiple of `to`."""
    return -(-nbytes // to) * to


def human(nbytes: float) -> str:
    """Bytes as people read them."""
    for unit, name in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{int(nbytes)} B"


def dense_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The tensor's own strides, if they cover its memory without gaps or overlaps; else those of a contiguous one."""
    expected = 1
    for step, size in sorted((st, n) for n, st in zip(shape, stride, strict=True) if n > 1):
        if step != expected:
            break
        expected *= size
    else:
        return tuple(stride)
    return tuple(math.prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape)))


STATE_BLOCK = 128
"""Elements that share an exponent, where moments have 8 bits: see kernels/codecs.py."""


@dataclass(frozen=True, slots=True)
class StateFormat:
    """What is kept on a page for the elements of parameters."""

    master: torch.dtype | None = None
    """What is kept beside a weight to hold its master: see kernels/masters.py. None: it is its own master."""
    fields: tuple[str, ...] | None = None
    """The arrays of our own kernel; None: whatever tensors the user's optimizer makes, parameter by parameter."""
    name: str = "exact"
    """How the arrays are kept: see kernels/codecs.py."""

    def named(self, name: str) -> "StateFormat":
        """The same in another format."""
        shorter = name == "compact" and self.master == torch.int16
        return StateFormat(torch.int8 if shorter else self.master, self.fields, name)

    @property
    def arrays(self) -> tuple[tuple[torch.dtype, int], ...]:
        """(dtype, elements that share an item) of the arrays of a page: what is kept of masters, then the fields."""
        kept = ((self.master, 1),) if self.master is not None else ()
        field: dict[str, tuple[tuple[torch.dtype, int], ...]] = {
            "exact": ((torch.float32, 1),),
            "bf16": ((torch.bfloat16, 1),),
            "compact": ((torch.uint8, 1), (torch.uint8, STATE_BLOCK)),
        }
        return (*kept, *(field[self.name] * len(self.fields or ())))

    @property
    def master_bytes(self) -> int:
        """Bytes per element of what is kept beside a weight."""
        return self.master.itemsize if self.master is not None else 0

    def bytes_for(self, elements: int) -> int:
        """Bytes of so many elements in the arrays of a page, where they are whole blocks."""
        return sum(elements * dtype.itemsize // shared for dtype, shared in self.arrays)


@dataclass(frozen=True, slots=True)
class Span:
    """Some elements of a parameter, in memory order, as one array keeps them: range behind range. Every range begins at
    a multiple of CUT in the array, so that it can be read from disk by itself."""

    ranges: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        return sum(end - begin for begin, end in self.ranges)

    @property
    def room(self) -> int:
        """Elements of the array."""
        if not self.ranges:
            return 0
        last, first = self.ranges[-1], self.ranges[:-1]
        return sum(align(end - begin, CUT) for begin, end in first) + last[1] - last[0]

    def locate(self, element: int) -> int:
        """Where an element is in the array."""
        room = 0
        for begin, end in self.ranges:
            if begin <= element < end or (element == begin == end):
                return room + element - begin
            room += align(end - begin, CUT)
        raise AssertionError(f"element {element} is not in {self.ranges}")

    def places(self) -> Iterator[tuple[int, int, int]]:
        """(first element, last + 1, where the first is in the array) of every range."""
        room = 0
        for begin, end in self.ranges:
            yield begin, end, room
            room += align(end - begin, CUT)


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a model's roles are divided over the ranks of a group. One process alone: all by itself, nothing reduced."""

    zero: int = 0
    """The ZeRO stage: 1 divides states, 2 gradients too, 3 weights too."""
    rank: int = 0
    size: int = 1
    shared: bool = False
    """Whether gradients are averaged over ranks."""
    whole: bool = False
    """Whether a parameter's state and update belong to one rank as a whole, as optimizers need it that do not work
    element by element."""

    def split(self, role: Role) -> bool:
        """Whether each rank keeps its own share of a role only."""
        return self.zero >= STAGES[role]


@dataclass(frozen=True, slots=True)
class Stripe:
    """Bytes of a unit's flat buffer that one collective works on, all of one dtype. Rank r has those from `bounds[r]`
    to `bounds[r + 1]`."""

    dtype: torch.dtype
    bounds: tuple[int, ...]
    trainable: bool

    @property
    def begin(self) -> int:
        return self.bounds[0]

    @property
    def end(self) -> int:
        return self.bounds[-1]

    def piece(self, rank: int) -> tuple[int, int]:
        return self.bounds[rank], self.bounds[rank + 1]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter, as the user knows it, and its place in its unit."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    """Bytes from the start of the unit's flat buffer."""
    nbytes: int
    trainable: bool
    grad_item: int
    """Bytes that there is room for per element of its gradient; 0 where it has none."""
    grad_bytes: int
    """Bytes that there is room for of its gradient, or of this rank's share of it."""
    owned: Span
    """The elements that this rank updates."""
    master: bool = False
    """Whether the weight is the rounding of a master, of which the rest is kept beside the states."""
    states: str = "exact"
    """The format of what is kept for it."""
    grads: int = 1
    """Gradients that there is room for: two, where one is kept beside the next; none, where they are not kept."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def all(self) -> Span:
        return Span(((0, self.numel),))


@dataclass(frozen=True, slots=True)
class PartSpec:
    """Elements `begin` to `end` of one parameter, in memory order, as a part of a page."""

    param: int
    begin: int
    end: int
    element: int
    """Where the elements begin in each of the page's arrays."""
    region: int = 0
    """Bytes from the start of the page to the tensors of the user's optimizer."""
    region_bytes: int = 0
    """Bytes that the user's optimizer will keep for them, each tensor aligned; 0 where ours or none does."""

    @property
    def numel(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class PageSpec:
    """Elements of one unit that are updated together. A page is a few arrays, one behind the other, of `elements` each
    (StateFormat), and behind them the tensors of the user's optimizer, where that does the update."""

    parts: tuple[PartSpec, ...]
    elements: int
    state_bytes: int
    grad_bytes: int
    format: StateFormat = StateFormat()
    """The format of all its parts."""


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """Parameters that move together."""

    name: str
    params: tuple[ParamSpec, ...]
    pages: tuple[PageSpec, ...]
    stripes: tuple[Stripe, ...]
    """Of the flat buffer, one behind the other."""
    home: tuple[tuple[int, int], ...]
    """What its home holds of the flat buffer, piece behind piece: all of it, or this rank's share."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the flat buffer: what the device holds while the unit is used."""
        return self.stripes[-1].end if self.stripes else 0

    @property
    def home_bytes(self) -> int:
        return max((at + end - begin for begin, end, at in self.home_pieces()), default=0)

    def home_pieces(self) -> Iterator[tuple[int, int, int]]:
        """(first byte, last + 1, where they are in the home) of what the home holds. On a disk every piece begins at a
        block of its own."""
        at = 0
        for begin, end in self.home:
            yield begin, end, at
            at += align(end - begin, BLOCK)

    @property
    def grad_bytes(self) -> int:
        return sum(p.grad_bytes * p.grads for p in self.params)

    @property
    def made_bytes(self) -> int:
        """Bytes of all its gradients, as a backward pass makes them."""
        return sum(p.grad_bytes for p in self.params if p.trainable)

    @property
    def state_bytes(self) -> int:
        return sum(page.state_bytes for page in self.pages)

    def role_bytes(self, role: Role) -> int:
        return {"weight": self.home_bytes, "grad": self.grad_bytes, "state": self.state_bytes}[role]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model cut into units, in the order in which a forward pass is expected to need them."""

    units: tuple[UnitSpec, ...]
    together: tuple[tuple[int, ...], ...]
    """Sets of units that one module call needs at the same time."""
    buffer_bytes: int
    format: StateFormat = StateFormat()
    """What an update keeps, exactly; pages say in which format."""
    sharding: Sharding = Sharding()

    def role_bytes(self, role: Role) -> int:
        return sum(u.role_bytes(role) for u in self.units)

    @property
    def parameters(self) -> int:
        return sum(p.numel for u in self.units for p in u.params)


@dataclass(frozen=True, slots=True)
class Placement:
    """The home tier of each role of one unit."""

    weight: TierName = "device"
    grad: TierName = "device"
    state: TierName = "device"

    def of(self, role: Role) -> TierName:
        return {"weight": self.weight, "grad": self.grad, "state": self.state}[role]


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that may be used, per tier."""

    device: int
    host: int
    nvme: int


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes that they were seen to take at most. They are often at their most before there are gradients, whose room
    they may have until then."""

    before: int
    """Bytes until the first gradient of a step, beyond what lives on the device without gradients."""
    after: int
    """Bytes from then on, beyond all that lives there."""

    def beside(self, grads: int) -> int:
        """Bytes of activations beyond all that lives there, if so many bytes of that are gradients."""
        return max(self.before - grads, self.after, 0)


Hands = Literal["streamed", "split", "host"]
"""Who updates states in host memory: the GPU, as they pass over the link; it and the host's cores; the cores alone."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much the program may hold on the device beyond what lives there, and who updates."""

    window: int
    """Bytes of weights away from home that may be on the device at once."""
    depth: int
    """Slots of the ring, which pages pass through: with one nothing overlaps, more are for what comes and goes."""
    flight: int
    """Bytes of gradients that may be on their way home before the next one is sent."""
    lent: int = 0
    """Bytes planned for gradients that pages may have while there are none. See runtime/loans.py."""
    hands: Hands = "streamed"
    """Who updates states in host memory. See runtime/cores.py."""
    consumed: int = 0
    """Bytes of gradients whose updates have begun, before the oldest are let go; 0: they are kept."""
