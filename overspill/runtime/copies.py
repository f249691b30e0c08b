"""Host copies of parameters for state dicts: torch's own `state_dict` reads a closed parameter and gets one, in the
precision of its master."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from overspill.runtime.parts import Parts
from overspill.units.local import local_of, wrapped


class Bringer(Protocol):
    look: Callable[[], object]

    def place_of(self, p: Tensor) -> tuple[int, int]: ...
    def need(self, units: tuple[int, ...]) -> None: ...


class Copies:
    """Knows when a state dict is being made. A tied parameter is copied once per state dict, so it stays tied."""

    def __init__(self, bringer: Bringer, parts: Parts) -> None:
        self._bringer = bringer
        self._parts = parts
        self._modules: list[int] = []
        self._made: dict[int, Tensor] = {}

    def begin(self, module: nn.Module) -> None:
        """A module's part of a state dict begins; the parts of its children lie inside."""
        if id(module) in self._modules:
            # An earlier state dict broke off with an error before it ended.
            self._modules.clear()
        if not self._modules:
            self._bringer.look()
            self._made.clear()
            self._parts.check_copies(sum(map(self._nbytes, module.parameters())), "state_dict")
        self._modules.append(id(module))

    def end(self, module: nn.Module) -> None:
        if id(module) in self._modules:
            del self._modules[self._modules.index(id(module)) :]
        if not self._modules:
            self._made.clear()

    def forget(self) -> None:
        """Training goes on: a state dict that broke off with an error is over."""
        self._modules.clear()
        self._made.clear()

    def of(self, p: nn.Parameter) -> Tensor | None:
        """The parameter's copy, or None when no state dict is being made."""
        if not self._modules:
            return None
        if id(p) not in self._made:
            place, masters = self._bringer.place_of(p), self._parts.made.masters
            self._bringer.need((place[0],))
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                held = masters.read(place) if place in masters else local_of(p).detach().to("cpu", copy=True)
                self._made[id(p)] = wrapped(p, held)
        return self._made[id(p)]

    def _nbytes(self, p: nn.Parameter) -> int:
        in_masters = self._bringer.place_of(p) in self._parts.made.masters
        part = local_of(p)
        return torch.float32.itemsize * part.numel() if in_masters else part.nbytes
