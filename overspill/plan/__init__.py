"""The planner: from a model's description and budgets to placements, before anything is allocated.

solver.py    device first, then host, then nvme; refuses what cannot work, with the smallest budget that would
memory.py    what a plan takes on the device, line by line
simulate.py  folds the program over the events of a step: peak bytes and traffic, without bytes
hands.py     who updates states in host memory, by what was measured of the machine
sharing.py   the same for a plan with these homes: whether there is room for it, and what passes then
plan.py      the Plan: placements, limits, peaks; prints as a table, turns into JSON

How long a step takes is foretold by overspill/times.py.

Runs on a laptop without torch devices. May import: program, and layer 0; never runtime, units or
tiers.
"""
