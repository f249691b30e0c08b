"""The words of the program: kinds of ops, lanes, ops, events, and what it knows and remembers."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from overspill.specs import Limits, ModelSpec, Phase, Placement


class Kind(StrEnum):
    """What an op does. The words after the dash say what it means for device memory."""

    FETCH = "fetch"
    """weights: home to device — takes the unit's bytes"""
    STORE = "store"
    """weights: device to home"""
    RELEASE = "release"
    """weights leave the device — gives the unit's bytes back"""
    OPEN = "open"
    """weights are there: the unit may be used"""
    GRAD_FETCH = "grad_fetch"
    """one partial gradient: home to device — takes its bytes"""
    GRAD_ADD = "grad_add"
    """a new contribution is added to the partial sum — gives the sum's bytes back to the contribution"""
    GRAD_NORM = "grad_norm"
    """the norm of a gradient, while its bytes are on the device"""
    GRAD_STORE = "grad_store"
    """one gradient: device to home"""
    GRAD_DROP = "grad_drop"
    """a gradient that arrived home leaves the device — gives its bytes back"""
    STATE_FETCH = "state_fetch"
    """a page of state: home to device — takes the page's state bytes"""
    STATE_STORE = "state_store"
    """a page of state: device to home"""
    PAGE_GRADS = "page_grads"
    """the gradients of a page: home to device — takes the page's gradient bytes"""
    DUE = "due"
    """what was computed so far belongs to the update of a unit"""
    UPDATE = "update"
    """the optimizer runs on one page"""
    UPDATED = "updated"
    """what comes next is behind the whole update of a unit; the gradients that it took are let go"""
    PAGE_DROP = "page_drop"
    """a slot that a page passed through is given up — gives all its bytes back"""
    GATHER = "gather"
    """weights: every rank's share of them to all ranks"""
    REDUCE = "reduce"
    """the gradients of a unit: summed over ranks, each rank keeps its share"""


class Lane(StrEnum):
    """Who runs an op. Every lane keeps its own order; lanes run side by side."""

    COMPUTE = "compute"
    UP = "up"
    DOWN = "down"
    UPDATE = "update"
    PAGES = "pages"
    """Whole units, to whoever passes their pages through the ring: up, updated, and down; or updates them where they
    live."""
    CORES = "cores"
    """Pages that the host's cores update where they live: on no list of ops, for who takes them is decided as they
    pass."""
    READ = "read"
    WRITE = "write"
    COMM = "comm"


class Key(NamedTuple):
    kind: Kind
    unit: int
    item: int = -1


@dataclass(frozen=True, slots=True)
class Op:
    kind: Kind
    lane: Lane
    unit: int
    item: int = -1
    """The page or the parameter; -1: the whole unit."""
    nbytes: int = 0
    waits: tuple[Key, ...] = ()
    slot: int = -1
    """The slot of the ring, for what passes through it; -1: none."""
    done: tuple[Key, ...] = ()
    """What must be over before this is even handed out. See Note [Never far ahead]."""
    free: bool = False
    """Whether it need not come behind what the compute lane was given so far."""

    @property
    def key(self) -> Key:
        return Key(self.kind, self.unit, self.item)

    @property
    def page(self) -> tuple[int, int]:
        return self.unit, self.item


@dataclass(frozen=True, slots=True)
class Need:
    """These units must be usable now, all of them at once."""

    units: tuple[int, ...]
    phase: Phase = "train"
    held: frozenset[int] = frozenset()
    """Units that must not leave now: somebody holds views of them, or a caller further up uses them."""
    ahead: bool = True
    """Whether what is expected next may be fetched, too."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What became of a use: `pin` keeps the units on the device until the end of the step (a graph that we do not
    see may use them), `written` says that their bytes may have changed and must be written home."""

    units: tuple[int, ...]
    pin: bool = False
    written: bool = False


@dataclass(frozen=True, slots=True)
class Grad:
    """A gradient arrived. `first`: nothing was there to be added to. `reduced`: it is to be averaged over ranks before
    it counts, when the unit's others are there too."""

    unit: int
    param: int
    first: bool
    reduced: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """The optimizer stepped: these units have an update due. `held` as in Need: what must stay pinned."""

    due: frozenset[int]
    held: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Due:
    """All gradients of these units are there, and the step will take them as they are: their updates may begin."""

    units: frozenset[int]


