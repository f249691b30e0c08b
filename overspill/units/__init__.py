"""Units: a model cut into parameters that move together, and the device storage of each.

blocks.py   storages of parameters that leave memory for the disk while a model is built
initial.py  first values for a model that was built on the meta device
layout.py   finds the units of a model and describes them as a ModelSpec
local.py    what of a parameter lies in this process
pages.py    cuts the states of a unit into pages
states.py   foretells what an optimizer will keep for each parameter
stripes.py  divides a unit's flat storage over ranks
unit.py     one unit's flat device storage, of which the user's parameters are views

A *block* is a member of a ModuleList or Sequential; what is not in a block is *left over* and grouped between
the blocks. May import: tiers, comm, and layer 0.
"""
