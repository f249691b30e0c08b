"""Updates that are due: which gradients and hyperparameters each took at `step()`, and the ops that carry them out.

Who does the arithmetic is a value: the user's own optimizer on whole parameters (own_update.py), or one of our rules on
pieces of flat memory (kernel_update.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from overspill.program import Kind, Op
from overspill.runtime.executor import Handler
from overspill.runtime.generation import Generation, full_dtype
from overspill.runtime.gradients import Gradients
from overspill.runtime.lanes import Work, nothing
from overspill.runtime.masters import Masters
from overspill.runtime.pages import Home, Pages
from overspill.runtime.rooms import before_it_goes
from overspill.runtime.scaling import Verdict
from overspill.specs import PartSpec, align

MOST_FACTORS = 2
"""An undone loss scale and a clip factor."""
AsKept = tuple[Tensor, Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class Taken:
    """One parameter's part of a step: the generation it took and how many of its changes count."""

    param: int
    generation: Generation
    changes: int


@dataclass(frozen=True, slots=True)
class Job:
    """What one parameter group asked of one unit at `step()`."""

    hypers: Mapping[str, Any]
    due: tuple[Taken, ...]
    verdict: Verdict | None = None
    """Under fp16: whether it is to be done at all, where the device alone knows that yet."""

    @property
    def skip(self) -> Tensor | None:
        return None if self.verdict is None else self.verdict.skip


@dataclass(frozen=True, slots=True)
class Share:
    """What an update of a page has to do for one part of it."""

    hypers: Mapping[str, Any]
    due: Taken
    part: PartSpec
    staged: Tensor | None
    """The part's gradient, flat, where that does not live on the device: as its bytes were kept."""
    device: torch.device
    skip: Tensor | None = None
    """fp32 [] on the device: 1.0 where nothing is to be done. See scaling.py, Note [Skipped on the device]."""

    def piece(self, begin: int, end: int) -> Tensor:
        """Elements of the part's gradient as they count, with the changes made before `step()`: new memory, flat."""
        generation, first = self.due.generation, self.part.begin
        if generation.zero:
            piece = torch.zeros(end - begin, dtype=full_dtype(generation.spec), device=self.device)
        else:
            own = self.staged is None
            source = self._own(first + begin, first + end) if own else self.staged[begin:end]  # type: ignore[index]
            piece = generation.widened(source)
            piece = piece.clone() if piece is source else piece
        for change in generation.waiting(self.due.changes):
            change.on_piece(piece, first + begin)
        return piece

    def as_kept(self) -> AsKept | None:
        """The part's gradient as its bytes are, and the numbers on the device that it is to be multiplied with; None:
        it takes more than that."""
        known = self.factors()
        if known is None:
            return None
        return (self._own(self.part.begin, self.part.end) if self.staged is None else self.staged), known

    def factors(self) -> Sequence[Tensor] | None:
        """What the gradient's bytes are to be multiplied with; None: it takes more than that."""
        generation = self.due.generation
        factors = [change.factor for change in generation.waiting(self.due.changes)]
        if generation.narrow and generation.factor is not None:
            factors.insert(0, generation.factor)
        if generation.zero or len(factors) > MOST_FACTORS:
            return None
        known = tuple(f for f in factors if f is not None and f.device == self.device)
        return known if len(known) == len(factors) else None

    def address(self) -> int:
        """Where the gradient's bytes are."""
        return self.due.generation.address(self.part.begin) if self.staged is None else self.staged.data_ptr()

    def whole(self) -> Tensor:
        """The part's gradient, of the shape of the parameter if the part is all of it; the bytes in `p.grad`
        themselves, where they count as they are."""
        generation, changes, spec = self.due.generation, self.due.changes, self.due.generation.spec
        entire = self.part.numel == spec.numel
        if entire and generation.span is None and self.staged is None and not generation.zero and not generation.narrow:
            assert generation.value is not None, f"the gradient of {spec.name} is not on the device"
            waiting = generation.waiting(changes)
            for change in waiting:
                change.on(generation.value, None)
            del generation.todo[: len(waiting)]
            generation.made += len(waiting)
            return generation.value
        piece = self.piece(0, self.part.numel)
        return piece.as_strided(spec.shape, spec.stride) if entire else piece

    def _own(self, begin: int, end: int) -> Tensor:
        value = self.due.generation.value
        assert value is not None, f"the gradient of {self.due.generation.spec.name} is not on the device"
        return self.due.generation.part(value, begin, end)


