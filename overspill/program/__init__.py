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

Note [Passing bytes]: gradients on their way home and pages staged for updates are never on the device together, so
the larger of the two is all the room that both need.

Note [Ranks]: over several ranks, ops on the comm lane are collectives: every rank must run the same ones in the same
order. All ranks fold the same function, so they do as long as they see the same events; where they do not (a unit that
one of them does not use), they notice before the ops run, and those that have no use for a collective *join* it.

words.py: kinds, lanes, ops, events, state. weights.py: what is needed, fetched, gathered, released. updates.py: pages
and steps. gradients.py: their way home. May import: layer 0 only.
"""

from overspill.program.gradients import WAITING
from overspill.program.react import react, start
from overspill.program.words import (
    Begin,
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
    "react",
    "start",
]
