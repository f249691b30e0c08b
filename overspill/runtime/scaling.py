"""Loss scaling for fp16, by the rule of torch.amp.GradScaler with its default settings.

Note [Scaled outputs]: gradients of fp16 weights would underflow, so they are computed from a scaled loss. The loop
calls `loss.backward()` and knows nothing of it: each output of the model's own call is handed out behind a node of
autograd that scales the gradient that comes back; one in front of each input that wants a gradient undoes it. Inside of
the model nothing passes them, so nothing is scaled twice. Gradients are unscaled where they are widened
(generation.py). What reaches weights on another way than through the model's outputs would not be scaled: such uses
are refused while a graph is recorded.

Note [Skipped on the device]: whether a step's gradients are finite is known to the device only, and a host that waits
for it is no longer ahead. So the scale lives on the device and is moved there; every update of the step reads the same
flag there and does nothing where that is set. The host hears of it at the next `step()`, when it has long been known,
or when somebody looks (a report, a state dict), who waits; then it takes back what it counted. Where the host decides
anyway (over ranks, with the user's own optimizer, without a GPU) it waits, and a step that is skipped is not taken at
all.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from overspill.errors import StateError
from overspill.runtime.backward import in_backward
from overspill.runtime.hooks import tensors_in
from overspill.tiers import Event, recorded

INITIAL, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000


@dataclass(slots=True, eq=False)
class Verdict:
    """Whether a step is skipped. See Note [Skipped on the device]."""

    skip: Tensor
    """fp32 []: 1.0, or 0.0."""
    told: Tensor
    """fp32 [3], on its way to host memory: `skip`, then the scale and the good steps behind it."""
    after: Event | None
    """What `told` is there after; None: it is there."""
    skipped: bool | None = None
    """Whether the step was skipped, as the host knows it; None: not yet."""
    counted: list[Callable[[], None]] = field(default_factory=list)
    """What takes back that the step was counted."""


class LossScale:
    """The scale, when it moves, and which outputs carry it."""

    def __init__(self, device: torch.device) -> None:
        self._scale = torch.full((), INITIAL, dtype=torch.float32, device=device)
        """Like `factor` never changed where somebody may have it: a graph of gradients keeps it."""
        self._good = torch.zeros((), dtype=torch.int32, device=device)
        """Steps since the scale last moved."""
        self.factor = self._scale.reciprocal()
        """What undoes the scale."""
        self._known = {"value": INITIAL, "good_steps": 0, "skipped": 0}
        """What was so as of the last verdict that the host has heard."""
        self._last: Verdict | None = None
        """One that it has not heard."""
        self._calls = 0

    def judge(self, skip: Tensor) -> Verdict:
        """A step is taken, or skipped because its gradients are not finite (fp32 [] on the device: 1.0): the scale
        moves."""
        self.hear()
        self._scale = self._scale.clone()
        torch._amp_update_scale_(self._scale, self._good, skip, GROWTH, BACKOFF, INTERVAL)
        self.factor = self._scale.reciprocal()
        told = torch.stack((skip, self._scale, self._good.float())).to("cpu", non_blocking=True)
        after = recorded(torch.cuda.current_stream(skip.device)) if skip.is_cuda else None
        self._last = Verdict(skip, told, after)
        return self._last

    def hear(self) -> None:
        """Wait for the last verdict, and take back what was counted for a step that is skipped."""
        verdict = self._last
        if verdict is None:
            return
        if verdict.after is not None and not verdict.after.query():
            verdict.after.synchronize()
        skip, value, good = verdict.told.tolist()
        verdict.skipped = bool(skip)
        self._known = {"value": value, "good_steps": int(good), "skipped": self._known["skipped"] + int(skip)}
        self._last = None
        for take_back in verdict.counted if verdict.skipped else ():
            take_back()

    def state(self) -> dict[str, float]:
        """`value`, `good_steps` since it last moved, and steps that were `skipped`."""
        self.hear()
        return dict(self._known)

    def load(self, state: Mapping[str, float]) -> None:
        self.hear()
        good, skipped = int(state["good_steps"]), int(state["skipped"])
        self._known = {"value": float(state["value"]), "good_steps": good, "skipped": skipped}
        self._scale = torch.full_like(self._scale, self._known["value"])
        self._good.fill_(good)
        self.factor = self._scale.reciprocal()

    def end(self) -> None:
        """The model is plain again: gradients of graphs from before are not scaled any more."""
        self._scale = self.factor = torch.ones_like(self._scale)

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
        return _behind_node(t, lambda: self._scale)

    def _unscaled(self, t: Tensor) -> Tensor:
        return _behind_node(t, lambda: self.factor)

    @property
    def running(self) -> bool:
        """Whether a call of the whole model has begun, and not ended as far as is known."""
        return self._calls > 0

    def forget(self) -> None:
        """No call is running any more, not even one that was interrupted."""
        self._calls = 0

    def check_inside(self) -> None:
        if not self._calls and torch.is_grad_enabled() and not in_backward():
            raise StateError(
                "expected weights to be used inside a call of the whole model under precision='fp16', found a use "
                "outside of it while a graph is recorded: its gradient would not be scaled; call the prepared model "
                "itself, use torch.no_grad(), or precision='bf16'"
            )


def _times(gradient: Tensor, number: Tensor) -> Tensor:
    """A product in fp32, rounded once to what the gradient is; `number`: fp32 [], which a plain product would round
    first, though 2**16 is more than fp16 has."""
    if gradient.device != number.device:
        # Of an input or an output that is on the host; the host waits for it anyway.
        number = number.to(gradient.device)
    if gradient.dtype not in (torch.float16, torch.bfloat16):
        return gradient * number
    of = torch._C._functorch
    batched = of.is_functorch_wrapped_tensor(gradient) or of.is_legacy_batchedtensor(gradient)
    if gradient.dtype != torch.float16 or gradient.requires_grad or batched:
        return (gradient.float() * number).to(gradient.dtype)
    # The same without an fp32 copy; torch has it for fp16 only, and neither for graphs nor for transforms.
    found = gradient.clone(memory_format=torch.contiguous_format)
    torch._amp_foreach_non_finite_check_and_unscale_([found], torch.zeros_like(number), number)
    return found


class _Multiplied(torch.autograd.Function):
    """The same tensor, behind a node that multiplies its gradient. Not a view with a hook: what changes a view in place
    puts another node in front of what it is a view of, and the hook is gone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(t: Tensor, number: Callable[[], Tensor]) -> Tensor:
        return t.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.number = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _times(gradient, ctx.number()), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:
        return tangent.view_as(tangent)


def _behind_node(t: Tensor, number: Callable[[], Tensor]) -> Tensor:
    found: Tensor = _Multiplied.apply(t, number) if t.requires_grad else t  # type: ignore[no-untyped-call]
    return found


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
