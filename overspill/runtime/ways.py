"""Streams of their own for who hands out pages, and the order between them.

Note [Gaps]: as long as a copy to the host is queued behind another one, the GPU does not look at those of other
streams: a single number that the model reads waited until all pages were home, however few were queued at a time. So
after every few pages the stream waits for a short kernel elsewhere, which lets the others in, at the same rate
(docs/log.md). Copies to the device do the same: those of another stream came up when the last page was there.
"""

from collections.abc import Sequence

import torch

from overspill.program import Lane, Op
from overspill.runtime.lanes import DEVICE_CYCLES_PER_SECOND, Lanes, Work
from overspill.tiers import Event, in_one_go, recorded

When = Event | None
"""The event behind what is awaited; None: it is over, as everything is at once without a GPU."""
GAP_PAGES = 3
GAP_SECONDS = 20e-6
"""See Note [Gaps]."""


class Ways:
    """Streams of its own, up, down and for updates: what others queued on theirs may wait for the model. Two threads
    may put something on the same one: what each of them does comes behind what it waits for, and maybe behind more."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._streams: dict[Lane, torch.cuda.Stream] = {}
        self._since_gap = 0
        if lanes.device.type == "cuda":
            # Updates are short, and whole copies wait for them: they go before what computes meanwhile.
            for lane, priority in ((Lane.UP, 0), (Lane.UPDATE, -1), (Lane.DOWN, 0), (Lane.PAGES, -1)):
                self._streams[lane] = torch.cuda.Stream(lanes.device, priority=priority)

    def put(self, op: Op, work: Work, waits: Sequence[When], copies: bool = False) -> When:
        """On the stream of the op's lane, behind some events. `copies`: it is but copies by CUDA's driver."""
        if not self._streams:
            self._lanes.timed(op.lane, op, work)
            return None
        stream = self._streams[op.lane]
        if copies and not self._lanes.watches(op.kind):
            return in_one_go(stream, waits, work)
        for event in waits:
            if event is not None:
                event.wait(stream)
        torch.cuda.set_stream(stream)
        self._lanes.timed(op.lane, op, work)
        return recorded(stream)

    def let_others_in(self) -> None:
        """See Note [Gaps]."""
        self._since_gap += 1
        if not self._streams or self._since_gap < GAP_PAGES:
            return
        self._since_gap = 0
        aside, down = self._streams[Lane.PAGES], self._streams[Lane.DOWN]
        recorded(down).wait(aside)
        torch.cuda.set_stream(aside)
        torch.cuda._sleep(int(GAP_SECONDS * DEVICE_CYCLES_PER_SECOND))
        recorded(aside).wait(down)
