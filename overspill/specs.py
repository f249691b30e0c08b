"""What is to be trained and where its bytes live, as frozen data.

A model becomes a `ModelSpec` (units, parameters, pages); a plan gives every unit a `Placement`. Nothing here
holds a tensor, so all of it can be made and printed on a machine without a GPU.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

TierName = Literal["device", "host", "nvme", "null"]
Role = Literal["weight", "grad", "state"]
Phase = Literal["train", "eval"]

TIERS: tuple[TierName, ...] = ("device", "host", "nvme")
ROLES: tuple[Role, ...] = ("weight", "grad", "state")

ALIGNMENT = 512
"""Every parameter starts on such a boundary inside its unit's flat buffer."""

KiB, MiB, GiB = 2**10, 2**20, 2**30


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
    state_bytes: int
    """What the optimizer will keep for it, each tensor aligned; 0 where the optimizer does not have it."""

    @property
    def grad_bytes(self) -> int:
        return align(self.nbytes) if self.trainable else 0


@dataclass(frozen=True, slots=True)
class PageSpec:
    """A run of whole parameters of one unit that are updated together: `params[first:last]`."""

    first: int
    last: int
    state_bytes: int
    grad_bytes: int


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """Parameters that move together."""

    name: str
    params: tuple[ParamSpec, ...]
    pages: tuple[PageSpec, ...]

    @property
    def weight_bytes(self) -> int:
        return sum(align(p.nbytes) for p in self.params)

    @property
    def grad_bytes(self) -> int:
        return sum(p.grad_bytes for p in self.params)

    @property
    def state_bytes(self) -> int:
        return sum(p.state_bytes for p in self.params)

    def role_bytes(self, role: Role) -> int:
        return {"weight": self.weight_bytes, "grad": self.grad_bytes, "state": self.state_bytes}[role]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model cut into units, in the order in which a forward pass is expected to need them."""

    units: tuple[UnitSpec, ...]
    together: tuple[tuple[int, ...], ...]
    """Sets of units that one module call needs at the same time."""
    buffer_bytes: int

    def role_bytes(self, role: Role) -> int:
        return sum(u.role_bytes(role) for u in self.units)

    @property
    def parameters(self) -> int:
        return sum(p.nbytes // p.dtype.itemsize for u in self.units for p in u.params)


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
class Limits:
    """How much the program may hold on the device beyond what lives there."""

    window: int
    """Bytes of weights away from home that may be on the device at once."""
    depth: int
    """Pages that may be staged on the device at once: 1 no overlap, 2 load ahead, 3 load ahead and drain behind."""
    flight: int
    """Bytes of gradients that may be on their way home before the next one is sent."""
