"""State dicts that torch loads into the model, and what is left of a load that broke off.

Note [Half a state dict]: torch copies one parameter after the other. What is missing or of another shape it leaves as
it is, goes on, and raises at the end: then everybody knows what was loaded, and may go on, as with torch alone. A load
that breaks off before that (Ctrl-C, an exception of a hook) leaves a mixture, with which nobody may go on until the
same modules, or the whole model, were loaded to the end. Nothing of ours is called when it breaks off; so from its
first change on the model counts as mixed, for all but those whom the load itself calls, until it has ended.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from torch import nn

from overspill.runtime.executor import WEIGHTS, Executor, Mixed

log = logging.getLogger("overspill")

LOAD = nn.Module.load_state_dict.__code__


class Loads:
    """Hears of loads by hooks of every module; see Note [Half a state dict]."""

    def __init__(self, model: nn.Module, executor: Executor, look: Callable[[], object]) -> None:
        self._model = model
        self._look = look
        self._executor = executor
        executor.reloads = self._running
        self._missing: list[str] | None = None
        """torch's own list of what one call of load_state_dict misses: it tells calls from each other."""
        self._errors: list[str] = []
        self._first = self._latest = model
        self._before: Mixed | None = None
        """What an earlier load left."""

    def begin(self, module: nn.Module, missing: list[str], errors: list[str]) -> None:
        """What a module has itself is loaded next, and then its children."""
        if missing is not self._missing:
            self._missing, self._errors, self._first = missing, errors, module
            self._before = self._executor.mixed.get(WEIGHTS)
            # Updates that are kept for later belong to what the model has now, not to what is loaded.
            self._look()
        elif self._latest._buffers or self._latest._parameters:
            # Of parameters that are open nothing else is heard.
            self.changing()
        self._latest = module

    def end(self, module: nn.Module, missing: list[str]) -> None:
        """A module is loaded, with its children."""
        if missing is not self._missing or module is not self._first:
            return
        whole = not missing and not self._errors and module in (self._model, self._before and self._before.part)
        if self._before is None or whole:
            self._executor.mixed.pop(WEIGHTS, None)
        self._missing = None

    def changing(self) -> None:
        """Parameters are used, perhaps by a load."""
        if self._missing is None:
            return
        if not self._running():
            # One that broke off before it had changed anything.
            self._missing = None
            return
        same = self._before is None or self._before.part is self._first
        self._executor.mixed[WEIGHTS] = Mixed(
            "that load_state_dict broke off before its end: what the model has is part of what it had before, and part "
            "of what was to be loaded",
            self._first if same else None,
        )

    def _running(self) -> bool:
        """Whether the caller is that call, and not the load of another model, which may read this one's parameters."""
        frame: FrameType | None = sys._getframe() if self._missing is not None else None
        while frame is not None:
            if frame.f_code is LOAD and any(value is self._missing for value in frame.f_locals.values()):
                return True
            frame = frame.f_back
        return False


@contextmanager
def loading(executor: Executor, *what: str) -> Iterator[Callable[[str], None]]:
    """Weights, states or both are loaded by us, into whatever mixture they are. Gives what is to be called before
    anything changes, with what is found if that does not come to its end."""
    before = left = executor.mixed
    executor.mixed = {}

    def begun(found: str) -> None:
        nonlocal left
        left = before | dict.fromkeys(what, Mixed(found))

    try:
        yield begun
        left = {key: value for key, value in before.items() if key not in what}
    finally:
        executor.mixed = left


@contextmanager
def giving_back(executor: Executor) -> Iterator[None]:
    """The model is closed, even with what a backward pass left that broke off: whoever closes it in a `finally` shall
    hear of the error that broke it off."""
    left = executor.mixed
    if left and all(mixed.closes for mixed in left.values()):
        log.warning("found %s: it is given back as it is", next(iter(left.values())).found)
        executor.mixed = {}
    try:
        yield
    except BaseException:
        executor.mixed = left
        raise
