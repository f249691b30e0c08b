"""Calls of CUDA's driver: in whose context, what is refused, what goes by torch. Without a GPU, by a stand-in."""

import contextlib
import ctypes
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overspill.native import library
from overspill.tiers import driver, in_one_go, recorded
from overspill.tiers.driver import Together


class Driver:
    """Notes every call, with the device that was current; refuses where there is no context."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.current, self.bound, self.codes = 0, {0, 1}, dict[str, list[int]]()
        self.events, self.played = 6, list[list[int]]()

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> int:
            if self.current not in self.bound:
                return 201
            self.calls.append((name, self.current))
            if name == "create":
                self.events += 1
                given[0]._obj.value = self.events
            if name == "play":
                self.played.append(list(given[0]))
            return (self.codes.get(name) or [0]).pop(0)

        return call

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before

    def bind(self, device: torch.device) -> Any:
        return SimpleNamespace(query=lambda: self.bound.add(device.index))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(driver, "_driver", lambda: made)
    monkeypatch.setattr(driver, "_unused", defaultdict(list))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: made.current)
    monkeypatch.setattr(torch.cuda, "device", made.device)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", made.bind)
    return made


def stream(device: int = 0) -> Any:
    return SimpleNamespace(device=torch.device("cuda", device), cuda_stream=0)


def test_calls_are_made_in_the_context_of_the_stream(cuda: Driver) -> None:
    event = recorded(stream(1))
    event.wait(stream(0))
    event.wait(stream(1))
    assert cuda.calls == [("create", 1), ("record", 1), ("wait", 0), ("wait", 1)] and cuda.current == 0


def test_a_thread_without_a_context_gets_one(cuda: Driver) -> None:
    cuda.bound.clear()
    event = recorded(stream())
    assert cuda.calls == [("create", 0), ("record", 0)]
    cuda.bound.clear()
    cuda.codes["query"] = [600, 0]
    assert not event.query() and event.query()


def test_what_is_refused_is_an_error(cuda: Driver) -> None:
    event = recorded(stream())
    for name, call in (
        ("wait", lambda: event.wait(stream())),
        ("query", event.query),
        ("synchronize", event.synchronize),
    ):
        cuda.codes[name] = [700]
        with pytest.raises(RuntimeError, match="error 700"):
            call()


def test_an_event_that_nobody_has_is_used_again(cuda: Driver) -> None:
    other, event = recorded(stream()), handle(recorded(stream()))
    again = recorded(stream())
    assert handle(again) == event != handle(other) and cuda.events == 8
    elsewhere = recorded(stream(1))
    assert handle(elsewhere) == cuda.events == 9, "of another device"


def handle(event: Any) -> int:
    """Nobody has the event itself after this."""
    return int(event._handle)


def test_a_way_is_put_on_its_stream_in_one_go(cuda: Driver) -> None:
    first, second = recorded(stream()), recorded(stream())
    source, to = torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    cuda.calls.clear()
    event = in_one_go(stream(), [first, None, Together((second, first))], lambda: _copied(to, source))
    assert cuda.calls == [("create", 0), ("play", 0)], "one event is new, and all else together"
    copied = [1, to.data_ptr(), source.data_ptr(), 8]
    assert cuda.played == [[0, 7, 0, 0, 0, 8, 0, 0, 0, 7, 0, 0, *copied, 2, 9, 0, 0]]
    event.wait(stream())
    assert cuda.calls[-1] == ("wait", 0), "from now on at once"


def _copied(to: torch.Tensor, source: torch.Tensor) -> None:
    assert driver.copy(to, source)


def test_what_fails_on_the_way_leaves_nothing_collected(cuda: Driver) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_one_go(stream(), [], fail)
    cuda.codes["play"] = [700]
    with pytest.raises(RuntimeError, match="error 700"):
        in_one_go(stream(), [], lambda: None)
    recorded(stream()).wait(stream())
    assert cuda.calls[-1] == ("wait", 0)


@pytest.mark.parametrize("native", [True, False])
def test_calls_are_made_in_their_order(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the native library, and one after the other without it; the first error ends it."""
    if native and library() is None:
        pytest.skip("no native library: there was no compiler at install")
    if not native:
        monkeypatch.setattr(driver, "library", lambda: None)
    made: list[tuple[Any, ...]] = []

    def noting(name: str, *kinds: Any) -> Any:
        def call(*given: Any) -> int:
            made.append((name, *given))
            return 700 if name == "record" and given[0] == 99 else 0

        return ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(call)

    at, size, flags = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
    stand_in: Any = SimpleNamespace(
        cuStreamWaitEvent=noting("wait", at, at, flags),
        cuMemcpyAsync=noting("copy", at, at, size, at),
        cuEventRecord=noting("record", at, at),
    )
    play: Callable[..., int] = driver._player(stand_in)
    assert play([0, 5, 0, 0, 1, 10, 20, 30, 2, 6, 0, 0], 3) == 0
    assert made == [("wait", 3, 5, 0), ("copy", 10, 20, 30, 3), ("record", 6, 3)]
    assert play([2, 99, 0, 0, 0, 5, 0, 0], 3) == 700 and len(made) == 4


def test_several_events_are_over_together(cuda: Driver) -> None:
    both = Together((recorded(stream()), recorded(stream())))
    cuda.codes["query"] = [0, 600]
    assert not both.query() and both.query()
    cuda.calls.clear()
    both.wait(stream())
    both.synchronize()
    assert [name for name, _ in cuda.calls] == ["wait", "wait", "synchronize", "synchronize"]


def test_without_the_library_torch_does_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(driver, "LIBRARY", "libno-such-library.so.1")
    driver._driver.cache_clear()
    try:
        with caplog.at_level("INFO", "overspill"):
            assert not driver.copy(torch.zeros(4), torch.ones(4))
        assert "go by torch" in caplog.text
    finally:
        driver._driver.cache_clear()
