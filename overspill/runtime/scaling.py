"""Loss scaling for fp16, by the rule of torch.amp.GradScaler with its default settings.

Note [Scaled outputs]: gradients of fp16 weights would underflow, so they are computed from a scaled loss. The loop
calls `loss.backward()` and knows nothing of it: each output of the model's own call is handed out as a view, and a
hook on that view scales the gradient that comes back; a hook on each input that wants a gradient undoes it. Inside of
the model nothing passes the views, so nothing is scaled twice. Gradients are unscaled where they are widened
(generation.py). What reaches weights on another way than through the model's outputs would not be scaled: such uses
are refused while a graph is recorded.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from overspill.errors import StateError
from overspill.runtime.hooks import tensors_in

INITIAL, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000


class LossScale:
    """The scale, when it moves, and which outputs carry it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.value = INITIAL
        self.good_steps = 0
        """Since the scale last moved."""
        self.skipped = 0
        """Steps whose gradients were not finite."""
        self._calls = 0

    @property
    def factor(self) -> Tensor:
        """What undoes the scale."""
        return torch.tensor(1.0 / self.value, dtype=torch.float32, device=self._device)

    def update(self, finite: bool) -> None:
        """A step was taken, or skipped because its gradients were not finite."""
        if not finite:
            self.value, self.good_steps, self.skipped = self.value * BACKOFF, 0, self.skipped + 1
            return
        self.good_steps += 1
        if self.good_steps == INTERVAL:
            grown = torch.tensor(self.value * GROWTH, dtype=torch.float32)
            self.value, self.good_steps = (grown.item() if grown.isfinite() else self.value), 0

    def state(self) -> dict[str, float]:
        return {"value": self.value, "good_steps": self.good_steps, "skipped": self.skipped}

    def load(self, state: Mapping[str, float]) -> None:
        self.value = float(state["value"])
        self.good_steps, self.skipped = int(state["good_steps"]), int(state["skipped"])

    # --- see Note [Scaled outputs]

    def enter(self, inputs: Any) -> Any:
        """The inputs of the whole model's call, to be taken instead."""
        self._calls += 1
        return inputs if self._calls > 1 or not torch.is_grad_enabled() else _mapped(inputs, self._unscaled)

    def leave(self, output: Any) -> Any:
        """The output of the whole model's call, to be handed out instead."""
        self._calls = max(0, self._calls - 1)
        if self._calls or not torch.is_grad_enabled():
            return output
        return _mapped(output, self._scaled)

    def _scaled(self, t: Tensor) -> Tensor:
        return _hooked(t, lambda gradient: gradient * self.value)

    def _unscaled(self, t: Tensor) -> Tensor:
        return _hooked(t, lambda gradient: gradient / self.value)

    def forget(self) -> None:
        """A step was taken: no call is running any more, not even one that was interrupted."""
        self._calls = 0

    def check_inside(self) -> None:
        if not self._calls and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            raise StateError(
                "expected weights to be used inside a call of the whole model under precision='fp16', found a use "
                "outside of it while a graph is recorded: its gradient would not be scaled; call the prepared model "
                "itself, use torch.no_grad(), or precision='bf16'"
            )


def _hooked(t: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    if not t.requires_grad:
        return t
    view = t.view_as(t)
    view.register_hook(hook)
    return view


def _mapped(x: Any, change: Callable[[Tensor], Tensor], depth: int = 4) -> Any:
    """The same structure with its tensors changed; in objects of unknown kind those are replaced in place."""
    if isinstance(x, Tensor):
        return change(x)
    if not any(t.requires_grad for t in tensors_in(x, depth)):
        return x
    if isinstance(x, list):
        return [_mapped(v, change, depth) for v in x]
    if isinstance(x, tuple):
        items = [_mapped(v, change, depth) for v in x]
        return type(x)(*items) if hasattr(x, "_fields") else tuple(items) if type(x) is tuple else type(x)(items)
    if isinstance(x, Mapping):
        out: Any = copy.copy(x)
        for key, value in x.items():
            out[key] = _mapped(value, change, depth)
        return out
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        named = {f.name: _mapped(getattr(x, f.name), change, depth) for f in dataclasses.fields(x) if f.init}
        return dataclasses.replace(x, **named)
    if depth > 0 and hasattr(x, "__dict__") and not isinstance(x, nn.Module | type) and not callable(x):
        for key, value in vars(x).items():
            vars(x)[key] = _mapped(value, change, depth - 1)
    return x
