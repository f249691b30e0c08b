"""One prepared model: its parts, put together."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from overspill.errors import StateError
from overspill.program import Begin, Mark, Settle, Step
from overspill.runtime import hooks
from overspill.runtime.buffers import SharedBuffers
from overspill.runtime.door import HANDLE, set_door
from overspill.runtime.generation import Generation
from overspill.runtime.gradient_bytes import GradientBytes
from overspill.runtime.handle import GradHandle, gradient_of
from overspill.runtime.lazy import Early, Lazy
from overspill.runtime.measures import Measures
from overspill.runtime.parts import Parts
from overspill.runtime.precision import cast_inputs
from overspill.runtime.residency import Residency, forget_interrupted, seen, viewed
from overspill.runtime.rounds import Rounds
from overspill.runtime.steps import Jobs, Steps
from overspill.runtime.untraced import untraced
from overspill.runtime.watch import ShapeWatch
from overspill.units.local import local_of, part_for, wrapped


class Planner(Protocol):
    """See overspill/replanning.py."""

    def called(self, size: tuple[int, int], graph: bool) -> None: ...


class Engine:
    """Built by overspill/setup.py; users never see it."""

    def __init__(self, model: nn.Module, parts: Parts) -> None:
        self.model = model
        self.in_order = list(model.parameters())
        """The model's parameters: they stay the same objects while it is prepared."""
        self.parts = parts
        self.executor = parts.executor
        self.units = parts.units
        self.closed = False
        self.early: Early = Lazy()
        self.residency = Residency(model, parts)
        itself = weakref.proxy(self)
        self.residency.look = lambda: itself.look()
        # Weakly, because what is in `p.grad` refers to all this where Python's garbage collector does not look.
        trained = [weakref.ref(p) for unit in self.units for p in unit.params if p.requires_grad]
        parts.made.grads.bytes.current = lambda: [g for ref in trained if (g := gradient_of(ref())) is not None]
        self.measures = Measures(parts.executor, parts.planned)
        self.planner: Planner | None = None
        """Who may plan anew."""
        self.steps = Steps(self.units, parts, self.residency)
        self._watch = ShapeWatch(model)
        ranks = parts.made.ranks
        self.rounds = Rounds(self.units, parts, self.residency) if ranks is not None else None
        self._is_plain = ranks is None and parts.scale is None
        """Whether a gradient that autograd made counts as it is."""
        self._buffers = SharedBuffers(model, ranks, parts.executor) if ranks is not None else None
        # Weakly, because a parameter's hooks lie where Python's garbage collector does not look for cycles.
        listeners = hooks.Listeners(weakref.proxy(self), self.residency, self.residency.copies, self.residency.loads)
        self._hooks = hooks.install(model, parts.layout, listeners)
        if parts.scale is not None:
            # What is in `p.grad` from before is not scaled, so autograd may not add to it.
            for index, unit in enumerate(self.units):
                for param, p in enumerate(unit.params):
                    if p.grad is not None:
                        self.hand_out(p, parts.made.grads.take(index, param, part_for(p, p.grad.detach())))

    def hand_out(self, p: nn.Parameter, generation: Generation) -> None:
        p.grad = None
        p.grad = wrapped(p, GradHandle([generation], self.parts.made.grads, self.executor.lanes.device))

    def check_open(self) -> None:
        if self.closed:
            raise StateError(
                "expected a prepared model, found a closed one; call overspill.prepare again to go on training"
            )

    # --- the hooks call these

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The root is called: look whether the model is still the same, bring the inputs."""
        forget_interrupted(self.residency, begins=1)
        self._watch.check(call=True)
        self.residency.copies.forget()
        if not torch.is_grad_enabled():
            self.look()
        if self.planner is not None:
            graph = torch.is_grad_enabled()
            # What only looks at the model brings its caches along, which are there already.
            self.planner.called(_size_of((args, kwargs), hooks.DEPTH if graph else 0), graph)
        if self.rounds is not None:
            self.rounds.begin()
        if self._buffers is not None:
            self._buffers.begin()
        self.executor(Begin(self.residency.phase))
        if self.parts.scale is not None:
            args, kwargs = self.parts.scale.enter((args, kwargs))
        device, dtype = self.executor.lanes.device, self.parts.dtype
        return cast_inputs(args, device, dtype), cast_inputs(kwargs, device, dtype)

    def end(self, output: Any) -> Any:
        """The root's call is over; what it gives is handed out."""
        output = output if self.parts.scale is None else self.parts.scale.leave(output)
        if self.early.waits and torch.is_grad_enabled():
            hooks.before_backward(output, self.early.passing)
        return output

    def arrived(self, unit: int, param: int) -> None:
        """Autograd accumulated into `p.grad`: a new gradient becomes a generation; a handle has taken it already."""
        self.measures.gradient_came()
        if self.parts.made.recorder.on:
            self.parts.made.recorder.mark(f"backward of {self.units[unit].spec.name}")
        p = self.units[unit].params[param]
        gradient, own = p.grad, self.residency.own_grads.get((unit, param))
        if self._is_plain and own is None and type(gradient) is Tensor and not gradient.requires_grad:
            # As nearly always.
            self.hand_out(p, self.parts.made.grads.arrive(unit, param, gradient))
            self.early.arrived(unit, param)
            return
        handed = gradient is not None and isinstance(local_of(gradient), GradHandle)
        if handed and self.rounds is not None:
            self.rounds.arrived(unit, param)
        if handed:
            self.early.arrived(unit, param)
        if gradient is None or handed:
            return
        owned = own is not None and own() is gradient
        if self.parts.scale is not None and (owned or gradient.requires_grad):
            raise StateError(
                "expected backward passes that leave p.grad to overspill under precision='fp16', found a tensor of "
                f"yours, or a graph, as the gradient of {self.units[unit].spec.params[param].name!r}: what autograd "
                "added to it is scaled; use precision='bf16' for that"
            )
        if self.rounds is not None and (owned or gradient.requires_grad):
            raise StateError(
                "expected backward passes that leave p.grad to overspill over ranks, found a tensor of yours, or a "
                f"graph, as the gradient of {self.units[unit].spec.params[param].name!r}: it would not be averaged; "
                "use zero_grad(), and torch.autograd.grad for gradients of your own"
            )
        if owned or gradient.requires_grad:
            return
        grads = self.parts.made.grads
        self.hand_out(p, grads.arrive(unit, param, part_for(p, gradient.detach())))
        if self.rounds is not None:
            self.rounds.arrived(unit, param)
        self.early.arrived(unit, param)

    # --- the optimizer and the API call these

    @untraced
    def step(self, groups: list[dict[str, Any]]) -> None:
        """Take the gradients that are there; every unit's update is due before its next use."""
        self.check_open()
        self.residency.turns.take()
        self._watch.check()
        self.parts.made.grads.moved_in()
        self.residency.copies.forget()
        begun = self.early.step()
        self.settle_units(tuple(sorted(self.executor.state.pending - begun)))
        self.steps.hear()
        if self.rounds is not None:
            self.rounds.meet_to_step(groups)
        jobs = self.steps.jobs(groups, begun if self.early.takes else frozenset())
        if self.rounds is not None:
            self.rounds.step((unit, due.param) for unit, todo in jobs.items() for job in todo for due in job.due)
        if not jobs and not begun:
            raise StateError(
                "expected gradients at step(), found none on any parameter; call loss.backward() before "
                "optimizer.step(), and zero_grad() after it"
            )
        jobs = self.steps.judged(jobs)
        self.steps.count += 1
        jobs = self.early.exchange(jobs, self.steps.count)
        self._put(jobs)
        self.residency.forget()
        self._show((*jobs, *begun))
        self.measures.tick()

    @untraced
    def zeroed(self) -> None:
        """Gradients are dropped, perhaps without a step."""
        if not self.early.zeroed() or self.closed:
            return
        self.residency.turns.take()
        self._show(self.look())

    def _show(self, units: Iterable[int]) -> None:
        """Those of which somebody holds views of weights, or has them all open, are updated now: whoever looks would
        see them before their update."""
        looked_at = seen(self.residency, units)
        if looked_at:
            self.settle_units(looked_at)
            for unit in looked_at if self.rounds is not None else ():
                self.residency.need((unit,), ahead=False)

    @untraced
    def settle(self, look: bool = True) -> None:
        """Finish pending updates, bring everything home, and wait until it is there; also for somebody who looks from
        outside, or not."""
        self.check_open()
        if look:
            self.early.check()
        self.residency.turns.take()
        if look:
            self.look()
        self.settle_units()
        self.executor.finish()

    def look(self) -> frozenset[int]:
        """Somebody looks from outside: what a step took that is to be applied later is due now. Returns of which units
        there is some."""
        forget_interrupted(self.residency)
        self.steps.hear()
        due = self.early.flush()
        if due:
            self.settle_units(tuple(sorted(self.executor.state.pending & due.keys())))
            self._put(due)
        return frozenset(due)

    def _put(self, jobs: Jobs) -> None:
        for unit, todo in jobs.items():
            self.parts.made.updates.put(unit, tuple(todo))
        self.executor(Step(frozenset(jobs), self.residency.held()))

    def settle_units(self, units: tuple[int, ...] | None = None) -> None:
        self.executor(Settle(units, self.residency.held()))
        # Weights of which somebody holds views may be written at any time, and again after they were brought home.
        held = viewed(self.residency, range(len(self.units)))
        if held:
            self.executor(Mark(held, written=True))

    @contextmanager
    def full(self) -> Iterator[None]:
        """All weights on the device, current and open; changes are written home at the end."""
        self.settle()
        away = sum(u.nbytes for i, u in enumerate(self.units) if self.executor.program.away(i))
        self.parts.check_full(away)
        try:
            with self.residency.all_open():
                yield
        finally:
            # Not what a load left that broke off: its own error says what happened.
            if not self.executor.mixed:
                self.settle()

    def close(self) -> None:
        """Give a plain model back: weights on the devices they came from, gradients in `p.grad`."""
        self.check_open()
        self.early.check()
        self.look()
        if self.rounds is not None:
            self.rounds.meet_to_close(-1)
        # Not `settle`: what is given back is never written home again, whoever holds views of it.
        self.executor(Settle(None, self.residency.held()))
        for handle in self._hooks:
            handle.remove()
        if self.parts.held is not None:
            # What is given back is the user's, whose own limits hold for it.
            self.parts.held.lift()
        for index in range(len(self.units)):
            # Nothing ahead: what is expected next may have been given back already.
            self.residency.need((index,), ahead=False)
            if self.rounds is not None:
                # Until all ranks have the unit whole, none gives its share of it away.
                self.rounds.meet_to_close(index)
            _give_back(self, index)
        hooks.flatten(self.model)
        for buffer, device in self.parts.buffers:
            buffer.data = buffer.data.to(device)
        if self.rounds is not None:
            self.rounds.close()
        self.executor.finish()
        self.closed = self.residency.closed = True
        if self.parts.scale is not None:
            self.parts.scale.end()
        if self.executor.pager is not None:
            self.executor.pager.close()
        self.executor.lanes.close()
        for tier in self.parts.tiers.values():
            tier.close()
        if self.parts.held is not None:
            self.parts.held.close()


