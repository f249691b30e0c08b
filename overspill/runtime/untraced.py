"""Functions that torch.compile leaves alone, at no cost where nothing is compiled.

torch's own decorator for that switches its compiler off and on around every call, also where it is off: a few
microseconds, thousands of times a step.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo

_P = ParamSpec("_P")
_T = TypeVar("_T")


def untraced(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """What it does depends on more than its arguments, and must be done every time."""
    apart: Callable[_P, _T] = _disable_dynamo(function)

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        # The first is true for whoever compiles this very line, the second while compiled code runs.
        if torch.compiler.is_dynamo_compiling() or _compiles() is not None:
            return apart(*args, **kwargs)
        return function(*args, **kwargs)

    return run


def _always() -> bool:
    return True


_compiles = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", _always)
"""What compiled code is run by, or None; a torch that cannot tell is taken to compile."""