@dataclass(frozen=True, slots=True)
class OnHost:
    """A share whose arrays are in host memory."""

    share: Share
    weight: Tensor
    gradient: Tensor
    factors: Sequence[Tensor]


class Update(Protocol):
    """Who does the arithmetic of updates, and knows the optimizer's states."""

    fields: tuple[str, ...] | None
    """The only tensors that a state can have; None: any."""

    def check_step(self, hypers: Mapping[str, Any]) -> None:
        """Refuse hyperparameters with which an update would be refused in the middle of others."""

    def due(self, unit: int, params: Sequence[int], count: int = 1) -> None:
        """A step was taken for these parameters; -1: the last one was not."""

    def run(self, unit: int, page: int, shares: Sequence[Share]) -> None:
        """Update one page; on the current stream everything is on the device."""

    def outline(self, unit: int, param: int) -> dict[str, Any]:
        """A parameter's state as torch has it, but tensors of several elements are on the meta device."""

    def read(self, unit: int, param: int, keys: Sequence[str] | None = None) -> dict[str, Any]:
        """Copies of a parameter's state, as torch has it, or of some of it."""

    def check(self, unit: int, param: int, state: Mapping[str, Any]) -> None:
        """Refuse a parameter's state that cannot be written; of its tensors only the forms count."""

    def write(self, unit: int, values: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace the states of a unit's parameters (index -> state); an empty state forgets it."""


def snapshot(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters as they are now; schedulers change them, a tensor learning rate even in place."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}


def as_text(group: Mapping[str, Any]) -> dict[str, str]:
    """A group's hyperparameters, to compare with those of other ranks: numbers and words. Not what is on a GPU: the
    host would wait for it."""
    found = {k: v.tolist() if isinstance(v, Tensor) and v.device.type == "cpu" else v for k, v in group.items()}
    return {k: repr(v) for k, v in found.items() if k not in ("params", "param_names") and _is_plain(v)}


def _is_plain(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, int | float | str)
        or (isinstance(value, tuple | list) and all(map(_is_plain, value)))
    )


def same_values(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two snapshots are alike."""
    return one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


class Updates:
    """Pending updates of all units, and the ops that carry them out."""

    def __init__(self, update: Update, grads: Gradients, pages: Pages, masters: Masters) -> None:
        self._update = update
        self.grads = grads
        self._pages = pages
        self._masters = masters
        self._pending: dict[int, tuple[Job, ...]] = {}
        self._staged: dict[tuple[int, int], dict[tuple[int, int], Tensor]] = {}
        """(unit, page) -> (parameter, first element) -> gradients that are there for an update."""
        self._consumes = grads.consumes
        self._by_param: dict[tuple[int, int], dict[int, list[PartSpec]]] = {}

    def handlers(self) -> dict[Kind, Handler]:
        return {
            Kind.DUE: lambda op: nothing,
            Kind.PAGE_GRADS: self._fetch,
            Kind.UPDATE: self._run,
            Kind.UPDATED: self._let_go,
            Kind.PAGE_DROP: self._drop,
        }

    def put(self, unit: int, jobs: tuple[Job, ...]) -> None:
        assert unit not in self._pending, "an older update of the unit must be drained before the next is due"
        if self._pages.model.units[unit].pages:
            self._pending[unit] = jobs
        due = [d.param for job in jobs for d in job.due]
        # Weights saved for a backward are out of date from now on, and autograd shall say so, as after a plain step.
        self._masters.edits.due([(unit, param) for param in due])
        self._count(unit, due, jobs[0].verdict if jobs else None)

    def _count(self, unit: int, due: list[int], verdict: Verdict | None) -> None:
        """A step was taken for these parameters, unless the verdict says otherwise, now or later."""
        self._update.due(unit, due)
        if verdict is not None and verdict.skipped is None:
            verdict.counted.append(lambda: self._update.due(unit, due, -1))
        elif verdict is not None and verdict.skipped:
            self._update.due(unit, due, -1)

    def shares(self, unit: int, page: int) -> list[Share]:
        """What an update of a page has to do."""
        parts = self._parts(unit, page)
        staged = self._staged.get((unit, page), {})
        return [
            Share(job.hypers, due, part, staged.get((part.param, part.begin)), self._pages.device, job.skip)
            for job in self._pending.get(unit, ())
            for due in job.due
            for part in parts.get(due.param, ())
        ]

    def _parts(self, unit: int, page: int) -> dict[int, list[PartSpec]]:
        """By parameter."""
        if (unit, page) not in self._by_param:
            found = self._by_param[unit, page] = {}
            for part in self._pages.spec(unit, page).parts:
                found.setdefault(part.param, []).append(part)
        return self._by_param[unit, page]

    def reads_device(self, unit: int) -> bool:
        """Whether the host reads numbers of the device for an update: a hyperparameter, or whether weights were
        edited."""
        known = (v for job in self._pending.get(unit, ()) for v in job.hypers.values())
        on_device = any(isinstance(v, Tensor) and v.device.type != "cpu" for v in known)
        return on_device or self._masters.edits.watches(unit)

    def _fetch(self, op: Op) -> Work:
        self._pages.enter(op.slot, (op.unit, op.item))
        return self.fetch_gradients((op.unit, op.item))

    def fetch_gradients(self, key: tuple[int, int]) -> Work:
        """Bring a page's gradients into its slot. What is on the device already may be wider than planned: it is read
        where it is."""
        staged: dict[tuple[int, int], Tensor] = {}
        loads: list[Work] = []
        slot, at = self._pages.ring.memory(key), self._pages.passing_bytes(*key)

        def load() -> None:
            self._pages.ring.wait(key)
            for each in loads:
                each()

        for share in self.shares(*key):
            if self._is_at_hand(share.due.generation):
                continue
            dtype = share.due.generation.dtype
            nbytes = share.part.numel * dtype.itemsize
            value = slot[at : at + nbytes].view(dtype)
            at += align(nbytes)
            staged[share.part.param, share.part.begin] = value
            loads.append(self._load(share.due.generation, share.part, value))
        self._staged[key] = staged
        return load

    def _is_at_hand(self, generation: Generation) -> bool:
        here = generation.value
        on_device = here is not None and here.device == self._pages.device
        return generation.zero or (on_device and not self.grads.bytes.is_at(generation))

    def _load(self, generation: Generation, part: PartSpec, value: Tensor) -> Work:
        home = self.grads.bytes.home_of(generation)
        here = generation.value
        if here is not None and (home is None or not self.grads.bytes.is_at(generation)):
            return lambda: _copy(value, generation.part(here, part.begin, part.end))
        assert home is not None, f"the gradient of {generation.spec.name} has no bytes"
        tier, slot = place_at(home, generation, part)
        return lambda: tier.load(slot, value.view(torch.uint8))

    def _run(self, op: Op) -> Work:
        def run() -> None:
            pages = range(len(self._pages.model.units[op.unit].pages)) if op.item < 0 else (op.item,)
            for page in pages:
                self.run_page(op.unit, page)

        return run

    def run_page(self, unit: int, page: int) -> None:
        """Update a page; on the current stream everything is on the device."""
        shares = self.shares(unit, page)
        if shares:
            self._update.run(unit, page, shares)
        self._staged.pop((unit, page), None)

    def _let_go(self, op: Op) -> Work:
        """The compute lane is behind the update, so the gradients' memory may be used for something else."""

        def let_go() -> None:
            for taken in (taken for job in self._pending.pop(op.unit, ()) for taken in job.due):
                if taken.generation.value is not None:
                    before_it_goes(taken.generation.value)
                if self._consumes:
                    taken.generation.consume()

        return let_go

    def _drop(self, op: Op) -> Work:
        def drop() -> None:
            self._pages.drop(op.unit, op.item)

        return drop


def place_at(home: Home, generation: Generation, part: PartSpec) -> Home:
    """Where a part of a gradient is in its home."""
    at = part.begin if generation.span is None else generation.span.locate(part.begin)
    item = generation.dtype.itemsize
    return home[0], home[1].piece(at * item, part.numel * item)


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source)
