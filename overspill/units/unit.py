"""One unit's weights on the device: a flat buffer of which the user's parameters are views.

Note [One storage for life]: autograd saves views of weights (`F.linear` saves `weight.t()`), so a unit that leaves
the device and comes back must come back into the same storage. The flat buffer keeps one storage object for life;
leaving is `resize_(0)`, coming back is `resize_(n)`. The parameters stay views of it all the time; reading one while
the storage is empty would crash the process, which is why parameters are closed between uses (runtime/door.py).
"""

from collections.abc import Sequence

import torch
from torch import nn

from overspill.specs import UnitSpec
from overspill.tiers import Slot


class Unit:
    """The device side of a unit. `home`: its slot on another tier, or None where it lives on the device."""

    def __init__(self, spec: UnitSpec, params: tuple[nn.Parameter, ...], device: torch.device, home: Slot | None):
        self.spec = spec
        self.params = params
        self.home = home
        self.came_from = tuple(p.device for p in params)
        with torch.inference_mode(False):
            self.flat = torch.empty(spec.weight_bytes, dtype=torch.uint8, device=device)
        self._point([p.data for p in params])
        self._views = self._use_count()

    def _point(self, values: Sequence[torch.Tensor] | None = None) -> None:
        """Make the user's parameters views of the flat buffer, with these values."""
        with torch.no_grad(), torch.inference_mode(False):
            for i, (spec, p) in enumerate(zip(self.spec.params, self.params, strict=True)):
                flat = self.flat[spec.offset : spec.offset + spec.nbytes].view(spec.dtype)
                view = flat.as_strided(spec.shape, spec.stride, spec.offset // spec.dtype.itemsize)
                if values is not None:
                    view.copy_(values[i])
                set_data(p, view)

    @property
    def nbytes(self) -> int:
        return self.spec.weight_bytes

    @property
    def here(self) -> bool:
        """Whether the flat buffer has bytes now."""
        return self.nbytes == 0 or self.flat.untyped_storage().nbytes() > 0

    def grow(self) -> None:
        self.flat.untyped_storage().resize_(self.nbytes)

    def shrink(self) -> None:
        if not self.flat.untyped_storage().resizable():
            self._renew()
        self.flat.untyped_storage().resize_(0)

    def _renew(self) -> None:
        """Once a NumPy array was made of it, torch never resizes a storage again; when that array is gone and no
        view is left, another storage can take its place."""
        assert not self.viewed, f"unit {self.spec.name} is to leave the device but somebody holds views of it"
        with torch.inference_mode(False):
            self.flat = torch.empty_like(self.flat)
        self._point()

    def _use_count(self) -> int:
        return int(torch._C._storage_Use_Count(self.flat.untyped_storage()._cdata))

    @property
    def viewed(self) -> bool:
        """Whether somebody else holds views of the buffer, so that freeing it would leave them dangling."""
        return self._use_count() > self._views

    def give_back(self) -> None:
        """Every parameter gets bytes of its own again, on the device it came from. The unit must be here."""
        with torch.no_grad():
            for p, device in zip(self.params, self.came_from, strict=True):
                value = p.detach()
                data = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device=device)
                set_data(p, data.copy_(value))
        self.flat = self.flat.new_empty(0)


def set_data(p: nn.Parameter, data: torch.Tensor) -> None:
    """`p.data = data`, whatever class the parameter has at the moment."""
    with torch._C.DisableTorchFunctionSubclass():
        torch.Tensor.data.__set__(p, data)  # type: ignore[attr-defined]
