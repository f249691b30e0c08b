"""Gradients: generations of bytes, in their homes.

Note [Generations]: `step()` takes a *generation* of a parameter's gradient, and its update may run much later. What
the user does to `p.grad` meanwhile (zero it, drop it, scale it) must not reach that update. So `p.grad` is a light
handle (handle.py) on a generation; changes in place are written down in `todo` and applied when the bytes are on the
device, in order, exactly as torch would have applied them; `step()` remembers how many of them were written down.

Note [Lent gradients]: a view of a gradient (`p.grad[0]`, `p.grad.view(-1)`) may be written to unseen. So whoever asks
for one gets the bytes themselves: the gradient moves to the device and stays there while views of it are held.
Changes reach it at once, and `step()` takes a copy.
"""

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from overspill.errors import ModelError
from overspill.program import Grad, Key, Kind, Op
from overspill.runtime.executor import Executor, Handler
from overspill.runtime.lanes import Work
from overspill.specs import ParamSpec, TierName
from overspill.tiers import Slot, Tier
from overspill.units.unit import Unit

log = logging.getLogger("overspill")

Change = Callable[[Tensor], object]


class Generation:
    """One gradient of one parameter. Its bytes are in `value`, or in the parameter's slot, or (`zero`) nowhere."""

    def __init__(self, unit: int, param: int, spec: ParamSpec, value: Tensor | None) -> None:
        self.unit = unit
        self.param = param
        self.spec = spec
        self.value = value
        self.zero = value is None
        self.todo: list[Change] = []
        self.norms: dict[float, Tensor] = {}
        self.lent = False
        """See Note [Lent gradients]."""

    def change(self, change: Change) -> None:
        self.norms.clear()
        if self.lent:
            change(self.value)  # type: ignore[arg-type]
        else:
            self.todo.append(change)

    @property
    def viewed(self) -> bool:
        """Whether somebody holds a view of a lent gradient, or a NumPy array of it."""
        return self.value is not None and torch._C._storage_Use_Count(self.value.untyped_storage()._cdata) > 2

    def taken(self) -> "Generation":
        """What `step()` takes: a lent gradient may be written to before the update runs, so a copy of it."""
        if not self.lent or self.value is None:
            return self
        return Generation(self.unit, self.param, self.spec, self.empty(self.value.device).copy_(self.value))

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.spec.shape, self.spec.stride, dtype=self.spec.dtype, device=device)


def as_bytes(t: Tensor) -> Tensor:
    """A dense tensor's memory as flat uint8, in memory order."""
    return t.as_strided((t.numel(),), (1,)).view(torch.uint8)


def _add_to(generation: Generation, contribution: Change) -> None:
    total = generation.value
    assert total is not None, f"the gradient of {generation.spec.name} is not on the device"
    for change in generation.todo:
        change(total)
    generation.todo.clear()
    generation.norms.clear()
    contribution(total)


def _nothing() -> None: ...


def _norm_of(generation: Generation) -> Tensor:
    assert generation.value is not None, "a gradient is normed while it is on the device"
    return torch._foreach_norm([generation.value], 2.0)[0]


