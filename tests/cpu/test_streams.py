"""Branches of the model that run on streams of their own: whoever uses weights, gradients or their memory comes behind
whoever waited for them, made them or used them before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overspill.program import Kind, Op
from overspill.runtime import coming, parts, rooms, updates
from overspill.runtime.gradients import Gradients
from overspill.runtime.lanes import Lanes
from overspill.tiers import streams
from tests.cpu.test_ahead import of_length
from tests.cpu.test_coming import prepared


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PAGED", {"cpu"})
    monkeypatch.setattr(rooms, "PIECES", {"cpu"})


class Streams:
    """As if one layer of each block ran on a stream of its own. What each stream is known to come behind: `made` and
    `copied` gradients, and what was done with a room before it was given out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.behind = 1, {1: set[Any](), 2: set[Any]()}
        self.made: dict[int, tuple[int, str]] = {}
        self.copies = 0
        self._kept: list[Tensor] = []
        arrive, together, new, move = Gradients.arrive, torch._foreach_copy_, rooms.Rooms._new, rooms.Rooms.move_in

        def arrives(grads: Gradients, unit: int, param: int, value: Tensor) -> Any:
            name = grads._units[unit].spec.params[param].name
            self.now = 2 if "up" in name else 1
            # Kept, so that no other one gets its address.
            self._kept.append(value)
            self.made[value.data_ptr()] = (self.now, name)
            self.behind[self.now].add(("made", name))
            return arrive(grads, unit, param, value)

        def copied(places: Any, values: Any) -> None:
            for place, value in zip(places, values, strict=True):
                self._check(place, value)
            together(places, values)

        def moves(held: rooms.Rooms, generation: Any) -> bool:
            value = generation.value
            found = move(held, generation)
            if found:
                self._check(generation.value, value)
            return found

        def makes(held: rooms.Rooms, unit: int) -> Any:
            room = new(held, unit)
            self.behind[self.now].add(("room", id(room)))
            self._kept.append(room)
            return room

        monkeypatch.setattr(Gradients, "arrive", arrives)
        monkeypatch.setattr(torch, "_foreach_copy_", copied)
        monkeypatch.setattr(rooms.Rooms, "_new", makes)
        monkeypatch.setattr(rooms.Rooms, "move_in", moves)
        monkeypatch.setattr(streams, "current", lambda device: self.now)
        monkeypatch.setattr(streams, "follow", self._follow)

    def _follow(self, device: Any, stream: int, other: int) -> None:
        self.behind[stream] |= self.behind[other]

    def _check(self, place: Tensor, value: Tensor) -> None:
        by, name = self.made[value.data_ptr()]
        self.copies += by != self.now
        needs = {("made", name), ("room", id(getattr(place, rooms.ROOM)))}
        assert needs <= self.behind[self.now], f"{name} is copied before it is made, or into memory that is in use"
        self.behind[self.now].add(("copied", name))


@pytest.mark.parametrize("share", [1, 1 << 40], ids=["together", "one by one"])
def test_gradients_of_another_stream_are_waited_for(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coming, "SHARE", share)
    seen = Streams(monkeypatch)
    model, _ = prepared()
    of_length(model, 5, 0).backward()
    assert (seen.copies > 0) == (share == 1)
    for by, name in seen.made.values():
        assert ("copied", name) in seen.behind[by], f"the memory of {name} is used again before it is copied"


@pytest.mark.parametrize("update", ["eager", "delayed"])
@pytest.mark.parametrize("share", [1, 1 << 40], ids=["together", "one by one"])
@pytest.mark.parametrize("passes", [1, 2])
def test_updates_in_a_pass_are_behind_all_streams(
    passes: int, share: int, update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coming, "SHARE", share)
    seen, put, due = Streams(monkeypatch), updates.Updates.put, list[str]()

    def puts(self: updates.Updates, unit: int, jobs: Any) -> None:
        names = [taken.generation.spec.name for job in jobs for taken in job.due]
        if torch._C._current_graph_task_id() != -1:
            due.extend(names)
            done = {name for what, name in seen.behind[seen.now] if what == "made"}
            assert done >= set(names), "weights are updated that a stream still uses, or by gradients that are not made"
        put(self, unit, jobs)

    monkeypatch.setattr(updates.Updates, "put", puts)
    told = {"delay_after": 0} if update == "delayed" else {}
    model, optimizer = prepared(update=update, micro_batches=passes, **told)
    for step in range(2):
        seen.behind = {1: set(), 2: set()}
        of_length(model, 5, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert due


class Used:
    """As if some modules ran on a stream of their own. What each stream is known to come behind: weights that are here,
    and updated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.waited = 1, {1: set[Any](), 2: set[Any]()}
        self.count = 0
        compute = Lanes.compute

        def waits(lanes: Lanes, op: Op, work: Callable[[], None]) -> None:
            if op.kind in (Kind.UPDATED, Kind.OPEN):
                self.count += 1
                self.waited[self.now].add((op.kind, op.unit, self.count))
                self.wanted[op.unit, op.kind] = self.count
            compute(lanes, op, work)

        self.wanted: dict[tuple[int, Kind], int] = {}
        monkeypatch.setattr(Lanes, "compute", waits)
        monkeypatch.setattr(streams, "current", lambda device: self.now)
        monkeypatch.setattr(streams, "follow", self._follow)

    def _follow(self, device: Any, stream: int, other: int) -> None:
        self.waited[stream] |= self.waited[other]

    def check(self, unit: int) -> None:
        wanted = {(kind, u, count) for (u, kind), count in self.wanted.items() if u == unit}
        assert wanted <= self.waited[self.now], "weights are used before they are updated or here"


class Twice(nn.Module):
    """Layers that two streams use, one after the other. Neither waits for the other in between."""

    def __init__(self, seen: Used) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self._seen = [seen]
        self.first = 1

    def forward(self, x: Tensor) -> Tensor:
        seen = self._seen[0]
        for i, block in enumerate(self.blocks):
            for stream in (self.first, 3 - self.first):
                seen.now = stream
                x = torch.tanh(block(x))
                seen.check(i)
            seen.now = 1
        return x


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("home", ["device", "host"])
def test_every_stream_that_uses_weights_comes_behind_their_update(
    home: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Used(monkeypatch)
    model = Twice(seen)
    model.first = first
    model, optimizer = prepared(model, place={"weight": home, "grad": "device", "state": "host"})
    for _ in range(3):
        model(torch.randn(4, 8, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen.wanted


def test_memory_of_gradients_is_given_back_to_the_stream_that_got_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next owner on that stream comes behind the update, for which another one waited."""
    seen, freed = Streams(monkeypatch), list[tuple[int, int]]()
    let_go = updates.Updates._let_go

    def follows(device: Any, stream: int, other: int) -> None:
        freed.append((stream, other))
        seen._follow(device, stream, other)

    def lets_go(self: updates.Updates, op: Op) -> Callable[[], None]:
        work = let_go(self, op)

        def act() -> None:
            freed.clear()
            values = [taken.generation.value for job in self._pending[op.unit] for taken in job.due]
            made = {value.__dict__[rooms.ROOM].stream for value in values}
            del values
            work()
            assert {(stream, seen.now) for stream in made} <= set(freed)
            found.update(made)

        return act

    found: set[int] = set()
    monkeypatch.setattr(streams, "follow", follows)
    monkeypatch.setattr(updates.Updates, "_let_go", lets_go)
    model, optimizer = prepared()
    of_length(model, 5, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    seen.now = 1
    of_length(model, 5, 1)
    assert found == {1, 2}
