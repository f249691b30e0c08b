"""The program without bytes: what it asks for is always legal, whatever the training loop does."""

import random
from dataclasses import replace

import pytest
import torch

from overspill.plan.simulate import simulate, step_events
from overspill.program import (
    Begin,
    Due,
    Event,
    Grad,
    Key,
    Kind,
    Lane,
    Mark,
    Need,
    Op,
    Program,
    Settle,
    Step,
    deadline,
    next_updates,
    react,
    start,
)
from overspill.specs import Limits, ModelSpec, PageSpec, ParamSpec, PartSpec, Placement, Span, Stripe, UnitSpec, align

TIERS = ("device", "host", "nvme")


def unit(name: str, elements: int, params: int = 3) -> UnitSpec:
    nbytes = 4 * elements
    specs = tuple(
        ParamSpec(
            name=f"{name}.{i}",
            shape=(elements,),
            stride=(1,),
            dtype=torch.float32,
            offset=i * align(nbytes),
            nbytes=nbytes,
            trainable=True,
            grad_item=4,
            grad_bytes=align(nbytes),
            owned=Span(((0, elements),)),
        )
        for i in range(params)
    )
    pages = tuple(
        PageSpec((PartSpec(i, 0, elements, 0),), elements, 2 * align(nbytes), align(nbytes)) for i in range(params)
    )
    stripe = Stripe(torch.float32, (0, params * align(nbytes)), True)
    return UnitSpec(name, specs, pages, (stripe,), (stripe.piece(0),))


