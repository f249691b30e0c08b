"""Which page is next, and where it goes: ahead of the GPU, but never into memory that somebody still uses."""

from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from overspill.runtime.handing import Handing, UnitWork, _in_order, _moment
from overspill.runtime.loans import Loans
from overspill.runtime.passage import WayHome
from overspill.runtime.slots import Slots
from overspill.tiers import Together


@dataclass
class Moment:
    """A ticket, and an event, of something on the GPU."""

    issued: bool = True
    over: bool = False
    waited: list[str] = field(default_factory=list)

    def query(self) -> bool:
        return self.over

    def finish(self) -> None:
        self.waited.append("finish")

    def wait_issued(self) -> None:
        self.waited.append("issued")

    def event(self) -> "Moment":
        return self


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


class Slotted(list[int]):
    """Free slots, and a number of lent ones."""

    depth = 5

    def left(self) -> int:
        return len(self) + 10

    def give_back(self) -> None: ...


class Homeward(SimpleNamespace):
    def __len__(self) -> int:
        return 0


class Pages:
    """As a passage: pages that are in slots, and those that wait to go home."""

    def __init__(self, *there: tuple[int, int], lends: bool = False, free: int = 1) -> None:
        self.there, self.coming, self.of_units = set(there), deque[Any](), Counter[int]()
        self.loans = SimpleNamespace(allowed=lends)
        self.way_home = Homeward(waiting={}, stored={})
        self.slots, self.sent, self.events = Slotted(range(free)), list[Any](), dict[Any, Moment]()
        self.moving: Callable[[], None] | None = None

    def has(self, page: tuple[int, int]) -> bool:
        return page in self.there

    def fetch(self, page: tuple[int, int], **_: bool) -> bool:
        return False

    def update(self, page: tuple[int, int], waits: list[Any]) -> Moment:
        self.there.discard(page)
        return self.events.setdefault(page, Moment())

    def send_home(self) -> bool:
        if not self.way_home.waiting:
            return False
        self.sent.append(self.way_home.waiting.popitem())
        return True

    def look(self, borrow: bool) -> bool:
        return False

    def on_the_way(self) -> Callable[[], None] | None:
        return self.moving

    def give_up(self, units: Collection[int]) -> None:
        raise AssertionError(f"gave up for {units}")


class Hands:
    """As cores that never end by themselves."""

    def __init__(self, *refused: tuple[int, int]) -> None:
        self.taken: list[tuple[tuple[int, int], Any]] = []
        self.refused, self.busy, self.hands = refused, False, "split"

    def has_room(self) -> bool:
        return True

    def suits(self, page: tuple[int, int]) -> bool:
        return page not in self.refused

    def take(self, page: tuple[int, int], waits: list[Any], stored: Any, done: Any) -> bool:
        self.taken.append((page, done))
        return True


def handing(pages: Pages, *works: UnitWork, cores: Any = None) -> Handing:
    state: Any = SimpleNamespace(state=SimpleNamespace(training=False, begun=frozenset(), early=frozenset()))
    found = Handing(state, pages, cores)  # type: ignore[arg-type]
    for each in works:
        found.add(each)
    return found


def test_a_unit_without_pages_is_waited_for_until_it_is_issued() -> None:
    late = Moment(issued=False)
    empty = UnitWork(7, 0, [late], [])  # type: ignore[list-item]
    hands = handing(Pages(), empty)
    assert not hands.do()
    wait = hands.waits()
    assert wait is not None
    wait()
    assert late.waited == ["issued"] and not empty.future.done()
    late.issued = True
    assert hands.do() and empty.future.result() is None


def test_a_unit_is_done_when_the_ring_and_the_cores_are() -> None:
    pages, cores = Pages((3, 0)), Hands()
    divided = UnitWork(3, 0, [], [(3, 0), (3, 1)])
    hands = handing(pages, divided, cores=cores)
    assert hands.do() and [page for page, _ in cores.taken] == [(3, 1)] and not divided.future.done()
    up = Moment()
    cores.taken[0][1](up, None)
    found = divided.future.result()
    assert isinstance(found, Together) and set(map(id, found.events)) == {id(up), id(pages.events[3, 0])}


