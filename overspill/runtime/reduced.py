"""Gradients over ranks, on their way from a backward pass to where they count.

Note [Reduced gradients]: what a backward pass makes is first averaged over ranks, with the unit's others
(reduction.py), and then goes the way of any gradient. A parameter that this rank did not use, or uses later, may have
got a gradient on others: then the unit's reduction brings it here too, *unclaimed*, until the ranks have told each
other at the end of the backward pass. What passes inside `no_sync` make is held on its own rank (*local*), and goes
into the next reduction.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from overspill.program import Grad, Key, Kind, Settle
from overspill.runtime.collect import array
from overspill.runtime.executor import Executor
from overspill.runtime.generation import Generation, as_flat, full_dtype
from overspill.runtime.gradient_bytes import GradientBytes
from overspill.runtime.passing import Passing
from overspill.runtime.reduction import Reduction, wide
from overspill.specs import ParamSpec


class Book(Protocol):
    """Who keeps all gradients."""

    bytes: GradientBytes
    factor: Tensor | None
    passing: Passing

    def claim(self, generation: Generation) -> None: ...
    def send_home(self, generation: Generation) -> None: ...
    def take_back(self, generation: Generation) -> None: ...
    def contribute(self, generation: Generation, contribution: Callable[[Tensor], object]) -> None: ...


class Reduced:
    """See Note [Reduced gradients]."""

    def __init__(self, book: Book, reduction: Reduction, executor: Executor) -> None:
        self._book = book
        self._reduction = reduction
        self._executor = executor
        self._waiting: dict[tuple[int, int], Generation] = {}
        """Gradients to which a reduction will contribute."""
        self.unclaimed: dict[tuple[int, int], list[Tensor]] = {}
        self.synced: Callable[[], bool] = lambda: True
        """Whether what backward passes make now is reduced, or held on this rank for a later one."""
        reduction.arrived = self._arrived

    def keep_share(self, generation: Generation) -> None:
        """All ranks were given the same whole gradient, and have room for what they own of it."""
        if self._reduction.divides and generation.span is None:
            whole, generation.span = generation.value, generation.spec.owned
            assert whole is not None, f"the gradient of {generation.spec.name} is not on the device"
            elements = as_flat(whole)
            generation.value = array(generation.span, lambda b, e: elements[b:e], whole.dtype, whole.device)

    def put_held(self, generation: Generation) -> None:
        """What was held on this rank is reduced at the end of a backward pass that brought nothing to add to it."""
        self._make_room(generation)
        value = self._book.bytes.share(generation)
        self._renew(generation)
        self.put(generation, value, None)

    def put(self, generation: Generation, value: Tensor, factor: Tensor | None) -> None:
        """A backward pass made `value`, whole and laid out as the parameter is; `factor` undoes its scale."""
        unit, param, spec = generation.unit, generation.param, generation.spec
        if generation.local or not generation.zero or generation.todo or value.dtype == full_dtype(spec):
            self._make_room(generation)
        if factor is not None and value.dtype == full_dtype(spec):
            value, factor = value * factor, None
        if generation.local:
            value, factor = self._book.bytes.share(generation) + wide(value, spec, factor), None
            self._renew(generation)
        elif generation.zero and not generation.todo:
            generation.factor = factor
        else:
            self._make_ready(generation)
        self._reduction.put(unit, param, value, factor)
        self._waiting[unit, param] = generation
        self._executor(Grad(unit, param, first=generation.zero and not generation.todo, reduced=True))

    def forget(self) -> None:
        """A backward pass was interrupted: what it brought and was not reduced yet."""
        self._reduction.forget()
        self._waiting.clear()
        self.unclaimed.clear()

    def _make_room(self, generation: Generation) -> None:
        """It will be a sum, of which this rank keeps its share."""
        self._book.bytes.widths.make_ready(generation, generation.spec.owned if self._reduction.shares else None)

    def _renew(self, generation: Generation) -> None:
        """All that it had is part of what will be reduced."""
        self._book.passing.leaving.pop((generation.unit, generation.param), None)
        generation.value, generation.zero, generation.local = None, True, False
        generation.dtype, generation.factor = full_dtype(generation.spec), None
        generation.todo.clear()
        generation.norms.clear()
        generation.raw_norm = None

    def _make_ready(self, generation: Generation) -> None:
        """What is reduced will be added to this gradient, which has a value."""
        unit, ranks = generation.unit, self._executor.ranks
        if unit in self._executor.state.pending and ranks is not None:
            # An update that is due takes the gradient as it was.
            self._executor(Settle((unit,), ranks.held()))
        if not generation.zero and not (self._reduction.shares and generation.span is None):
            return
        # It is whole (somebody looked at it through a view, or put it there), or zero with changes that wait for it.
        whole = self._book.bytes.share(generation).clone()
        self._renew(generation)
        self._book.take_back(generation)
        generation.value, generation.zero, generation.dtype = whole, False, whole.dtype
        if self._reduction.shares:
            elements, generation.span = as_flat(whole), generation.spec.owned
            generation.value = array(generation.span, lambda b, e: elements[b:e], whole.dtype, whole.device)
        self._book.send_home(generation)

    def _arrived(self, unit: int, sums: dict[int, Tensor]) -> None:
        """A reduction is on its way: its sums go to the gradients that wait for them."""
        for param, value in sums.items():
            generation = self._waiting.pop((unit, param), None)
            if generation is None:
                self.unclaimed.setdefault((unit, param), []).append(value)
            elif generation.zero and not generation.todo:
                self._fill(generation, value)
                self._book.passing.expect(generation)
            else:
                self._book.passing.expect(generation, self._contribution(generation, value))

    def _fill(self, generation: Generation, value: Tensor) -> None:
        """A gradient without bytes gets what was reduced."""
        spec = generation.spec
        generation.span = spec.owned if self._reduction.shares else None
        generation.value = value if self._reduction.shares else value.as_strided(spec.shape, spec.stride)
        generation.dtype, generation.zero = value.dtype, False
        if generation.dtype == full_dtype(spec):
            generation.factor = None
        generation.norms.clear()
        self._book.claim(generation)

    def _contribution(self, generation: Generation, value: Tensor) -> Callable[[Tensor], object]:
        spec, factor = generation.spec, self._book.factor

        def add(total: Tensor) -> None:
            more = wide(value, spec, factor)
            total.add_(more if generation.span is not None else more.as_strided(spec.shape, spec.stride))

        return add

    def adopt(self, unit: int, param: int, of: tuple[ParamSpec, Generation | None]) -> Generation:
        """Another rank had a gradient for this parameter, and this one had not, or not at that time: what came of it is
        its gradient here, or adds to the one that it has."""
        (spec, generation), pieces = of, self.unclaimed.pop((unit, param))
        self._executor.wait(Key(Kind.REDUCE, unit))
        for value in pieces:
            if generation is not None and not generation.zero:
                self._book.contribute(generation, self._contribution(generation, value))
                continue
            generation = Generation(unit, param, spec, None, self._book.factor)
            self._fill(generation, value)
            self._book.send_home(generation)
        assert generation is not None, "there is at least one piece"
        return generation