def program(sizes: list[int], placements: list[Placement], depth: int = 2) -> Program:
    units = tuple(unit(f"u{i}", n) for i, n in enumerate(sizes))
    model = ModelSpec(units, tuple((i,) for i in range(len(units))), 0)
    largest = max(u.weight_bytes for u in units)
    return Program(model, tuple(placements), Limits(window=largest, depth=depth, flight=largest // 3))


def random_events(rng: random.Random, units: int, count: int) -> list[Event]:
    """A loop that nobody would write: needs, gradients, steps and settling in any order."""
    events: list[Event] = []
    for _ in range(count):
        kind = rng.randrange(8)
        u = rng.randrange(units)
        if kind < 4:
            events.append(Need((u,), rng.choice(("train", "eval"))))
            if rng.random() < 0.2:
                events.append(Mark((u,), pin=rng.random() < 0.3, written=rng.random() < 0.5))
        elif kind < 6:
            events += [Need((u,)), Grad(u, rng.randrange(3), first=rng.random() < 0.5)]
        elif kind == 6:
            events.append(Settle(tuple(range(units))))
            events.append(Step(frozenset(rng.sample(range(units), rng.randrange(units + 1)))))
        else:
            events += [Settle(), Begin(rng.choice(("train", "eval")))]
    return events


class Machine:
    """Carries ops out on nothing and checks that each is possible."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.here: set[int] = set()
        self.pages: dict[int, tuple[int, int]] = {}
        """Slot -> (unit, page)."""
        self.grads: set[tuple[int, int]] = set()
        self.done: set[Key] = set()
        self.passed_on: set[int] = set()
        """Units that are with whoever passes pages through the ring."""

    def run(self, op: Op) -> None:
        unit, home = op.unit, self.program.placements[op.unit]
        if op.kind == Kind.FETCH:
            assert home.weight != "device" and unit not in self.here
            self.here.add(unit)
        elif op.kind == Kind.RELEASE:
            assert unit in self.here and unit not in self.passed_on
            self.here.remove(unit)
        elif op.kind in (Kind.STORE, Kind.OPEN, Kind.UPDATED):
            assert home.weight == "device" or unit in self.here
            self.passed_on -= {unit} if op.kind == Kind.UPDATED else set()
        elif op.kind in (Kind.STATE_FETCH, Kind.PAGE_GRADS):
            assert not (self.grads and self.program.shares_room), "pages and gradients pass together"
            if self.pages.get(op.slot, (unit, op.item)) != (unit, op.item):
                keys = {Key(kind, *self.pages[op.slot]) for kind in (Kind.UPDATE, Kind.STATE_STORE)}
                assert keys <= set(op.done), "a slot is taken before it is free"
            self.pages[op.slot] = (unit, op.item)
        elif op.kind == Kind.UPDATE:
            assert home.weight == "device" or unit in self.here
            passes = home.state != "device" or home.grad != "device"
            piped = self.program.piped
            assert not piped or op.lane == Lane.PAGES, "one hand updates all of them"
            assert passes or piped or op.lane == self.program.update_lane
            assert (passes and not piped) == (op.item >= 0), "pages that pass are updated one by one, others together"
            assert piped or not passes or (unit, op.item) in self.pages.values(), (
                "an update of a page that is not there"
            )
            assert unit not in self.passed_on, "an update is handed out twice"
            self.passed_on |= {unit} if op.lane == Lane.PAGES else set()
        elif op.kind == Kind.PAGE_DROP:
            assert self.pages.pop(0) == (unit, op.item)
        elif op.kind == Kind.GRAD_STORE:
            assert not (self.pages and self.program.shares_room), "pages and gradients pass together"
            self.grads.add((unit, op.item))
        elif op.kind == Kind.GRAD_DROP:
            self.grads.remove((unit, op.item))
        assert all(slot < self.program.limits.depth for slot in self.pages)
        assert op.lane in (Lane.COMPUTE, Lane.UPDATE, Lane.PAGES) or op.nbytes > 0
        self.done.add(op.key)


@pytest.mark.parametrize("seed", range(60))
def test_ops_are_legal_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 6)
    placements = [Placement(*(rng.choice(TIERS) for _ in range(3))) for _ in range(count)]  # type: ignore[arg-type]
    made = program([rng.randint(1, 5000) for _ in range(count)], placements, depth=rng.randint(1, 3))
    made = replace(made, piped=rng.random() < 0.5 and not made.shares_room)
    machine, state = Machine(made), start(made)
    for event in random_events(rng, count, 120):
        before = state
        state, ops = react(made, state, event)
        for op in ops:
            machine.run(op)
        assert set(state.here) == machine.here
        if isinstance(event, Need):
            assert all(u in machine.here or placements[u].weight == "device" for u in event.units)
            assert not state.pending & set(event.units), "an update is done before its unit is used"
        if isinstance(event, Settle) and event.units is None:
            assert not state.pending and not state.changed and not machine.grads
        window = sum(made.model.units[u].weight_bytes for u in machine.here)
        kept = sum(made.model.units[u].weight_bytes for u in before.pinned | state.pinned if u in machine.here)
        assert window <= made.limits.window + kept


def test_what_changed_is_stored_before_it_is_released() -> None:
    made = program([100, 100], [Placement("host", "host", "host")] * 2)
    state, _ = react(made, start(made), Need((0,)))
    state, _ = react(made, state, Mark((0,), written=True))
    state, ops = react(made, state, Need((1,)))
    kinds = [op.kind for op in ops if op.unit == 0]
    assert kinds == [Kind.STORE, Kind.RELEASE]
    release = next(op for op in ops if op.kind == Kind.RELEASE)
    assert Key(Kind.STORE, 0) in release.waits


def test_what_is_expected_last_leaves_first() -> None:
    made = program([100] * 4, [Placement("host", "host", "host")] * 4)
    made = replace(made, limits=replace(made.limits, window=3 * made.limits.window))
    state = start(made)
    for _ in range(2):
        for event in step_events(made):
            state, _ = react(made, state, event)
    for u in (0, 1, 2, 3):
        state, _ = react(made, state, Need((u,)))
    assert set(state.here) == {1, 2, 3}, "backward needs 3, 2 and 1 before 0"


def test_the_order_of_needs_is_learned() -> None:
    made = program([100] * 3, [Placement("host", "host", "host")] * 3)
    state = start(made)
    for u in (2, 0, 1, 1, 0, 2):
        state, _ = react(made, state, Need((u,)))
    state, _ = react(made, state, Step(frozenset({0, 1, 2})))
    assert state.expected["train"] == (2, 0, 1, 0, 2)


def test_the_next_unit_is_fetched_ahead() -> None:
    made = program([100] * 4, [Placement("host", "host", "host")] * 4)
    made = replace(made, limits=replace(made.limits, window=2 * made.limits.window))
    _, ops = react(made, start(made), Need((0,)))
    assert [op.unit for op in ops if op.kind == Kind.FETCH] == [0, 1]


def test_the_next_unit_does_not_wait_for_the_update_of_this_one() -> None:
    made = program([100] * 4, [Placement("host", "device", "host")] * 4)
    made = replace(made, piped=True, limits=replace(made.limits, window=2 * made.limits.window))
    state, _ = react(made, start(made), Step(frozenset(range(4))))
    for u in (0, 1, 2):
        state, ops = react(made, state, Need((u,)))
        kinds = [(op.kind, op.unit) for op in ops]
        assert kinds.index((Kind.FETCH, u + 1)) < kinds.index((Kind.UPDATED, u))
        assert kinds.index((Kind.UPDATED, u)) < kinds.index((Kind.OPEN, u))


def test_updates_are_handed_out_with_the_step() -> None:
    made = program([100] * 3, [Placement("device", "device", "host")] * 2 + [Placement("host", "device", "host")])
    made = replace(made, piped=True)
    state, ops = react(made, start(made), Step(frozenset({0, 1, 2})))
    assert [(op.unit, op.lane) for op in ops if op.kind == Kind.UPDATE] == [(0, Lane.PAGES), (1, Lane.PAGES)]
    assert [deadline(state, unit) for unit in (0, 1, 2)] == [0, 1, 2]
    state, ops = react(made, state, Need((0,)))
    assert [op.unit for op in ops if op.kind == Kind.UPDATE] == [2], "as soon as its weights are on their way"
    assert [op.unit for op in ops if op.kind == Kind.UPDATED] == [0]
    assert deadline(state, 0) == len(state.expected["train"]) - 1, "backward needs it again"


def test_what_is_updated_next() -> None:
    made = program([100] * 4, [Placement("device", "device", "host")] * 4)
    made = replace(made, piped=True)
    state, _ = react(made, start(made), Step(frozenset({1, 2})))
    assert list(next_updates(made, state)) == [0, 3], "pages of the others are being updated already"
    state, _ = react(made, state, Need((1,)))
    assert list(next_updates(made, state)) == [0, 1, 3]
    made = replace(made, eager=True)
    state, _ = react(made, start(made), Due(frozenset({3})))
    assert list(next_updates(made, state)) == [2, 1, 0, 3], "gradients are complete from the end on"
    state, _ = react(made, state, Due(frozenset({2})))
    state, _ = react(made, state, Need((3,)))
    assert list(next_updates(made, state)) == [1, 0, 3, 2], "what this pass updated is not due before the next one"
    state, _ = react(made, state, Step(frozenset({0, 1})))
    assert list(next_updates(made, state)) == [2, 1, 0, 3], "the others have not been asked for"


def test_the_simulator_folds_the_same_program() -> None:
    made = program([100, 200, 300], [Placement("host", "nvme", "host")] * 3)
    found = simulate(made)
    assert found.window <= made.limits.window
    assert found.moved[Lane.READ] == sum(u.grad_bytes for u in made.model.units)
    assert found.moved[Lane.WRITE] == sum(u.grad_bytes for u in made.model.units)
    stored = sum(u.weight_bytes + u.state_bytes for u in made.model.units)
    assert found.moved[Lane.DOWN] == stored
