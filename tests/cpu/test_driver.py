"""Calls of CUDA's driver: in whose context, what is refused, what goes by torch. Without a GPU, by a stand-in."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overspill.tiers import driver, recorded
from overspill.tiers.driver import Together


class Driver:
    """Notes every call, with the device that was current; refuses where there is no context."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.current, self.bound, self.codes = 0, {0, 1}, dict[str, list[int]]()

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> int:
            if self.current not in self.bound:
                return 201
            self.calls.append((name, self.current))
            if name == "create":
                given[0]._obj.value = 7
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


def test_an_event_is_given_back(cuda: Driver) -> None:
    event = recorded(stream())
    del event
    assert cuda.calls[-1] == ("destroy", 0)


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
