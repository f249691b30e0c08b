"""Waits for collectives, and finds out who is to blame when one fails or does not end; see Note [signs of life]."""

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from overspill.comm.pulse import Pulse, StoreGone
from overspill.comm.witness import Seat, Verdict, Witness
from overspill.errors import RankError

_GLANCE = timedelta(seconds=1)
_DECIDE = 8.0
_SILENT_AFTER_ERROR = 5.0
_SILENT_WHILE_WAITING = 60.0
_FIRST_WARNING, _NEXT_WARNING = 10.0, 30.0

log = logging.getLogger("overspill")

What = str | Callable[[], str]


class Watch:
    """Waits, warns, and raises a RankError that names the others. After the first one, every call raises it again."""

    def __init__(self, pulse: Pulse, seat: Seat, timeout: float) -> None:
        self.timeout = timeout
        self.failed: RankError | None = None
        self._pulse = pulse
        self._seat = seat
        self._witness = Witness(pulse, seat)
        self._lock = threading.Lock()

    @property
    def where(self) -> str:
        """The last meeting of this rank."""
        return self._pulse.where

    def arrive(self) -> None:
        """Wait until everyone has posted a beat, so that making groups takes no time, and that all can be named."""
        begin = time.monotonic()
        warn = begin + _FIRST_WARNING
        while True:
            try:
                missing = [place for place, here in enumerate(self._pulse.arrived()) if not here]
                if not missing:
                    self._witness.observe()
                    return
            except StoreGone as error:
                raise self._blame({}, "the start", gone=True) from error
            if time.monotonic() > begin + self.timeout:
                raise self._blame(dict.fromkeys(missing, f"did not come within {self.timeout:.0f} s"), "the start")
            if time.monotonic() > warn:
                warn += _NEXT_WARNING
                log.warning("waiting for %s to call prepare", self._witness.names(missing))
            time.sleep(0.02)

    def enter(self, where: str) -> None:
        """This rank comes to a meeting."""
        if self.failed is not None:
            raise self.failed
        self._pulse.where = where
        self._pulse.meets += 1

    def met(self) -> None:
        """Everyone came to it."""
        self._witness.met()

    def wait(self, work: Any, what: What) -> None:
        """Wait for a collective of gloo. `what` says which, for messages."""
        try:
            if _ended(work) or self._wait_long(work, what):
                return
        except RuntimeError as error:
            raise self.broken(error, what) from error

    def broken(self, error: RuntimeError, what: What) -> RankError:
        """The error to raise for a collective that failed: looks around for the one who is to blame."""
        if self.failed is not None:
            return self.failed
        end = time.monotonic() + _DECIDE
        while time.monotonic() < end:
            try:
                dead = self._witness.dead(self._witness.observe(), _SILENT_AFTER_ERROR)
            except StoreGone:
                return self._blame({}, what, gone=True)
            except Verdict as verdict:
                return self._sentence(verdict.text, what)
            if dead:
                return self._blame(dead, what)
            time.sleep(0.1)
        reason = str(error).splitlines()[0][:300]
        return self._fail(
            f"expected all ranks at {_say(what)}, found that a connection broke though every rank shows signs of life "
            f"({reason}); look at the output of the other ranks, and start again from the last checkpoint"
        )

    def diverged(self, others: Sequence[int], what: What) -> RankError:
        """These places called something else than we did."""
        with contextlib.suppress(StoreGone, Verdict):
            time.sleep(_GLANCE.total_seconds() * 1.5)  # until their beats say where they are
            self._witness.observe()
        return self._fail(
            f"expected all ranks at {_say(what)}, found {self._witness.told(others)}; let every rank do the "
            "same calls in the same order"
        )

    def patrol(self, pending: Callable[[], bool]) -> bool:
        """Whether somebody is dead while a collective is pending that nobody waits for; from then on all calls fail."""
        if self.failed is None and pending():
            self._inspect(lambda: f"a collective after {self._pulse.where}", pending)
        return self.failed is not None

    def leave(self, reason: str) -> None:
        """Tell the others why this rank takes part no more."""
        self._pulse.leave(reason)

    def _wait_long(self, work: Any, what: What) -> bool:
        begin = time.monotonic()
        warn = begin + _FIRST_WARNING
        while not _ended(work):
            error = self._inspect(what, lambda: not _ended(work))
            if error is not None:
                raise error
            now = time.monotonic()
            if now > begin + self.timeout:
                late = self._witness.behind()
                raise self._blame(dict.fromkeys(late, f"did not come within {self.timeout:.0f} s, though alive"), what)
            if now > warn:
                warn += _NEXT_WARNING
                log.warning(
                    "rank %d has waited %.0f s at %s for %s",
                    *(
                        self._seat.world_ranks[self._seat.place],
                        now - begin,
                        _say(what),
                        self._witness.told(self._witness.behind()),
                    ),
                )
        return True

    def _inspect(self, what: What, pending: Callable[[], bool]) -> RankError | None:
        """While waiting: the error, if somebody will never come."""
        if self.failed is not None:
            return self.failed
        if self._pulse.left is not None:
            return self._fail(
                f"expected this rank to stay for {_say(what)}, found that {self._pulse.left}; start again from "
                "the last checkpoint"
            )
        try:
            dead = self._witness.dead(self._witness.observe(), _SILENT_WHILE_WAITING)
        except StoreGone:
            dead = self._witness.gone()
        except Verdict as verdict:
            return self._sentence(verdict.text, what)
        # Whoever has left may have done its part before, and what it sent may just have come.
        return self._blame(dead, what) if dead and pending() else None

    def _blame(self, dead: dict[int, str], what: What, gone: bool = False) -> RankError:
        """Post a verdict, unless there is one, and follow it."""
        ranks = self._seat.world_ranks
        if gone:
            dead = self._witness.gone()
        found = [
            f"rank {ranks[place]} {how} (last seen at {self._witness.last_seen(place)})" for place, how in dead.items()
        ]
        if gone and self._seat.keeper not in {ranks[place] for place in dead}:
            keeper = "torchrun" if self._seat.keeper is None else f"rank {self._seat.keeper}"
            found.append(f"{keeper}, which keeps the store, died or ended")
        cure = self._witness.names(list(dead)) if dead else "the other ranks"
        verdict = json.dumps([", ".join(found), cure])
        with contextlib.suppress(StoreGone):
            verdict = self._pulse.post(verdict)
        return self._sentence(verdict, what)

    def _sentence(self, verdict: str, what: What) -> RankError:
        found, culprits = json.loads(verdict)
        late = "did not come within" in found
        cure = "raise OVERSPILL_TIMEOUT (seconds) if it was only slow, else " if late else ""
        return self._fail(
            f"expected all ranks at {_say(what)}, found that {found}; {cure}look at the output of {culprits} for the "
            "cause, and start again from the last checkpoint"
        )

    def _fail(self, text: str) -> RankError:
        with self._lock:
            if self.failed is None:
                self.failed = RankError(text)
                self._pulse.leave("it stopped because of another rank")
        return self.failed


def _ended(work: Any) -> bool:
    """Wait a second; whether it ended. Its own error is raised."""
    try:
        work.wait(_GLANCE)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises again, unless it ended well just after the second
    return True


def _say(what: What) -> str:
    return what if isinstance(what, str) else what()
