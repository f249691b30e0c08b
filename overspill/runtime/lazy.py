"""update="lazy": updates are due with their step. Beside it what whoever begins them earlier must know how to do."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from overspill.runtime.steps import Jobs


class Early(Protocol):
    """What the engine tells whoever begins updates."""

    takes: bool
    """Whether updates that have begun took the gradients of the step to come."""
    strict: bool
    """Whether units may be refused whose updates are not pending."""
    waits: bool
    """Whether it waits for backward passes."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside are not the last before a step."""

    def check(self, units: Iterable[int] | None = None) -> None:
        """Refuse a look at units whose updates have begun, before the step that they wait for; None: at any unit."""

    def passing(self) -> None:
        """A backward pass of what the model gave begins."""

    def arrived(self, unit: int, param: int) -> None:
        """A gradient is there, with all that this backward pass adds to it."""

    def step(self) -> frozenset[int]:
        """The units whose updates have begun."""

    def zeroed(self) -> bool:
        """Gradients are dropped, perhaps without a step. Whether what is kept of earlier steps is due with that."""

    def exchange(self, jobs: Jobs, count: int) -> Jobs:
        """What a step takes, which is not refused any more; what is due now instead. `count`: of steps, with this."""

    def flush(self) -> Jobs:
        """What is kept of earlier steps is due now."""


class Lazy:
    """All updates are due with their step."""

    takes = strict = waits = False

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def check(self, units: Iterable[int] | None = None) -> None: ...
    def passing(self) -> None: ...
    def arrived(self, unit: int, param: int) -> None: ...
    def step(self) -> frozenset[int]:
        return frozenset()

    def zeroed(self) -> bool:
        return False

    def exchange(self, jobs: Jobs, count: int) -> Jobs:
        return jobs

    def flush(self) -> Jobs:
        return {}
