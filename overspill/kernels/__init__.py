"""Kernels: the arithmetic of updates, and nothing else.

masters.py    a 16-bit weight and what is kept beside it hold an fp32 master exactly
reference.py  the update rules of Adam, AdamW, SGD and Adagrad in plain torch, in one order of operations: what every
              other executor has to reproduce bit for bit
gpu.py        the same as Triton kernels
cpu.py        the same on the cores of the host, by the native library of csrc/

Kernels work on flat tensors of one device and know nothing of parameters, pages or homes.
May import: layer 0 (errors, specs, config, trace).
"""