def test_the_cores_take_what_is_needed_last_of_what_suits_them() -> None:
    cores = Hands((5, 0))
    first, last = UnitWork(4, 0, [], [(4, 0), (4, 1)]), UnitWork(5, 1, [], [(5, 0)])
    hands = handing(Pages(), first, last, cores=cores)
    assert hands.do() and hands.do() and [page for page, _ in cores.taken] == [(4, 1), (4, 0)]


def test_the_cores_take_all_of_what_suits_them() -> None:
    """In the order in which it is needed; only the rest is fetched, and nothing is given up for it while they work."""
    cores, pages = Hands((5, 0)), Pages(free=0)
    first, last = UnitWork(4, 0, [], [(4, 0), (4, 1)]), UnitWork(5, 1, [], [(5, 0)])
    fetched: list[tuple[int, int]] = []
    pages.fetch = lambda page, **_: bool(fetched.append(page))  # type: ignore[method-assign]
    cores.hands = "host"
    hands = handing(pages, first, last, cores=cores)
    assert hands.do() and hands.do() and [page for page, _ in cores.taken] == [(4, 0), (4, 1)]
    cores.busy = True
    assert not hands.do() and set(fetched) == {(5, 0)}
    assert hands.waits() is _moment, "they are looked at again soon"


def test_what_the_cores_will_take_is_waited_for() -> None:
    """It is issued and not computed yet, and comes through no slot: nobody turns round meanwhile, or gives slots up."""
    cores, computed = Hands(), Moment(issued=True)
    cores.hands = "host"
    work = UnitWork(4, 0, [computed], [(4, 0)])  # type: ignore[list-item]
    hands = handing(Pages(free=0), work, cores=cores)
    assert not hands.do() and not cores.taken
    wait = hands.waits()
    assert wait is not None
    wait()
    assert computed.waited == ["finish"]


def test_an_error_of_the_cores_ends_the_unit() -> None:
    cores, divided = Hands(), UnitWork(3, 0, [], [(3, 0)])
    hands = handing(Pages(), divided, cores=cores)
    hands.do()
    cores.taken[0][1](None, ZeroDivisionError())
    assert isinstance(divided.future.exception(), ZeroDivisionError)


def test_what_is_waited_for_goes_home_although_it_could_later() -> None:
    """Its slot is lent, there is a free one, and nothing is on its way: nobody else would ever send it."""
    pages, again = Pages(lends=True), UnitWork(2, 0, [], [(2, 0)])
    pages.way_home.waiting[2, 0] = "leaving"
    hands = handing(pages, again)
    assert hands.do() and pages.sent == [((2, 0), "leaving")]


def test_what_somebody_reads_is_handed_out_when_it_is_computed() -> None:
    read = work(1, Moment())
    read.patient = True
    assert _in_order([read])[1] == []
    read.waits[0].over = True  # type: ignore[misc]
    assert units(_in_order([read])[1]) == [1]


def test_pages_for_later_leave_slots_to_what_is_at_hand() -> None:
    """Else pages would come and go one at a time, through the one slot that is left."""
    pages = Pages((8, 0), (8, 1), (8, 2), free=0)
    moving = Moment()
    pages.moving, pages.coming = moving.finish, deque([moving])
    pages.of_units[8] = 3
    given: list[Any] = []

    def give_up(units: Collection[int]) -> None:
        given.append(set(units))
        pages.of_units[8] -= 1

    pages.give_up = give_up  # type: ignore[method-assign]
    hands = handing(pages, UnitWork(1, 0, [], [(1, 0)]))
    assert hands.do() and given == [{1}], "three of five slots are for later"
    assert not hands.do() and len(given) == 1, "two may be"
