"""Gradients: generations of bytes (generation.py), in their homes.

Note [Lent gradients]: a view of a gradient (`p.grad[0]`, `p.grad.view(-1)`) may be written to unseen. So whoever asks
for one gets the bytes themselves: the gradient moves to the device and stays there while views of it are held.
Changes reach it at once, and `step()` takes a copy.
"""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from overspill.errors import ModelError, StateError
from overspill.program import Grad, Lane
from overspill.runtime.backward import in_backward
from overspill.runtime.coming import Coming
from overspill.runtime.executor import Executor
from overspill.runtime.generation import Change, Generation, check_change, full_dtype
from overspill.runtime.gradient_bytes import GradientBytes
from overspill.runtime.passing import Passing
from overspill.runtime.reduced import Reduced
from overspill.runtime.reduction import Reduction
from overspill.runtime.rooms import Rooms
from overspill.units.layout import NARROW
from overspill.units.unit import Unit


class Gradients:
    """All gradients of one model, and the ops on them."""

    def __init__(
        self, units: Sequence[Unit], bytes: GradientBytes, executor: Executor, reduction: Reduction | None
    ) -> None:
        self._units = units
        self.bytes = bytes
        self._executor = executor
        self._device = executor.lanes.device
        self.reduced = Reduced(self, reduction, executor) if reduction is not None else None
        """Over ranks."""
        self.passing = Passing(bytes, executor.lanes.device)
        if reduction is not None:
            self.passing.reduced = reduction.let_go
        self._lent: weakref.WeakSet[Generation] = weakref.WeakSet()
        ours = reduction is None and executor.program.update_lane == Lane.UPDATE
        self.rooms = Rooms(units, self._device) if ours else None
        self.consumes = executor.program.limits.consumed > 0
        """Whether gradients are let go when their update is done."""
        self._coming = Coming(self.rooms, units) if self.rooms is not None and not self.consumes else None
        self.factor: Tensor | None = None
        """What undoes the scale of the gradients that autograd makes now; None where they are not scaled."""

    # --- what the hooks, the handle and the optimizer call

    def arrive(self, unit: int, param: int, value: Tensor) -> Generation:
        """Autograd made the first gradient of a parameter."""
        if self.reduced is not None and self.reduced.synced():
            generation = Generation(unit, param, self._units[unit].spec.params[param], None, self.factor)
            self.reduced.put(generation, self._laid_out(unit, param, value), self.factor)
            return generation
        if self._coming is not None and self.factor is None and self.bytes.home(unit, param) is None:
            self._executor.lanes.use()
            generation = Generation(unit, param, self._units[unit].spec.params[param], value)
            if self._coming.add(generation, value):
                # As nearly always where gradients live on the device.
                return generation
        generation = self.take(unit, param, value, self.factor)
        generation.local = self.reduced is not None
        return generation

    def moved_in(self) -> None:
        """All that came are where they belong."""
        if self._coming is not None:
            self._coming.take()

    def take(self, unit: int, param: int, value: Tensor, factor: Tensor | None = None) -> Generation:
        """A plain gradient becomes a generation and goes home."""
        self._executor.lanes.use()
        spec = self._units[unit].spec.params[param]
        generation = Generation(unit, param, spec, value)
        if factor is None and value.layout is torch.strided and self._move_in(generation):
            # It is where it belongs.
            return generation
        value = self._laid_out(unit, param, value)
        if factor is not None and value.dtype == full_dtype(spec):
            value, factor = value * factor, None
        generation = Generation(unit, param, spec, value, factor)
        self._move_in(generation)
        self.send_home(generation)
        return generation

    def _move_in(self, generation: Generation) -> bool:
        """Whether it has a place beside the others of its unit now."""
        lives_here = self.bytes.home(generation.unit, generation.param) is None
        return self.rooms is not None and lives_here and self.rooms.move_in(generation)

    def _laid_out(self, unit: int, param: int, value: Tensor) -> Tensor:
        """In the dtype and, where it is used element by element, in the memory order of its parameter."""
        spec = self._units[unit].spec.params[param]
        if value.layout is not torch.strided:
            raise ModelError(
                f"expected a dense gradient for {spec.name!r}, found {value.layout}; sparse gradients are not "
                "supported: set sparse=False on the module that makes them"
            )
        dtype = value.dtype if value.dtype == spec.dtype else full_dtype(spec)
        by_element = self.bytes.home(unit, param) is not None or spec.dtype in NARROW or self.reduced is not None
        if value.dtype != dtype or (by_element and value.stride() != spec.stride):
            value = torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device=value.device).copy_(value)
        return value

    def claim(self, generation: Generation) -> None:
        key = (generation.unit, generation.param)
        if not generation.narrow:
            self.bytes.widths.make_ready(generation, generation.span)
        if self.passing.leaving.get(key) is not generation:
            # An older one that is still on the device keeps the bytes it has there, for whoever looks at it.
            self.passing.leaving.pop(key, None)
        self.bytes.claim(generation)
        self.bytes.make_room(generation)

    def send_home(self, generation: Generation) -> None:
        if self.reduced is not None:
            self.reduced.keep_share(generation)
        self.claim(generation)
        if self.bytes.home(generation.unit, generation.param) is not None:
            self.passing.expect(generation)
            self._executor(Grad(generation.unit, generation.param, first=True))

    def reduces(self) -> bool:
        """Whether what is added now comes from a backward pass and is to be averaged over ranks first."""
        return self.reduced is not None and self.reduced.synced() and in_backward()

    def add(self, generation: Generation, value: Tensor, alpha: float, made: bool) -> None:
        """Another micro-batch contributes (`made`), or the user adds something."""
        check_change(generation)
        generation.stepped = False
        unit, spec = generation.unit, generation.spec
        backward = in_backward()
        if self.reduced is not None and self.reduces():
            value = self._laid_out(unit, generation.param, value if made else value.to(full_dtype(spec)) * alpha)
            self.reduced.put(generation, value, self.factor if made else None)
            return
        if backward and self.reduced is not None and not generation.local:
            self._hold(generation)
        taken = generation.kept or unit in self._executor.state.pending
        if generation.zero and not generation.todo and not taken and made and spec.dtype in NARROW:
            # Nothing was there: a narrow contribution stays narrow.
            self._begin(generation, value)
            return
        if self.factor is not None and made:
            value = value.to(full_dtype(spec)) * self.factor
        if generation.lent or generation.span is not None or taken:
            # An update that is due takes the gradient as it was.
            generation.change(Change.of(lambda total, x: total.add_(x, alpha=alpha), (value,), spec))
            return
        self.contribute(generation, lambda total: total.add_(value, alpha=alpha))

    def _hold(self, generation: Generation) -> None:
        """A pass inside `no_sync`: what it makes stays on this rank for now."""
        if not generation.zero or generation.todo:
            raise StateError(
                "expected the backward passes inside no_sync() to come first, found one after a pass outside of it: "
                f"the gradient of {generation.spec.name!r} is averaged already; call step() and zero_grad() in between"
            )
        generation.local = True

    def take_back(self, generation: Generation) -> None:
        """Views of it show it no longer."""
        generation.lent = False
        self._lent.discard(generation)

    def contribute(self, generation: Generation, contribution: Callable[[Tensor], object]) -> None:
        unit, param = generation.unit, generation.param
        self.bytes.widths.make_ready(generation, generation.span)
        if generation.zero:
            generation.value, generation.zero = generation.empty(self._device).zero_(), False
            self.claim(generation)
        key, home = (unit, param), self.bytes.home(unit, param)
        if home is not None and generation.value is not None and self.passing.leaving.get(key) is not generation:
            # Its bytes are on the device though it lives elsewhere (it was zero): add, then send it home.
            generation.value = generation.value.to(self._device)
            generation.add(contribution)
            self.send_home(generation)
            return
        self.passing.expect(generation, contribution)
        self._executor(Grad(unit, param, first=False))

    def _begin(self, generation: Generation, value: Tensor) -> None:
        """A generation without bytes gets the first contribution of this backward pass."""
        factor = self.factor
        if factor is not None and value.dtype == full_dtype(generation.spec):
            value, factor = value * factor, None
        generation.value, generation.dtype = value, value.dtype
        generation.factor, generation.zero = factor, False
        if not self._move_in(generation):
            generation.value = generation.empty(self._device, value.dtype).copy_(value)
        generation.norms.clear()
        self.send_home(generation)

    def lend(self, cell: list[Generation]) -> Tensor:
        """The own bytes of the gradient in this cell of a handle. See Note [Lent gradients]."""
        for other in list(self._lent):
            if other is not cell[0] and not other.viewed:
                self.bytes.widths.make_ready(other, other.span)
                other.lent = False
                other.norms.clear()
                self._lent.discard(other)
                self.send_home(other)
        old = cell[0]
        if not old.lent:
            check_change(old)
            # Always other bytes: an update that is due, or a lane that carries them home, may be using the old ones.
            value = torch.empty_strided(
                old.spec.shape, old.spec.stride, dtype=full_dtype(old.spec), device=self._device
            ).copy_(self.bytes.read(old))
            cell[0] = Generation(old.unit, old.param, old.spec, value)
            cell[0].lent = True
            self._lent.add(cell[0])
        own = cell[0].value
        assert own is not None, f"the lent gradient of {old.spec.name} is not on the device"
        return own