class Gradients:
    """All gradients of one model, and the ops on them. `slots[unit][param]` is None where they live on the device."""

    def __init__(
        self,
        units: Sequence[Unit],
        slots: Sequence[Sequence[Slot | None]],
        tiers: Mapping[TierName, Tier],
        executor: Executor,
    ) -> None:
        self._units = units
        self._slots = slots
        self._tiers = tiers
        self._executor = executor
        self._device = executor.lanes.device
        self._arriving: dict[tuple[int, int], Generation] = {}
        """The gradient that an event speaks of, until it is sent home."""
        self._leaving: dict[tuple[int, int], Generation] = {}
        """Gradients that were sent home and are still on the device."""
        self._coming: dict[tuple[int, int], Change] = {}
        self._owner: dict[tuple[int, int], weakref.ref[Generation]] = {}
        self._lent: weakref.WeakSet[Generation] = weakref.WeakSet()

    def handlers(self) -> dict[Kind, Handler]:
        return {
            Kind.GRAD_FETCH: self._fetch,
            Kind.GRAD_ADD: self._add,
            Kind.GRAD_NORM: self._norm,
            Kind.GRAD_STORE: self._store,
            Kind.GRAD_DROP: self._drop,
        }

    def home(self, unit: int, param: int) -> tuple[Tier, Slot] | None:
        slot = self._slots[unit][param]
        return None if slot is None else (self._tiers[slot.tier], slot)  # type: ignore[index]

    # --- what the hooks, the handle and the optimizer call

    def take(self, unit: int, param: int, value: Tensor) -> Generation:
        """A plain gradient becomes a generation and goes home."""
        spec = self._units[unit].spec.params[param]
        if value.layout is not torch.strided:
            raise ModelError(
                f"expected a dense gradient for {spec.name!r}, found {value.layout}; sparse gradients are not "
                "supported: set sparse=False on the module that makes them"
            )
        if self.home(unit, param) is not None and value.stride() != spec.stride:
            value = torch.empty_strided(spec.shape, spec.stride, dtype=value.dtype, device=value.device).copy_(value)
        generation = Generation(unit, param, spec, value)
        self._send_home(generation)
        return generation

    def _send_home(self, generation: Generation) -> None:
        if self.home(generation.unit, generation.param) is not None:
            self._claim(generation)
            self._arriving[generation.unit, generation.param] = generation
            self._executor(Grad(generation.unit, generation.param, first=True))

    def add(self, generation: Generation, value: Tensor, alpha: float = 1) -> None:
        """Another micro-batch contributes, or the user adds something."""
        unit, param = generation.unit, generation.param
        if generation.lent:
            generation.change(lambda total: total.add_(value, alpha=alpha))
            return
        if unit in self._executor.state.pending:
            # The update that is due takes the gradient as it was.
            kept = value.clone()
            generation.change(lambda total: total.add_(kept, alpha=alpha))
            return
        if generation.zero:
            generation.value, generation.zero = generation.empty(self._device).zero_(), False
            self._claim(generation)
        key, home = (unit, param), self.home(unit, param)

        def contribution(total: Tensor) -> None:
            total.add_(value, alpha=alpha)

        if home is not None and generation.value is not None and self._leaving.get(key) is not generation:
            # Its bytes are on the device though it lives elsewhere (it was zero): add, then send it home.
            generation.value = generation.value.to(self._device)
            _add_to(generation, contribution)
            self._send_home(generation)
            return
        self._arriving[key], self._coming[key] = generation, contribution
        self._executor(Grad(unit, param, first=False))

    def read(self, generation: Generation) -> Tensor:
        """The gradient's current value. May be its own bytes: do not write to it and do not hand it out."""
        value = generation.value
        if generation.zero:
            value = generation.empty(self._device).zero_()
        elif value is None:
            value = self._load(generation)
        value = value.to(self._device)
        if not generation.todo:
            return value
        if value is generation.value:
            value = generation.empty(value.device).copy_(value)
        for change in generation.todo:
            change(value)
        return value

    def lend(self, cell: list[Generation]) -> Tensor:
        """The own bytes of the gradient in this cell of a handle. See Note [Lent gradients]."""
        for other in list(self._lent):
            if other is not cell[0] and not other.viewed:
                other.lent = False
                other.norms.clear()
                self._lent.discard(other)
                self._send_home(other)
        old = cell[0]
        if not old.lent:
            # Always other bytes: an update that is due, or a lane that carries them home, may be using the old ones.
            cell[0] = Generation(old.unit, old.param, old.spec, old.empty(self._device).copy_(self.read(old)))
            cell[0].lent = True
            self._lent.add(cell[0])
        value = cell[0].value
        assert value is not None, f"the lent gradient of {old.spec.name} is not on the device"
        return value

    # --- ops

    def _fetch(self, op: Op) -> Work:
        generation = self._arriving[op.unit, op.item]
        home = self.home(op.unit, op.item)
        assert home is not None, "only a gradient that lives elsewhere is fetched"
        value = generation.empty(self._device)
        generation.value = value
        return lambda: home[0].load(home[1], as_bytes(value))

    def _add(self, op: Op) -> Work:
        key = (op.unit, op.item)
        generation, contribution = self._arriving[key], self._coming.pop(key)
        if self.home(*key) is None:
            del self._arriving[key]
        return lambda: _add_to(generation, contribution)

    def _norm(self, op: Op) -> Work:
        generation = self._arriving[op.unit, op.item]
        return lambda: generation.norms.__setitem__(2.0, _norm_of(generation))

    def _store(self, op: Op) -> Work:
        generation, home = self._arriving.pop((op.unit, op.item)), self.home(op.unit, op.item)
        self._leaving[op.unit, op.item], value = generation, generation.value
        assert value is not None and home is not None, "only a gradient that is here and lives elsewhere is stored"
        return lambda: home[0].store(home[1], as_bytes(value))

    def _drop(self, op: Op) -> Work:
        generation = self._leaving.pop((op.unit, op.item), None)
        return _nothing if generation is None else lambda: setattr(generation, "value", None)

    # --- slots

    def _claim(self, generation: Generation) -> None:
        """The slot is this generation's now. If somebody still looks at an older one, it gets bytes of its own."""
        key = (generation.unit, generation.param)
        if self.home(*key) is None:
            return
        former = self._owner[key]() if key in self._owner else None
        if former is not generation:
            # An older one that is still on the device keeps the bytes it has there, for whoever looks at it.
            self._leaving.pop(key, None)
        if former is not None and former is not generation and not former.zero and former.value is None:
            former.value = self._load(former).to("cpu")
            log.info("an old gradient of %s is still referred to: kept a copy in host memory", former.spec.name)
        self._owner[key] = weakref.ref(generation)

    def _load(self, generation: Generation) -> Tensor:
        home = self.home(generation.unit, generation.param)
        assert home is not None, f"the gradient of {generation.spec.name} has no bytes"
        self._executor.wait(Key(Kind.GRAD_STORE, generation.unit, generation.param))
        value = generation.empty(self._device)
        home[0].load(home[1], as_bytes(value))
        return value
