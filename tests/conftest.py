"""Models this small are slower on several threads, and much slower when the machine is busy."""

import torch

torch.set_num_threads(1)
