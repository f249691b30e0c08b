"""What nodes of a backward pass ask for."""

import torch

from overspill.program import State
from overspill.runtime.executor import Executor
from overspill.runtime.turns import Turns


class Behind:
    """What the running backward node, or the last one, asked for. All of a unit's nodes ask for it in turn."""

    def __init__(self, executor: Executor, turns: Turns) -> None:
        self.units: tuple[int, ...] = ()
        self._executor = executor
        self._turns = turns
        self._left: State | None = None
        """What the program remembered when they were there."""

    def there(self) -> None:
        """What was asked for is there."""
        self._left = self._executor.state

    def goes_on(self, units: tuple[int, ...]) -> bool:
        """Whether a node asks for what the last one did, and nothing happened since: as nearly always."""
        still = self._executor.state is self._left and units == self.units
        return still and self._turns.taken and not torch.is_grad_enabled()
