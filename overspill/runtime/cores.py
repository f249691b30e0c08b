"""Pages that are updated where they live, by the host's own cores, while others pass through the ring.

Note [Two hands]: of a page that the cores update, only gradients and weights go down and new weights come up: with
exact states 6 bytes for each parameter instead of 20. Gradients that live in host memory are read where they are
(at_home.py): 4 bytes instead of 22. Where the cores are fast beside the link, both together are faster than either
(plan/hands.py, Note [Who updates]). Pages come up in the order in which they are needed, and the cores, which take
longer for each of them, take those that are needed last, until both meet; so nobody has to know beforehand how fast
each of them is. Where the link is very slow, the cores take all of them, in their order.

Weights and gradients go down between the pages that go home; a thread waits for what arrives, lets the cores work
(which takes the interpreter's lock from nobody), and sends the weights back, between the pages that come up.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from overspill.kernels import cpu
from overspill.program import Kind, Lane, Op
from overspill.runtime.at_home import ForCores, for_cores
from overspill.runtime.executor import Executor
from overspill.runtime.kernel_update import KernelUpdate
from overspill.runtime.lanes import Ticket
from overspill.runtime.passage import Passage
from overspill.runtime.ring import Page
from overspill.runtime.updates import OnHost, Share, Updates
from overspill.runtime.ways import When
from overspill.slots import CORES_STAGED, FACTORS_STAGED, cores_used, staged_bytes
from overspill.specs import Hands, align
from overspill.tiers import HostTier, Slot, cores_near, node_of, stay_on, workers

Done = Callable[[When, BaseException | None], None]
"""(when the weights are there, or None; what went wrong, if anything did)"""


@dataclass(frozen=True, slots=True)
class _Staged:
    """A part of a page whose weights and gradients are on the host for a while."""

    on: OnHost
    places: Sequence[Slot]
    """Of weights, gradients and factors in the staging memory; a gradient that lives on the host has none."""


@dataclass(frozen=True, slots=True)
class _Task:
    """A page on its way through the cores. Has no view of weights: the engine would take it for the user's."""

    page: Page
    room: int
    """Which part of the staging memory it has."""
    states: Tensor
    """uint8 [state_bytes], in host memory."""
    parts: Sequence[_Staged]
    arrived: When
    stored: When
    """When the page itself is home."""
    done: Done


