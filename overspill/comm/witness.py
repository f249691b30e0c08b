"""What this rank knows of the others: where they were last seen, and which of them are dead."""

import dataclasses
import time
from collections.abc import Sequence

from overspill.comm.pulse import Beat, Picture, Pulse, is_gone

_NAMED = 8


class Verdict(Exception):
    """Somebody has already decided."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


@dataclasses.dataclass(frozen=True, slots=True)
class Seat:
    """Where this rank sits among all."""

    place: int
    world_ranks: tuple[int, ...]
    keeper: int | None
    """The world rank whose process keeps the store."""


class Witness:
    """Looks at the beats of the others, see Note [signs of life]."""

    def __init__(self, pulse: Pulse, seat: Seat) -> None:
        self.known: tuple[Beat, ...] = ()
        self._pulse = pulse
        self._seat = seat
        self._since: dict[int, tuple[int, float]] = {}  # place -> its counter, and when it was first seen so
        self._done = (0, "the start")

    def met(self) -> None:
        """Everyone came to the last meeting."""
        self._done = (self._pulse.meets, self._pulse.where)

    def observe(self) -> Picture:
        """Read the beats; Verdict if somebody has already decided, StoreGone if the store does not answer."""
        picture = self._pulse.look()
        if picture.verdict is not None:
            raise Verdict(picture.verdict)
        self.known = picture.beats
        for place, beat in enumerate(picture.beats):
            if self._since.get(place, (-1, 0.0))[0] != beat.count:
                self._since[place] = (beat.count, time.monotonic())
        return picture

    def dead(self, picture: Picture, silent: float) -> dict[int, str]:
        """Who is dead, and how; `silent`: after how many seconds without a beat."""
        found = {}
        for place, beat in enumerate(picture.beats):
            quiet = time.monotonic() - self._since[place][1]
            if place == self._seat.place:
                continue
            if beat.left is not None:
                found[place] = f"left: {beat.left}"
            elif is_gone(beat):
                found[place] = "died"
            elif quiet > silent:
                found[place] = f"died or cannot be reached (no sign of life for {quiet:.0f} s)"
        return found

    def behind(self) -> list[int]:
        """Whom we wait for: who was seen at fewer meetings, else anybody."""
        others = [place for place in range(len(self.known)) if place != self._seat.place]
        return [place for place in others if self.known[place].meets < self._pulse.meets] or others

    def last_seen(self, place: int) -> str:
        """Its last known meeting."""
        # A beat is up to a second old; the last meeting that all came to may be younger.
        beat = self.known[place] if place < len(self.known) else None
        return beat.where if beat is not None and beat.meets >= self._done[0] else self._done[1]

    def names(self, places: Sequence[int]) -> str:
        """Their world ranks, as words."""
        ranks = [str(self._seat.world_ranks[place]) for place in places]
        more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
        return f"rank{'s' * (len(ranks) > 1)} " + ", ".join(ranks[:_NAMED]) + more

    def told(self, places: Sequence[int]) -> str:
        """Their world ranks and where they were, as words."""
        more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
        ranks = self._seat.world_ranks
        return ", ".join(f"rank {ranks[p]} (last seen at {self.last_seen(p)})" for p in places[:_NAMED]) + more

    def gone(self) -> dict[int, str]:
        """Who is dead as far as this machine can tell without the store."""
        return {place: "died" for place, beat in enumerate(self.known) if is_gone(beat)}
