"""The runtime: runs the ops that the program asks for, and makes the user's model and loop raise the events.

lanes.py      streams and threads that run ops in order; tickets
executor.py   folds the program over events and dispatches its ops
weights.py    ops on weights: fetch, store, release, open
gradients.py  generations of gradients and the light handle that stands in `p.grad`
door.py       closed and open parameters: any Python use of a parameter sees its current value
hooks.py      every hook there is: module calls, autograd nodes, gradients, state dicts
updates.py    runs the user's optimizer on one page; pending updates
engine.py     one prepared model: the parts above, put together
optimizer.py  the optimizer that the user gets back

Holds no policy: what moves when is decided in program.py. May import: units, tiers, kernels, comm, program, layer 0;
never plan.
"""
