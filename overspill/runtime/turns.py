"""One thread at a time, and one stream.

Two threads that use one model at once would take each other's weights away. Taking turns is fine. So whenever another
thread comes than the last time, we look at what that one is doing now. torch runs the backward pass of a GPU's nodes in
threads of its own: these work for the thread that called backward, and Python did not start them.

Note [The last stream]: a plain step is over for every stream that waited for it. Ours is over for the stream that used
the weights first: it waited for their update, for their way here, and for who had their memory before. So a stream that
uses the model comes behind the one that used it last, and thereby behind all that this one waited for.
"""

import sys
import threading
from types import CodeType, FrameType

import torch
from torch import nn
from torch.autograd import graph

from overspill.errors import StateError
from overspill.runtime.backward import in_backward
from overspill.tiers import streams
from overspill.trace import Recorder

BACKWARD = frozenset({graph._engine_run_backward.__code__})
CALL = frozenset({nn.Module._call_impl.__code__})


class Turns:
    """Knows who used the model last. `depths`: how many calls of each unit are running, at any time."""

    def __init__(self, depths: list[int], recorder: Recorder, device: torch.device) -> None:
        self._depths = depths
        self._recorder = recorder
        self._last = self._took = threading.get_ident()
        self._device = device
        self._stream = streams.current(device)

    def follow(self) -> None:
        """The current stream uses the model, or did until now. See Note [The last stream]."""
        stream = streams.current(self._device)
        if stream != self._stream:
            streams.follow(self._device, stream, self._stream)
            self._stream = stream

    def take(self) -> None:
        """It is this thread's turn now, unless another one is in the middle of something."""
        self._take_thread()
        self._took = threading.get_ident()
        self.follow()

    @property
    def taken(self) -> bool:
        """Whether this thread was the last to take its turn, on the current stream."""
        return threading.get_ident() == self._took and streams.current(self._device) == self._stream

    @property
    def mine(self) -> bool:
        """Whether it is this thread's turn, whatever torch's own threads do for it."""
        return threading.get_ident() == self._last

    def _take_thread(self) -> None:
        me = threading.get_ident()
        if me == self._last or _of_torch():
            return
        if _inside(sys._current_frames().get(self._last), BACKWARD | (CALL if any(self._depths) else frozenset())):
            raise StateError(
                "expected one thread at a time to use a prepared model, found another one in the middle of a forward "
                "or backward pass; let threads take turns, or hand copies (model.state_dict()) to the others"
            )
        self._last = me

    def nested(self, units: tuple[int, ...]) -> bool:
        """Whether a call is inside of another one of its unit, as most are: then all that is to be done is done."""
        if len(units) != 1 or not self._depths[units[0]] or self._recorder.on:
            return False
        self.take()
        self._depths[units[0]] += 1
        return True

    def unnest(self, units: tuple[int, ...]) -> None:
        """Such a call ended."""
        self.follow()
        self._depths[units[0]] -= 1


def _of_torch() -> bool:
    return in_backward() and isinstance(threading.current_thread(), threading._DummyThread)


def _inside(frame: FrameType | None, codes: frozenset[CodeType]) -> bool:
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back
    return False


def calls_of(model: nn.Module) -> int:
    """How many calls of its modules this thread is in."""
    own, found, frame = {id(module) for module in model.modules()}, 0, sys._getframe()
    while frame is not None:
        found += frame.f_code in CALL and id(frame.f_locals.get("self")) in own
        frame = frame.f_back  # type: ignore[assignment]
    return found
