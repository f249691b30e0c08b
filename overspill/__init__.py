"""overspill trains models that do not fit in GPU memory: exactly what plain PyTorch computes, within budgets that hold.

    model, optimizer = overspill.prepare(model, optimizer, gpu="24GiB", host="96GiB", nvme="/scratch")

and the training loop stays as it is. See README.md. Importing this package touches no device.
"""

from overspill.interrupts import ending_at_once

with ending_at_once():
    from overspill import errors
    from overspill.api import Plan, building, close, export, full, grad, load, plan, prepare, save, settle, state, trace

__all__ = [
    "Plan",
    "building",
    "close",
    "errors",
    "export",
    "full",
    "grad",
    "load",
    "plan",
    "prepare",
    "save",
    "settle",
    "state",
    "trace",
]
__version__ = "0.1.0.dev0"
