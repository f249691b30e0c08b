"""The runtime: runs the ops that the program asks for, and makes the user's model and loop raise the events.

engine.py     one prepared model, put together; parts.py builds what it is made of
optimizer.py  the optimizer that the user gets back
hooks.py      every hook there is: module calls, autograd nodes, gradients, state dicts
residency.py  which units are open and which may not leave; door.py: closed and open parameters; copies.py: state dicts
gradients.py  generations of gradients; handle.py: the light tensor that stands in `p.grad`
updates.py    runs the user's optimizer on one page; states.py: what it keeps, in its homes
executor.py   folds the program over events; lanes.py: streams and threads that run ops; weights.py: ops on weights
building.py   keeps the parameters of a model that is being built, and is larger than memory
precision.py, watch.py, measures.py: inputs of the root call; a model that was changed; what a step took

Holds no policy: what moves when is decided in program.py. May import: units, tiers, kernels, comm, program, layer 0;
never plan.
"""
