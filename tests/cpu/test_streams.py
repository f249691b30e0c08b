"""Gradients that a branch of the model makes on a stream of its own: whoever uses them or their memory comes behind."""

from typing import Any

import pytest
import torch
from torch import Tensor

from overspill.runtime import coming, parts, rooms, updates
from overspill.runtime.gradients import Gradients
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
