"""One gradient of one parameter, and the changes that wait for its bytes.

Note [Generations]: `step()` takes a *generation* of a parameter's gradient, and its update may run much later. What
the user does to `p.grad` meanwhile (zero it, drop it, scale it) must not reach that update. So `p.grad` is a light
handle (handle.py) on a generation; changes in place are written down in `todo` and applied when the bytes are on the
device, in order, exactly as torch would have applied them; `step()` remembers how many of them were written down.

Note [Narrow and wide]: beside an fp32 master a gradient counts as fp32. While one backward pass alone has contributed
its bytes stay as autograd made them, in the 16-bit compute dtype (*narrow*); every reader widens them, which is exact.
A second contribution is added in fp32, and the sum is kept so (*wide*). Under fp16 narrow gradients are also scaled:
their `factor` undoes that when they are widened.

Note [Shares]: over ranks, a gradient that was reduced is divided: every rank has the elements that it updates (`span`),
as a flat array. Its whole value, or its norm, takes all ranks; what changes it is applied by each to its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from overspill.errors import StateError
from overspill.specs import ParamSpec, Span
from overspill.trace import own_time
from overspill.units.layout import NARROW


def full_dtype(spec: ParamSpec) -> torch.dtype:
    """What a gradient counts as."""
    return torch.float32 if spec.dtype in NARROW else spec.dtype


FLAT = "_overspill_flat"
"""Of a gradient's bytes: the array that they lie in, and where. A piece of an array is a matter of microseconds; any
other view gives way to other threads, and waits for its turn again."""


def as_flat(t: Tensor) -> Tensor:
    """A dense tensor's elements, in memory order."""
    return t.as_strided((t.numel(),), (1,), t.storage_offset())


def as_bytes(t: Tensor) -> Tensor:
    """A dense tensor's memory as flat uint8, in memory order."""
    return as_flat(t).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Change:
    """A change in place: `run(gradient, *operands)`. Operands are numbers, or tensors of one element or laid out as the
    gradient is, so that the change can be made piece by piece as well."""

    run: Callable[..., object]
    operands: tuple[Any, ...] = ()
    multiplies: bool = False
    """Whether it is a multiplication with the one operand."""

    @staticmethod
    def of(
        run: Callable[..., object], operands: tuple[Any, ...], spec: ParamSpec, multiplies: bool = False
    ) -> "Change":
        """A change with operands as they are now, whatever becomes of them."""
        return Change(run, tuple(_kept(x, spec) for x in operands), multiplies and len(operands) == 1)

    @property
    def factor(self) -> Tensor | None:
        """The number that it multiplies with, if it is such a change: fp32."""
        x = self.operands[0] if self.multiplies else None
        return x if isinstance(x, Tensor) and x.dim() == 0 and x.dtype == torch.float32 else None

    def on(self, gradient: Tensor, span: Span | None) -> None:
        """On the whole gradient, or on an array of a span of it."""
        if span is None:
            self.run(gradient, *self.operands)
            return
        for begin, end, at in span.places():
            self.on_piece(gradient[at : at + end - begin], begin)

    def on_piece(self, piece: Tensor, begin: int) -> None:
        """On elements `begin` and following, in memory order."""
        end = begin + piece.numel()
        self.run(piece, *(as_flat(x)[begin:end] if _is_full(x) else x for x in self.operands))


KEPT = "_overspill_kept"


def number(x: Tensor) -> Tensor:
    """A copy of a tensor of one element that nobody else knows of: many changes may share it."""
    copied = x.clone().reshape(())
    setattr(copied, KEPT, True)
    return copied


