"""Whether autograd is at it."""

import torch


def in_backward() -> bool:
    """Whether this thread is inside of a backward pass."""
    return torch._C._current_graph_task_id() != -1
