"""Notices when a prepared model gets other parameters or modules than it was prepared with."""

import operator
from typing import Any

from torch import nn

from overspill.errors import ModelError


class ShapeWatch:
    """Remembers which objects each module holds; `check` costs about a microsecond a module."""

    def __init__(self, model: nn.Module) -> None:
        self._held = [
            (path, module, dict(module._parameters), dict(module._modules)) for path, module in model.named_modules()
        ]

    def check(self, call: bool = False) -> None:
        """`call`: a call begins, in which torch.func.functional_call may stand other tensors in for parameters. What
        stands there at `step()` was put there to stay."""
        for path, module, params, children in self._held:
            same = module._parameters.keys() == params.keys() if call else _same(module._parameters, params)
            if same and _same(module._modules, children):
                continue
            name = _difference(module._parameters, params) or _difference(module._modules, children)
            raise ModelError(
                f"expected the parameters and modules that the model had at prepare, found {path + '.' if path else ''}"
                f"{name}; call overspill.close(model), change the model, and call overspill.prepare again"
            )


def _same(now: dict[str, Any], then: dict[str, Any]) -> bool:
    if now.keys() != then.keys():
        return False
    return not then or all(map(operator.is_, map(now.get, then), then.values()))


def _difference(now: dict[str, Any], then: dict[str, Any]) -> str:
    for name in [*now, *then]:
        if name not in then:
            return f"{name} added"
        if name not in now:
            return f"{name} removed"
        if now[name] is not then[name]:
            return f"{name} replaced"
    return ""
