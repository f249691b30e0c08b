"""Kernels: the arithmetic of updates, and nothing else.

masters.py    a 16-bit weight and what is kept beside it hold an fp32 master exactly
reference.py  the update rules of Adam, AdamW, SGD and Adagrad in plain torch, in one order of operations: what every
              other executor has to reproduce bit for bit
numbers.py    what those others are told beside arrays
codecs.py     formats that states are kept in
gpu.py        the same rules as Triton kernels (gpu_states.py: what is kept, loaded and stored within them)
cpu.py        the same on the cores of the host, by the native library of csrc/
executors.py  which of them carries out a rule, on elements.py

Kernels work on flat tensors of one device and know nothing of parameters, pages or homes.
May import: layer 0.
"""
