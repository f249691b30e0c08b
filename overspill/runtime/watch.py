"""Notices when a prepared model gets other parameters or modules than it was prepared with, or a wrapper around it.

Note [Wrapped models]: DistributedDataParallel copies its sums over what is in `p.grad`, without a word to Python.
Around a prepared model that is zeros, for its own buckets got nothing.
"""

import itertools
import operator
import sys
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from overspill.errors import ModelError


def refuse_wrappers(model: nn.Module) -> None:
    """Of those that average or divide gradients themselves, before `prepare`. See Note [Wrapped models]."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", DataParallel)
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | DataParallel | fsdp):
            raise ModelError(_found(type(module), f"as {name!r} in it" if name else "around it"))


def _found(kind: type[nn.Module], where: str) -> str:
    return (
        f"expected a model that nothing else averages or divides, found {kind.__name__} {where}; leave it out, for "
        "overspill does that over all ranks by itself"
    )


class ShapeWatch:
    """Remembers which objects each module holds. `check` looks at all of them at once, a tenth of a microsecond each;
    module by module only where something differs."""

    def __init__(self, model: nn.Module) -> None:
        paths, self._modules = zip(*model.named_modules(), strict=True)
        held = [(dict(module._parameters), dict(module._modules)) for module in self._modules]
        self._held = [(path, *each) for path, each in zip(paths, held, strict=True)]
        self._params, self._children = (_Held([each[i] for each in held]) for i in (0, 1))

    def check(self, call: bool = False) -> None:
        """`call`: a call begins, in which torch.func.functional_call may stand other tensors in for parameters. What
        stands there at `step()` was put there to stay."""
        around = getattr(DistributedDataParallel, "_active_ddp_module", None) if call else None
        if around is not None and any(module is self._modules[0] for module in around.modules()):
            raise ModelError(_found(type(around), "around the model that overspill.prepare returned"))
        same = self._params.are([module._parameters for module in self._modules], by_name=call)
        if same and self._children.are([module._modules for module in self._modules]):
            return
        for (path, params, children), module in zip(self._held, self._modules, strict=True):
            named = call and module._parameters.keys() == params.keys()
            name = ("" if named else _difference(module._parameters, params)) or _difference(module._modules, children)
            if name:
                raise ModelError(
                    "expected the parameters and modules that the model had at prepare, found "
                    f"{path + '.' if path else ''}{name}; call overspill.close(model), change the model, and call "
                    "overspill.prepare again"
                )


class _Held:
    """What some dictionaries hold."""

    def __init__(self, held: Sequence[dict[str, Any]]) -> None:
        self._counts = list(map(len, held))
        self._names = list(itertools.chain.from_iterable(held))
        self._values = list(itertools.chain.from_iterable(map(dict.values, held)))

    def are(self, now: Sequence[dict[str, Any]], by_name: bool = False) -> bool:
        """Whether they are the same objects under the same names, in the same order; or only the names."""
        if list(map(len, now)) != self._counts or list(itertools.chain.from_iterable(now)) != self._names:
            return False
        return by_name or all(map(operator.is_, itertools.chain.from_iterable(map(dict.values, now)), self._values))


def _difference(now: dict[str, Any], then: dict[str, Any]) -> str:
    for name in [*now, *then]:
        if name not in then:
            return f"{name} added"
        if name not in now:
            return f"{name} removed"
        if now[name] is not then[name]:
            return f"{name} replaced"
    return ""
