"""Where the bytes of gradients are, and what they say.

Note [Unplanned width]: a plan for one micro-batch has room for narrow gradients. A loop that accumulates all the same
gets wide homes when the first sum needs one, where the budgets allow it; else it is refused and told what to say. That
happens before anything is changed: what is refused in the midst of an op leaves an engine that cannot go on. What the
user puts into `p.grad` may be wide, too.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from overspill.program import Key, Kind
from overspill.runtime.collect import Collector
from overspill.runtime.executor import Executor
from overspill.runtime.generation import Generation, as_bytes, check_bytes, full_dtype
from overspill.runtime.norms import Norms
from overspill.runtime.pages import Home
from overspill.runtime.ranks import Meeting
from overspill.specs import Span

log = logging.getLogger("overspill")


class Wider(Protocol):
    """Has room for wide gradients, or takes it. See Note [Unplanned width]."""

    def make_ready(self, unit: int) -> None:
        """Take it, for this unit's and others; refused where the budgets have none."""

    def home(self, unit: int, param: int) -> Home | None:
        """Of a wide gradient; None where gradients live on the device."""


Homes = Sequence[Home]
"""The homes of a gradient: none where it lives on the device; two where one is kept beside the next."""


class Widths:
    """Which gradients are wider than planned. See Note [Unplanned width]."""

    def __init__(self, wider: Wider) -> None:
        self._wider = wider
        self.widened: set[tuple[int, int]] = set()
        """Gradients that have homes all the same."""

    def make_ready(self, generation: Generation, span: Span | None) -> None:
        """Before anything is changed: it will be wide; with a span, that much of it."""
        if self.outgrows(generation, span):
            self._wider.make_ready(generation.unit)

    def outgrows(self, generation: Generation, span: Span | None) -> bool:
        """Whether it is larger than its home, if it is wide."""
        spec = generation.spec
        nbytes = (spec.numel if span is None else span.room) * full_dtype(spec).itemsize
        return (generation.unit, generation.param) not in self.widened and nbytes > spec.grad_bytes

    def home(self, unit: int, param: int) -> Home | None:
        """Of one that is wide from now on."""
        home = self._wider.home(unit, param)
        self.widened.add((unit, param))
        return home


