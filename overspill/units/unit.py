"""One unit's weights on the device: a flat buffer of which the user's parameters are views.

Note [One storage for life]: autograd saves views of weights (`F.linear` saves `weight.t()`), so a unit that leaves
the device and comes back must come back into the same storage. The flat buffer keeps one storage object for life;
leaving is `resize_(0)`, coming back is `resize_(n)`. The parameters stay views of it all the time; reading one while
the storage is empty would crash the process, which is why parameters are closed between uses (runtime/door.py).

Note [NumPy arrays of weights]: torch never resizes a storage again of which a NumPy array was made, even when that
array is gone. When the unit is to leave, another storage takes its place; not while anybody has views of this one, for
example a graph that saved them: then the bytes stay, until it is to leave the next time. Only weights in host memory
can be made into arrays, so this takes nothing of a GPU's memory.
"""

import logging
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from overspill.specs import UnitSpec
from overspill.tiers import Slot, Tier
from overspill.units.local import local_of, set_data

log = logging.getLogger("overspill")


class Unit:
    """The device side of a unit. `home`: its slot on another tier, or None where it lives on the device.

    It is born with a buffer of no particular content; once that is filled, `adopt` makes the parameters views of it.
    """

    def __init__(self, spec: UnitSpec, params: tuple[nn.Parameter, ...], device: torch.device, home: Slot | None):
        self.spec = spec
        self.params = params
        self.home = home
        self.came_as = tuple((p.device if not p.is_meta else torch.device("cpu"), p.dtype) for p in params)
        with torch.inference_mode(False):
            self.flat = torch.empty(spec.weight_bytes, dtype=torch.uint8, device=device)
            self._as = _arrays(self.flat, spec)
        self._views = 0

    def adopt(self) -> None:
        """Make the user's parameters views of the flat buffer. One on the meta device keeps its identity too."""
        self._point()
        self._views = self._use_count()

    def _point(self) -> None:
        with torch.no_grad(), torch.inference_mode(False):
            for i, (spec, p) in enumerate(zip(self.spec.params, self.params, strict=True)):
                flat = self.elements(i)
                view = flat.as_strided(spec.shape, spec.stride, flat.storage_offset())
                if p.is_meta:
                    # Of `.data`, which has a version of its own: what the engine writes to the buffer is no change.
                    real = type(p)._make_subclass(type(p), view.data, p.requires_grad)
                    real.__dict__.update(p.__dict__)
                    real._backward_hooks = p._backward_hooks
                    real._post_accumulate_grad_hooks = p._post_accumulate_grad_hooks
                    torch.utils.swap_tensors(p, real)
                    continue
                gradient, p.grad = p.grad, None
                if view.dtype != p.dtype and hasattr(p, "grad_dtype"):
                    p.grad_dtype = None
                set_data(p, view)
                p.grad = None if gradient is None else gradient.to(view.device)

    def elements(self, param: int, begin: int = 0, end: int | None = None) -> Tensor:
        """A parameter's elements, or some of them, in memory order."""
        spec = self.spec.params[param]
        first = spec.offset // spec.dtype.itemsize
        return self._as[spec.dtype][first + begin : first + (spec.numel if end is None else end)]

    def load(self, tier: Tier) -> None:
        """From its home into the flat buffer. No view of that may outlive the call: see `viewed`."""
        for slot, begin, end in self._home_pieces():
            tier.load(slot, self.flat[begin:end])

    def store(self, tier: Tier) -> None:
        for slot, begin, end in self._home_pieces():
            tier.store(slot, self.flat[begin:end])

    def _home_pieces(self) -> Iterator[tuple[Slot, int, int]]:
        """What its home holds: slots, and where they belong in the flat buffer."""
        assert self.home is not None, f"unit {self.spec.name} lives on the device"
        for begin, end, at in self.spec.home_pieces():
            yield self.home.piece(at, end - begin), begin, end

    @property
    def nbytes(self) -> int:
        return self.spec.weight_bytes

    @property
    def here(self) -> bool:
        """Whether the flat buffer has bytes now."""
        return self.nbytes == 0 or self.flat.untyped_storage().nbytes() > 0

    def grow(self) -> None:
        if not self.here:
            self.flat.untyped_storage().resize_(self.nbytes)

    def shrink(self) -> None:
        """See Note [NumPy arrays of weights]."""
        if not self.flat.untyped_storage().resizable():
            if self.viewed:
                log.info("unit %s keeps its memory: there was a NumPy array of it, and views are left", self.spec.name)
                return
            self._renew()
        self.flat.untyped_storage().resize_(0)

    def _renew(self) -> None:
        with torch.inference_mode(False):
            self.flat = torch.empty_like(self.flat)
            self._as = _arrays(self.flat, self.spec)
        self._point()

    def _use_count(self) -> int:
        return int(torch._C._storage_Use_Count(self.flat.untyped_storage()._cdata))

    @property
    def viewed(self) -> bool:
        """Whether somebody else holds views of the buffer, so that freeing it would leave them dangling."""
        return self._use_count() > self._views

    def give_back(self, values: Mapping[int, Tensor]) -> None:
        """Every parameter gets bytes of its own again, on the device and of the dtype it came with: what is here, or
        for some of them `values` (their masters). The unit must be here."""
        with torch.no_grad():
            for i, (p, (device, dtype)) in enumerate(zip(self.params, self.came_as, strict=True)):
                part = local_of(p)
                value = values.get(i, part.detach())
                data = torch.empty_strided(part.shape, part.stride(), dtype=dtype, device=device)
                p.grad = None
                set_data(p, data.copy_(value))
                if hasattr(p, "grad_dtype") and p.requires_grad:
                    p.grad_dtype = p.dtype
        self.flat = self.flat.new_empty(0)


def _arrays(flat: Tensor, spec: UnitSpec) -> dict[torch.dtype, Tensor]:
    """A flat buffer, as the dtypes that are in it."""
    return {dtype: flat.view(dtype) for dtype in {p.dtype for p in spec.params}}
