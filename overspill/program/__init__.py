"""The program: a pure function from (state, event) to (state, ops). Simulator and executor fold the same one.

Events say what the training loop does: it *needs* units, a *gradient* arrives, a *step* makes updates due, or
everything must *settle*. Ops say what to do about it: on which lane, on which bytes, and after which earlier ops.
The function holds all policy (what leaves, what is fetched ahead, how many pages are in flight); whoever runs
the ops holds none.

Note [Waiting]: an op waits for the latest op of each key in `waits`. A key that never ran, or whose work is long
done, costs nothing. Ops on the compute lane happen in the order of the list, so they never name one another.

Note [Expected order]: `expected` is the order of needs of one step, predicted first (forward, then its mirror),
then learned: what was seen between two steps is expected between the next two. A need that is not where the
cursor points moves the cursor to its next place in the list, or is simply served on demand.

Note [Passing bytes]: pages pass through a ring of a few slots on the device. Where room is so scarce that there is one
slot only, gradients on their way home and pages are never there together: the larger of the two is all that they need.

Note [Never far ahead]: copies are carried out in the order in which they are handed out, whoever else has one to make:
a copy that was queued long before it can run holds up a small one that the model itself waits for. So a page is handed
out only when its slot is free, which is when the page that was there before is home, or not long before, and when few
are on their way. Whoever needs a unit waits, on the host, until all of its pages are handed out; never until they are
done.

Note [Earliest deadline first]: where something passes the pages of whole units through the ring, all updates are handed
out to it when they are due, also those of states that live on the device, with the place of the unit's next use
(`deadline`); of what is computed, what is needed first goes first. When all of that is on its way, state that will be
updated next (`next_updates`) is fetched into the slots that are free. Which page is next is decided there: an event of
the program for every page took too long.

Note [Consumed gradients]: where updates begin in the backward pass, and there is room for the gradients of a few units
only, the compute lane comes behind the oldest updates before more gradients are made, and their gradients are let go.
So the backward pass is at most as fast as updates are.

Note [Ranks]: over several ranks, ops on the comm lane are collectives: every rank must run the same ones in the same
order. All ranks fold the same function, so they do as long as they see the same events; where they do not (a unit that
one of them does not use), they notice before the ops run, and those that have no use for a collective *join* it.

words.py: kinds, lanes, ops, events, state. react.py: the function. weights.py: what is needed, fetched, gathered,
released. updates.py: pages and steps. gradients.py: their way home. passing.py: what passes through the device.
May import: layer 0 only.
"""

from overspill.program.gradients import WAITING
from overspill.program.react import react, start
from overspill.program.updates import deadline, next_updates
from overspill.program.words import (
    Begin,
    Due,
    Event,
    Flush,
    Grad,
    Join,
    Key,
    Kind,
    Lane,
    Mark,
    Need,
    Op,
    Program,
    Settle,
    State,
    Step,
)

__all__ = [
    "WAITING",
    "Begin",
    "Due",
    "Event",
    "Flush",
    "Grad",
    "Join",
    "Key",
    "Kind",
    "Lane",
    "Mark",
    "Need",
    "Op",
    "Program",
    "Settle",
    "State",
    "Step",
    "deadline",
    "next_updates",
    "react",
    "start",
]