def _is_full(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0


def _kept(x: Any, spec: ParamSpec) -> Any:
    if not isinstance(x, Tensor):
        return x
    if x.numel() == 1:
        return x if x.dim() == 0 and getattr(x, KEPT, False) else number(x)
    laid_out = torch.empty_strided(spec.shape, spec.stride, dtype=x.dtype, device=x.device)
    return laid_out.copy_(x.expand(spec.shape))


class Generation:
    """One gradient of one parameter. Its bytes are in `value`, or in the parameter's slot, or (`zero`) nowhere."""

    span: Span | None = None
    """What this rank has of it; None: all. See Note [Shares]."""
    spent = False
    """Whether an update that has begun took it, before the step that it belongs to."""
    stepped = False
    """Whether a step took it, and nothing was added since."""
    kept = False
    """Whether a step took it that is applied later. See delayed.py."""
    home: Any = None
    """Where its bytes are, if that is another one's home by now."""
    consumed = False
    """Whether its bytes are gone, because its update is done."""
    local = False
    """Whether other ranks have another one, which is still to be added."""

    def __init__(self, unit: int, param: int, spec: ParamSpec, value: Tensor | None, factor: Tensor | None = None):
        self.unit = unit
        self.param = param
        self.spec = spec
        self.value = value
        self.dtype = full_dtype(spec) if value is None else value.dtype
        """The dtype of its bytes. See Note [Narrow and wide]."""
        self.factor = factor
        self.zero = value is None
        self.todo: list[Change] = []
        self.made = 0
        """Changes that are in its bytes already."""
        self.norms: dict[float, Tensor] = {}
        """Norms of what this rank has of it."""
        self.whole_norms: dict[float, tuple[Tensor, Tensor]] = {}
        """Norms of all of it, with the norm that this rank's share had then."""
        self.raw_norm: Tensor | None = None
        """The norm before any change: whether all its elements are finite."""
        self.lent = False
        """Whether its bytes are lent. See gradients.py, Note [Lent gradients]."""

    @property
    def narrow(self) -> bool:
        return self.dtype != full_dtype(self.spec)

    def change(self, change: Change) -> None:
        check_change(self)
        self.norms.clear()
        if self.lent:
            change.on(self.value, self.span)  # type: ignore[arg-type]
        else:
            self.todo.append(change)

    def consume(self) -> None:
        """Its update is done, and nobody may need it any more."""
        if not self.lent and not self.zero:
            self.value, self.consumed = None, True
            self.norms.clear()

    @property
    def changes(self) -> int:
        """How many there were so far."""
        return self.made + len(self.todo)

    def waiting(self, changes: int) -> list[Change]:
        """Of the first so many changes, those that are not made yet."""
        return self.todo[: max(0, changes - self.made)]

    @property
    def viewed(self) -> bool:
        """Whether somebody holds a view of a lent gradient, or a NumPy array of it."""
        return self.value is not None and torch._C._storage_Use_Count(self.value.untyped_storage()._cdata) > 2

    def taken(self) -> "Generation":
        """What `step()` takes: a lent gradient may be written to before the update runs, so a copy of it."""
        if not self.lent or self.value is None:
            return self
        return Generation(self.unit, self.param, self.spec, self.empty(self.value.device).copy_(self.value))

    def part(self, value: Tensor, begin: int, end: int) -> Tensor:
        """Elements of the parameter, in memory order, out of the gradient's bytes."""
        at = begin if self.span is None else self.span.locate(begin)
        flat: tuple[Tensor, int] | None = getattr(value, FLAT, None)
        if flat is not None:
            array, first = flat
            return array[first + at : first + at + end - begin]
        return value.as_strided((end - begin,), (1,), value.storage_offset() + at)

    def address(self, begin: int) -> int:
        """Where an element of it is now, without making a view."""
        assert self.value is not None, f"the gradient of {self.spec.name} is not on the device"
        at = begin if self.span is None else self.span.locate(begin)
        array, first = getattr(self.value, FLAT, (self.value, 0))
        return int(array.data_ptr()) + (first + at) * self.value.itemsize

    def empty(self, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        if self.span is not None:
            return torch.zeros(self.span.room, dtype=dtype or self.dtype, device=device)
        return torch.empty_strided(self.spec.shape, self.spec.stride, dtype=dtype or self.dtype, device=device)

    def widened(self, value: Tensor) -> Tensor:
        """Some of its elements as they count; what was narrow is new memory."""
        if value.dtype == full_dtype(self.spec):
            return value
        wide = value.to(full_dtype(self.spec))
        return wide if self.factor is None else wide.mul_(self.factor)

    def norm(self, value: Tensor, order: float = 2.0) -> Tensor:
        """Of its bytes, which are on the device; narrow ones are summed in fp32 without being copied."""
        if not self.narrow:
            return torch._foreach_norm([value], order)[0]
        found = torch._foreach_norm([value], order, dtype=full_dtype(self.spec))[0]
        return found if self.factor is None else found * self.factor

    @staticmethod
    def norms_of(generations: Sequence["Generation"], order: float) -> list[Tensor]:
        """As `norm`, of several that are alike: the same bits, in fewer kernels."""
        first, values = generations[0], [g.value for g in generations if g.value is not None]
        with own_time.plain():
            dtype = full_dtype(first.spec) if first.narrow else None
            found = list(torch._foreach_norm(values, order, dtype=dtype))
        factor = first.factor if first.narrow else None
        return found if factor is None else list(torch._foreach_mul(found, factor))

    def add(self, contribution: Callable[[Tensor], object]) -> None:
        """The bytes are on the device: make the changes that wait, then add. The sum is wide."""
        assert self.value is not None, f"the gradient of {self.spec.name} is not on the device"
        self.value = self.widened(self.value)
        self.dtype, self.factor = self.value.dtype, None
        for change in self.todo:
            change.on(self.value, self.span)
        self.made += len(self.todo)
        self.todo.clear()
        self.norms.clear()
        self.raw_norm = None
        contribution(self.value)


def check_bytes(generation: Generation) -> None:
    """Refuse a use of what is gone."""
    if generation.consumed:
        raise StateError(
            "expected gradients to be left alone with update='eager', where they are let go as soon as their update is "
            f"done, found a use of that of {generation.spec.name!r} (a look, a norm, clipping, another step(), or "
            "another backward pass without zero_grad()); use update='lazy', which keeps them"
        )


def check_change(generation: Generation) -> None:
    """Refuse a change that the update which took it would not see, or of what is gone."""
    if generation.spent:
        raise StateError(
            f"expected gradients to be left alone with update='eager', found a change of that of "
            f"{generation.spec.name!r} (clipping, scaling, adding, zeroing, a view, which may be written to): its "
            "update has begun in the backward pass; put backward passes that are not the last into "
            "`with model.no_sync():`, or use update='lazy', which allows all of these"
        )
    check_bytes(generation)