class Cores:
    """Takes pages from one thread; see handing.py."""

    def __init__(self, executor: Executor, passage: Passage, updates: Updates, update: KernelUpdate) -> None:
        self._lanes, self._device = executor.lanes, executor.lanes.device
        how = cpu.How.best()
        assert how is not None, "there is no native library"
        self._how = cpu.How(how.instructions, cores_used(how.threads))
        self._executor, self._pages, self._updates, self._update = executor, passage.pages, updates, update
        # On the streams of pages: as long as copies are queued there, the GPU does not look at those of others.
        self._ways = passage.ways
        self._thread = workers(1, "overspill-cores")
        near = cores_near(self._device, self._how.threads)
        if near is not None:
            # Where the states are, and what is staged. The library's threads go where this one is.
            self._thread.submit(stay_on, near)
        nbytes = staged_bytes(executor.program.model)
        self._tier = HostTier(CORES_STAGED * nbytes, node=node_of(self._device))
        self._rooms = [self._tier.reserve(nbytes) for _ in range(CORES_STAGED)]
        if self._device.type == "cuda":
            self._tier.pin()
        self._free = deque(range(CORES_STAGED))
        self._leaving: deque[tuple[int, When]] = deque()
        """Parts of the staging memory whose weights are on their way up."""
        self._error: BaseException | None = None
        self.moved: Counter[Lane] = Counter({Lane.UP: 0, Lane.DOWN: 0})
        self.elements, self.seconds, self.waited = 0, 0.0, 0.0
        """What the cores did so far, how long they took for it, and how long they waited for what arrives."""

    @property
    def busy(self) -> bool:
        if self._error is not None:
            raise RuntimeError("the cores stopped") from self._error
        return len(self._free) < CORES_STAGED

    @property
    def hands(self) -> Hands:
        """Who updates, by the plan that is in force."""
        return self._executor.program.limits.hands

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._tier.close()

    def has_room(self) -> bool:
        """Whether the cores could take one more page."""
        while self._leaving and (self._leaving[0][1] is None or self._leaving[0][1].query()):
            self._free.append(self._leaving.popleft()[0])
        return bool(self._free)

    def suits(self, page: Page) -> bool:
        """Whether the cores could update it, as far as one can tell by where it is."""
        placement, home = self._executor.program.placements[page[0]], self._pages.home(*page)
        filled = home is not None and isinstance(home[0], HostTier) and page in self._pages.filled
        return filled and placement.grad != "nvme"

    def take(self, page: Page, waits: Sequence[Ticket], stored: When, done: Done) -> bool:
        """Update a page and call `done` when its weights are on their way up; False: it is not for the cores."""
        shares, home, room = self._updates.shares(*page), self._pages.home(*page), self._free[0]
        assert home is not None and isinstance(home[0], HostTier), "the page lives in host memory"
        kept = [for_cores(share, self._updates.grads.bytes, self._device) for share in shares]
        known = [found for found in kept if found is not None]
        suits = all(share.skip is None and self._update.suits_cores(page[0], share.part) for share in shares)
        if not shares or not suits or len(known) < len(kept):
            return False
        states = home[0].tensor(home[1])
        parts = self._staged(shares, known, self._rooms[room])
        self._free.popleft()

        def down() -> None:
            for part, of in zip(parts, known, strict=True):
                gradients = () if of.at_home else (of.gradient,)
                sources = (self._update.weight(page[0], part.on.share.part), *gradients, *of.factors)
                for place, source in zip(part.places, sources, strict=True):
                    self._tier.store(place, source.reshape(-1).view(torch.uint8))

        nbytes = sum(place.nbytes for part in parts for place in part.places)
        self.moved[Lane.DOWN] += nbytes
        self.moved[Lane.UP] += sum(part.places[0].nbytes for part in parts)
        with self._executor.views:
            op = Op(Kind.PAGE_GRADS, Lane.DOWN, *page, nbytes)
            self._ways.let_others_in()
            arrived = self._ways.put(op, down, [ticket.event() for ticket in waits], self._tier.by_driver)
        self._thread.submit(self._run, _Task(page, room, states, parts, arrived, stored, done))
        return True

    def _staged(self, shares: Sequence[Share], kept: Sequence[ForCores], room: Slot) -> list[_Staged]:
        """Where each share's weights, gradients and factors lie in the staging memory, one after the other."""
        found, at = [], 0
        for share, of in zip(shares, kept, strict=True):
            gradients = () if of.at_home else (of.gradient,)
            arrays = [(share.part.numel, share.due.generation.spec.dtype), *((g.numel(), g.dtype) for g in gradients)]
            places = []
            for count, dtype in arrays:
                places.append(room.piece(at, count * dtype.itemsize))
                at += align(count * dtype.itemsize)
            places += [room.piece(at + 8 * i, factor.nbytes) for i, factor in enumerate(of.factors)]
            at += FACTORS_STAGED
            dtypes = [*(dtype for _, dtype in arrays), *(factor.dtype for factor in of.factors)]
            views = [self._tier.tensor(place).view(dtype) for place, dtype in zip(places, dtypes, strict=True)]
            gradient = of.gradient if of.at_home else views[1]
            found.append(_Staged(OnHost(share, views[0], gradient, views[len(arrays) :]), places))
        return found

    # --- the thread

    def _run(self, task: _Task) -> None:
        up, failed = None, None
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            begin = time.perf_counter()
            for event in (task.arrived, task.stored):
                if event is not None:
                    event.synchronize()
            arrived = time.perf_counter()
            op = Op(Kind.UPDATE, Lane.CORES, *task.page, task.states.nbytes)
            parts = [part.on for part in task.parts]
            self._lanes.timed(op.lane, op, lambda: self._update.run_on_host(task.page, parts, task.states, self._how))
            self.waited += arrived - begin
            self.seconds += time.perf_counter() - arrived
            self.elements += sum(part.on.weight.numel() for part in task.parts)
            with self._executor.views:
                up = self._send_up(task)
        except BaseException as error:
            self._error = failed = error
            raise
        finally:
            self._leaving.append((task.room, up))
            task.done(up, failed)

    def _send_up(self, task: _Task) -> When:
        def up() -> None:
            for part in task.parts:
                to = self._update.weight(task.page[0], part.on.share.part)
                self._tier.load(part.places[0], to.view(torch.uint8))

        nbytes = sum(part.places[0].nbytes for part in task.parts)
        return self._ways.put(Op(Kind.UPDATE, Lane.UP, *task.page, nbytes), up, (), self._tier.by_driver)


def there_are() -> bool:
    """Whether the cores can update at all."""
    return cpu.How.best() is not None