def _give_back(engine: Engine, index: int) -> None:
    """Plain parameters with plain gradients, on the devices they came from."""
    unit, made = engine.units[index], engine.parts.made
    gradients = [_held(engine, index, i) for i in range(len(unit.params))]
    # What comes back as it is here is rounded already, and not as torch rounds.
    finer = [i for i, p in enumerate(unit.spec.params) if unit.came_as[i][1] != p.dtype]
    values = {i: made.masters.read((index, i)) for i in finer if (index, i) in made.masters}
    for p in unit.params:
        p.grad = None
        set_door(p, None)
        delattr(p, HANDLE)
    unit.give_back(values)
    for p, held in zip(unit.params, gradients, strict=True):
        # What an update took in the backward pass is not there any more.
        if held is not None and not (isinstance(held, GradHandle) and held.generation.consumed):
            p.grad = wrapped(p, _plain(local_of(p), made.grads.bytes, held))


def _held(engine: Engine, unit: int, param: int) -> Tensor | None:
    """What is in `p.grad`. A sparse gradient was refused, so it stands where autograd put it, with the scale of the
    loss."""
    p = engine.units[unit].params[param]
    gradient, own = p.grad, engine.residency.own_grads.get((unit, param))
    if gradient is None:
        return None
    held = part_for(p, gradient)
    if held.layout is torch.strided or (own is not None and own() is gradient):
        return held
    return engine.parts.made.masters.unscaled(held)


def _plain(part: Tensor, bytes: GradientBytes, held: Tensor) -> Tensor:
    """A gradient as its parameter is from now on."""
    if held.layout is not torch.strided:
        return held.to(part.device, part.dtype)
    value = bytes.read(held.generation) if isinstance(held, GradHandle) else held
    return torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=part.device).copy_(value)


def _size_of(inputs: Any, depth: int) -> tuple[int, int]:
    """Elements in all, and the longest dimension."""
    shapes = [t.shape for t in hooks.tensors_in(inputs, depth)]
    return sum(shape.numel() for shape in shapes), max((n for shape in shapes for n in shape), default=0)
