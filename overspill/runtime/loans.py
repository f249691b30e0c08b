"""Device memory that is planned for gradients, lent to pages while there are none.

Note [Way home later]: with lazy updates the link is busy until the next forward pass is over, and idle in the backward
pass. Copies up and down share it. So pages that are updated wait on the device, in the room that the gradients of
updated units left, and go home in the backward pass, before new gradients need the room; until then most of the link is
for pages that come up, which the model waits for. Pages go home earlier as far as there is no such room.

Whoever needs room for a gradient waits until enough is given back, which seldom takes long: pages go home faster than
gradients come.
"""

import logging
import threading

import torch

log = logging.getLogger("overspill")


class Loans:
    """Counts the bytes of gradients, and those that are lent, in all threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._total = 0
        """Bytes planned for gradients."""
        self._most = 0
        """Bytes that may be lent: less than all, for there are activations."""
        self._gradients = 0
        self._lent = 0
        self._wanted = 0
        """Bytes that somebody waits for, or will."""
        self.paused = False
        """Nothing is lent, while activations are measured."""
        self.stream: torch.cuda.Stream | None = None
        """That gradients are allocated for."""

    def allow(self, total: int, most: int) -> None:
        """By a plan, which has so many bytes for gradients. Nothing is lent just now."""
        self._total, self._most = total, most

    def end(self, reason: str = "") -> None:
        """Nothing is lent any more, and nobody waits for what was."""
        with self._changed:
            if reason and self._most:
                log.info("pages go home at once from now on: %s", reason)
            self._most = self._lent = 0
            self._changed.notify_all()

    # --- pages

    def room(self) -> int:
        """Bytes that could be lent now."""
        if self.paused or self._wanted:
            return 0
        return max(0, min(self._most, self._total - self._gradients) - self._lent)

    @property
    def allowed(self) -> bool:
        return self._most > 0

    def take(self, nbytes: int) -> bool:
        with self._changed:
            if nbytes > self.room():
                return False
            self._lent += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        with self._changed:
            self._lent = max(0, self._lent - nbytes)
            self._changed.notify_all()

    # --- gradients

    def want(self, nbytes: int) -> None:
        """So many bytes more will be asked for soon, or fewer."""
        with self._changed:
            self._wanted += nbytes

    def add_gradients(self, nbytes: int) -> None:
        """They are about to have memory."""
        with self._changed:
            self._wanted += nbytes
            self._changed.wait_for(lambda: not self._lent or self._gradients + nbytes + self._lent <= self._total)
            self._wanted -= nbytes
            self._gradients += nbytes

    def remove_gradients(self, nbytes: int) -> None:
        with self._changed:
            self._gradients -= nbytes