class GradientBytes:
    """`homes[unit][param]`."""

    def __init__(
        self, homes: Sequence[Sequence[Homes]], wider: Wider, executor: Executor, collector: Collector | None
    ) -> None:
        every = {(u, i): each for u, row in enumerate(homes) for i, each in enumerate(row)}
        self._homes: dict[tuple[int, int], Home | None] = {
            key: each[0] if each else None for key, each in every.items()
        }
        self._others = {key: each[1] for key, each in every.items() if len(each) > 1}
        """Where the next gradient lives while this one is kept."""
        self._left: dict[tuple[int, int], tuple[Home | None, bool]] = {}
        """Homes of gradients that moved in, and whether they are wide."""
        self.widths = Widths(wider)
        self._executor = executor
        self._collector = collector
        self._device = executor.lanes.device
        self.current: Callable[[], list[Generation]] = list
        """The gradients that are in `p.grad` now."""
        self._owner: dict[tuple[int, int], weakref.ref[Generation]] = {}
        """Whose bytes are, or will be, in the home that the next gradient takes."""
        self._other_owner: dict[tuple[int, int], weakref.ref[Generation]] = {}
        """Whose bytes are in the other one, if there is one."""
        self.norms = Norms(self, executor, collector)

    def home(self, unit: int, param: int) -> Home | None:
        return self._homes[unit, param]

    def home_of(self, generation: Generation) -> Home | None:
        """Of its own bytes."""
        found: Home | None = generation.home
        return self._homes[generation.unit, generation.param] if found is None else found

    def keep(self, generation: Generation) -> None:
        """A step took it that is applied later: the next one gets another home."""
        key = (generation.unit, generation.param)
        home = self._homes[key]
        if home is None or key not in self._others or not self.is_at(generation):
            return
        if self.home_of(generation) is not home:
            # It was kept before, and nothing was added to it since.
            return
        generation.home, self._homes[key], self._others[key] = home, self._others[key], home
        owner, self._other_owner[key] = self._other_owner.pop(key, None), self._owner.pop(key)
        if owner is not None:
            self._owner[key] = owner

    def move_home(self, generation: Generation) -> None:
        """What was kept lives where the next one would: something was added to it."""
        key = (generation.unit, generation.param)
        if generation.home is not None:
            generation.home = None
            if key in self._other_owner and self._other_owner[key]() is generation:
                del self._other_owner[key]
            self.claim(generation)

    def move_in(self, unit: int) -> None:
        """A unit's gradients live on the device from now on. None of them has bytes, but older ones that somebody
        still looks at, and those that a step keeps for later."""
        for key in self._homes:
            if key[0] == unit:
                self._keep_former(key, None)
                kept = self._other_owner.pop(key)() if key in self._other_owner else None
                if kept is not None and kept.home is not None and kept.value is None:
                    kept.value, kept.home = self._load(kept), None
                self._left[key] = (self._homes[key], key in self.widths.widened)
                self._homes[key] = None
                self._owner.pop(key, None)

    def move_out(self, unit: int) -> None:
        """They live where they lived before. None of them has bytes."""
        for key in self._homes:
            if key[0] == unit:
                self._homes[key], wide = self._left.pop(key)
                (self.widths.widened.add if wide else self.widths.widened.discard)(key)

    def read(self, generation: Generation) -> Tensor:
        """The gradient's current value. May be its own bytes: do not write to it and do not hand it out."""
        if generation.span is None:
            return self.share(generation)
        assert self._collector is not None, "what is divided is collected"
        spec = generation.spec
        place = (generation.unit, generation.param)
        flat = self._collector.whole(Meeting.GRADIENT, place, own=lambda: self.share(generation))
        return flat.as_strided(spec.shape, spec.stride)

    def share(self, generation: Generation) -> Tensor:
        """What this rank has of the gradient's current value."""
        if generation.zero:
            value = generation.empty(self._device).zero_()
        else:
            value = generation.widened(self.at_hand(generation))
        if not generation.todo:
            return value
        if value is generation.value:
            value = generation.empty(value.device).copy_(value)
        for change in generation.todo:
            change.on(value, generation.span)
        return value

    def at_hand(self, generation: Generation) -> Tensor:
        """Its bytes on the device, without the changes that wait for them."""
        check_bytes(generation)
        value = generation.value
        if value is None:
            return self._load(generation)
        self._executor.wait(Key(Kind.REDUCE, generation.unit))
        return value.to(self._device)

    def make_room(self, generation: Generation) -> None:
        """See Note [Unplanned width]."""
        key = (generation.unit, generation.param)
        if generation.narrow or not self.widths.outgrows(generation, generation.span):
            return
        self._homes[key] = self.widths.home(*key)
        self._others.pop(key, None)

    def claim(self, generation: Generation) -> None:
        """The slot is this generation's now. If somebody still looks at an older one, it gets bytes of its own."""
        key = (generation.unit, generation.param)
        if self.home(*key) is None:
            return
        self._keep_former(key, generation)
        self._owner[key] = weakref.ref(generation)

    def _keep_former(self, key: tuple[int, int], generation: Generation | None) -> None:
        """The slot of a gradient is another one's now, or nobody's."""
        former = self._owner[key]() if key in self._owner else None
        if former is not None and former is not generation and not former.zero and former.value is None:
            former.value, former.home = self._load(former).to("cpu"), None
            log.info("an old gradient of %s is still referred to: kept a copy in host memory", former.spec.name)

    def is_at(self, generation: Generation) -> bool:
        """Whether its bytes are at home, or on their way there."""
        owner = self._owner.get((generation.unit, generation.param))
        return generation.home is not None or (owner is not None and owner() is generation)

    def _load(self, generation: Generation) -> Tensor:
        home = self.home_of(generation)
        assert home is not None, f"the gradient of {generation.spec.name} has no bytes"
        self._executor.wait(Key(Kind.GRAD_STORE, generation.unit, generation.param))
        value = generation.empty(self._device)
        home[0].load(home[1], as_bytes(value))
        return value
