"""Which page is next, and where it goes: ahead of the GPU, but never into memory that somebody still uses."""

from dataclasses import dataclass
from typing import Any

import torch

from overspill.runtime.handing import UnitWork, _in_order
from overspill.runtime.loans import Loans
from overspill.runtime.passage import WayHome
from overspill.runtime.slots import Slots


@dataclass
class Moment:
    """A ticket, and an event, of something on the GPU."""

    issued: bool = True
    over: bool = False

    def query(self) -> bool:
        return self.over


def work(unit: int, *waits: Any, deadline: int = 0, hurried: bool = False) -> UnitWork:
    return UnitWork(unit, deadline, list(waits), [(unit, 0)], hurried=hurried)


def units(works: list[UnitWork]) -> list[int]:
    return [each.unit for each in works]


def test_what_is_computed_goes_by_deadline_and_the_rest_as_it_came() -> None:
    over, coming, unknown = Moment(over=True), Moment(), Moment(issued=False)
    works = [work(5, over, deadline=9), work(4, over, deadline=3), work(3, coming), work(2, unknown), work(1, coming)]
    every, ready = _in_order(works)
    assert units(ready) == [4, 5, 3, 1] and units(every) == [4, 5, 3, 1, 2]
    assert not works[0].waits and works[2].waits == [coming], "what is over is not waited for on a stream"
    works[4].hurried = True
    assert units(_in_order(works)[1]) == [4, 5, 1, 3]


class Room:
    """As a ring of slots in device memory."""

    slot_bytes = 10

    def __init__(self) -> None:
        self.busy: dict[int, Moment] = {}
        self.small: set[int] = set()

    def take(self, slot: int, stream: torch.cuda.Stream | None) -> bool:
        self.busy[slot] = Moment()
        return True

    def is_over(self, slot: int) -> bool:
        return self.busy[slot].over

    def takes(self, slot: int) -> bool:
        return slot not in self.small

    def settle(self, slot: int) -> None: ...
    def give_back(self, slot: int) -> None:
        del self.busy[slot]


def made(lent: int = 0) -> tuple[Slots, Room, Loans]:
    room, loans = Room(), Loans()
    loans._total = loans._most = lent
    return Slots(room, loans, depth=2), room, loans  # type: ignore[arg-type]


def test_lent_slots_are_free_when_the_model_is_past_them() -> None:
    slots, room, loans = made(lent=35)
    assert not slots.ask() and len(room.busy) == 3, "as many as there is room for"
    assert slots.take(lent=True) == 0, "one of the ring's own"
    first, second, _ = room.busy
    room.busy[first].over = room.busy[second].over = True
    assert slots.ask() and [slots.take(lent=True) for _ in range(2)] == [first, second]
    assert slots.take(lent=False) == 1 and slots.take(lent=True) is None
    slots.give_back()
    assert loans._lent == 20, "two are used, and the third is given back unused"
    slots.release(first)
    slots.release(second)
    assert loans._lent == 0 and not room.busy


def test_a_page_follows_another_one_into_its_slot() -> None:
    slots, room, _ = made(lent=10)
    ways: Any = None
    home = WayHome(ways, slots.release)
    own, other = Moment(), Moment()
    slots.ask()
    lent = next(iter(room.busy))
    home.release(lent, (0, 0), Moment())
    home.release(0, (0, 1), own)
    home.release(1, (0, 2), other)
    room.small.add(0)
    assert home.next_free(slots.can_follow) == (1, other), "not a lent one, nor one that must grow"
    room.small.clear()
    assert home.next_free(slots.can_follow) == (0, own) and home.next_free(slots.can_follow) is None
    assert len(home) == 1, "its slot is free when it is home"
