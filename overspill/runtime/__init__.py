"""The runtime: runs the ops that the program asks for, and makes the user's model and loop raise the events.

engine.py     one prepared model, put together; parts.py builds what it is made of
optimizer.py  the optimizer that the user gets back
hooks.py      every hook there is: module calls, autograd nodes (behind.py: what they ask for), gradients, state dicts
residency.py  which units are open and which may not leave; door.py: closed and open parameters; copies.py, loads.py:
              state dicts that are made and loaded
generation.py one gradient; gradients.py: all of them; gradient_bytes.py: where their bytes are; norms.py;
              passing.py: their ops; coming.py: those that autograd just made; backward.py: whether it is at it;
              rooms.py: their device memory; loans.py: that memory, lent to pages while there are none; handle.py: the
              light tensor that stands in `p.grad`; scaling.py: the loss scale of fp16
ranks.py      agrees with other ranks on what is next; rounds.py: the end of backward passes and steps; reduction.py,
              reduced.py: gradients averaged over ranks; collect.py: what is divided, whole; buffers.py: theirs
updates.py    updates that are due; kernel_update.py by our own rules (addressing.py: where their arrays are),
              own_update.py by the user's optimizer
pages.py      pages of state in their homes; states.py: what the user's optimizer keeps there; masters.py: the fp32
              values of 16-bit weights; edits.py: when the user writes to those
adopt.py      how values come into their homes; building.py: models that are being built, larger than memory
pager.py      updates ahead of their use; handing.py: which page is next; passage.py: pages on their way through the
              ring; ways.py: on which streams; ring.py: its memory; slots.py: which of it is free; cores.py: pages that
              the host's cores update (at_home.py: gradients as those get them)
early.py      when updates begin: lazy.py with the step; eager.py, delayed.py, arrivals.py in a backward pass;
              broken.py: one that broke off; steps.py: what a step takes
executor.py   folds the program over events; lanes.py: streams and threads that run ops; weights.py: ops on weights
precision.py, watch.py, turns.py, measures.py: inputs of the root call; a model that was changed; threads; what a
step took; untraced.py: functions that torch.compile leaves alone

Holds no policy: what moves when is decided in program/. May import: units, tiers, kernels, comm, program, layer 0;
never plan.
"""