@dataclass(frozen=True, slots=True)
class Settle:
    """Do the pending updates of these units now and bring what changed home; None: of all units. `held` as in Need."""

    units: tuple[int, ...] | None = None
    held: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Begin:
    """A forward pass of the whole model begins; in the eval phase the expected order starts anew."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class Join:
    """Other ranks gather this unit's weights, or reduce its gradients, or want to see this rank's share of its weights
    (FETCH): take part in it, with what is there."""

    kind: Kind
    unit: int
    held: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Flush:
    """A backward pass is over: reduce the gradients of one unit that waits for others that did not come."""

    forget: bool = False
    """Whether the backward pass was interrupted: nothing of it is reduced any more."""


Event = Need | Mark | Grad | Due | Step | Settle | Begin | Join | Flush


@dataclass(frozen=True, slots=True)
class Program:
    """What the function needs to know and that never changes while it runs."""

    model: ModelSpec
    placements: tuple[Placement, ...]
    limits: Limits
    eager: bool = False
    """Whether updates are due in backward, unit by unit, and not all with the step."""
    piped: bool = False
    """Whether there is somebody who takes whole units and passes their pages through the ring: see Lane.PAGES."""

    def away(self, unit: int) -> bool:
        """Whether the unit's weights are on the device only while they are used: they, or most of them, live
        elsewhere."""
        return self.placements[unit].weight != "device" or self.model.sharding.split("weight")

    def has(self, state: "State", unit: int) -> bool:
        """Whether the unit's weights are on the device, or on their way there."""
        return not self.away(unit) or unit in state.here

    @property
    def gathers(self) -> bool:
        """Whether an update leaves every rank with its own share of the new weights."""
        return self.model.sharding.split("state")

    @property
    def update_lane(self) -> Lane:
        """The lane of updates: ours has one of its own; the user's optimizer works on the user's own
        objects, so in the user's turn."""
        return Lane.UPDATE if self.model.format.fields is not None else Lane.COMPUTE

    def passes(self, unit: int) -> bool:
        """Whether pages of the unit pass through the ring."""
        return self.placements[unit].state != "device" or self.placements[unit].grad != "device"

    @property
    def pipeable(self) -> bool:
        """Whether pages may pass through the ring by a thread of their own: by our kernels, and not from a disk, where
        each is waited for."""
        from_disk = any("nvme" in (p.state, p.grad) for p in self.placements)
        passing = any(map(self.passes, range(len(self.placements))))
        return self.update_lane == Lane.UPDATE and not self.shares_room and passing and not from_disk

    @property
    def shares_room(self) -> bool:
        """Whether pages give their room up to gradients on their way home. See Note [Passing bytes]."""
        return self.limits.depth == 1


@dataclass(frozen=True)
class State:
    """What the function remembers from one event to the next."""

    # Not with slots: every event makes new ones, and copying a dictionary is the fastest way to do so.

    here: tuple[int, ...] = ()
    """Units away from home whose weights are (or are on their way to) the device, least recently needed first."""
    pinned: frozenset[int] = frozenset()
    changed: frozenset[int] = frozenset()
    """Units whose device bytes are newer than their home."""
    pending: frozenset[int] = frozenset()
    """Units with an update that is due and that the compute lane is not behind."""
    begun: frozenset[int] = frozenset()
    """Units with a pending update that was handed out."""
    early: frozenset[int] = frozenset()
    """Units whose updates were due in the backward passes since the last step."""
    staged: tuple[tuple[int, int], ...] = ()
    """(unit, page) that have slots of the ring, for an update or on their way home, the oldest first."""
    ready: frozenset[tuple[int, int]] = frozenset()
    """Staged pages that wait for their update."""
    turn: int = 0
    """How many pages were staged so far: they take the ring's slots in turn."""
    training: bool = False
    """Whether a forward pass has begun since all was brought home: pages may be fetched for the next step."""
    consuming: tuple[int, ...] = ()
    """Units whose updates have begun in this backward pass and still have their gradients, the oldest first, where
    those are not kept. See Note [Consumed gradients]."""
    leaving: tuple[tuple[int, int], ...] = ()
    """(unit, param) of gradients on their way home."""
    gathered: frozenset[int] = frozenset()
    """Units whose weights, wherever they are, are whole: those of the others are as new as this rank's own."""
    arrived: dict[int, tuple[tuple[int, bool], ...]] = field(default_factory=dict)
    """Unit -> (param, first) of gradients that wait to be reduced."""
    expected: dict[Phase, tuple[int, ...]] = field(default_factory=dict)
    seen: dict[Phase, tuple[int, ...]] = field(default_factory=dict)
    phase: Phase = "train"
    cursor: int = 0

    def but(self, **changes: Any) -> "State":
        """The same state with these changes."""
        new = object.__new__(State)
        new.__dict__.update(self.__dict__)
        new.__dict__.update(changes)
        return new
