"""What overspill raises when the user can do something about it.

Every message says what was expected, what was found, and what to do.
"""


class OverspillError(ValueError):
    """Any error that overspill raises on purpose."""


class BudgetError(OverspillError):
    """Something does not fit into the memory or the budget that is there. `least`: bytes that the refused tier must
    have, where they are known."""

    def __init__(self, message: str, least: int = 0) -> None:
        super().__init__(message)
        self.least = least


class TierError(OverspillError):
    """Storage is missing, unwritable, full or torn."""


class OptionError(OverspillError):
    """An option has a value that is not allowed, or that does not go with another one."""


class StateError(OverspillError):
    """Something was used in the wrong state: a closed model, a step without a backward."""


class ModelError(OverspillError):
    """The model or the optimizer is not supported, or was changed behind our back."""


class UnknownOptionError(OptionError, TypeError):
    """A keyword that does not exist; a TypeError too, as Python's own would be."""


class RankError(OverspillError):
    """A rank died, left, never came, or went another way than the others."""
