"""The user's door: everything public is here. Plans, builds the engine, and hands objects out."""

import dataclasses
import logging
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from overspill.config import NvmeOption, Options, Size, options, parse_nvme, parse_size
from overspill.errors import BudgetError, ModelError, OptionError, OverspillError, StateError, TierError
from overspill.plan.plan import Plan
from overspill.plan.solver import Request, page_sizes, solve
from overspill.runtime.door import keeper_of
from overspill.runtime.engine import Engine
from overspill.runtime.optimizer import SpilledOptimizer, read_state
from overspill.runtime.parts import Parts, Tiers, build
from overspill.specs import ROLES, Budget, TierName, human
from overspill.tiers import (
    HostTier,
    NullTier,
    NvmeTier,
    device_available,
    disk_free,
    host_available,
    keep_no_freed_memory,
)
from overspill.units.layout import Layout, lay_out
from overspill.units.states import StateProbe

__all__ = ["Plan", "close", "full", "grad", "plan", "prepare", "settle", "state", "trace"]

log = logging.getLogger("overspill")

Model = TypeVar("Model", bound=nn.Module)

HOMES: tuple[TierName, ...] = ("host", "nvme")
DTYPES = {"fp32": torch.float32}
AUTO_SHARE = {"cuda": (0.92, 0.8), "cpu": (0.4, 0.4)}
"""What "auto" takes of the device and of the host; without a GPU both are the same memory."""

_BY_ITSELF = "Adadelta Adafactor Adagrad Adam AdamW Adamax ASGD Muon NAdam RAdam RMSprop Rprop SGD"
SEPARABLE = {getattr(torch.optim, name) for name in _BY_ITSELF.split() if hasattr(torch.optim, name)}
"""torch's optimizers that treat every parameter by itself."""

COUPLED: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "couples all parameters",
    torch.optim.SparseAdam: "needs sparse gradients",
}
"""Those that do not, and why; separable=True does not make them so."""

_prepared: "weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[Engine], weakref.ref[SpilledOptimizer]]]"
_prepared = weakref.WeakKeyDictionary()
"""Weak on both sides, because an engine refers to its model: a model that is dropped takes its engine with it."""


def prepare(
    model: Model,
    optimizer: torch.optim.Optimizer,
    *,
    gpu: Size = "auto",
    host: Size = "auto",
    nvme: NvmeOption = None,
    precision: str = "fp32",
    states: str = "exact",
    update: str = "lazy",
    zero: str | int = "auto",
    activations: str = "keep",
    micro_batches: int = 1,
    kernels: str = "auto",
    separable: bool | None = None,
    place: Plan | Mapping[str, str] | None = None,
    weights: Any = None,
    mesh: Any = None,
    **unknown: Any,
) -> tuple[Model, SpilledOptimizer]:
    """Place a model's weights, gradients and optimizer states on GPU, host and disk, and train it from there.

    The model comes back as the same object; the optimizer as a torch optimizer that shares the given one's groups.
    Every keyword has a default that looks at the machine; docs/design.md has the table.
    """
    given = {k: v for k, v in locals().items() if k not in ("model", "optimizer", "unknown")}
    chosen = options({**given, **unknown})
    _check_trainable(model, optimizer, chosen)
    for name, p in model.named_parameters():
        if p.device.type == "meta":
            raise ModelError(
                f"expected a model with values, found {name!r} on the meta device; build it on a real device"
            )
    device = _compute_device(model)
    laid_out, made = _plan(model, optimizer, chosen, device)
    log.info("%s", made)
    _say_what_is_cast(model, DTYPES[chosen.precision])
    engine = _build(model, optimizer, (laid_out, made), (chosen, device))
    try:
        prepared = SpilledOptimizer(optimizer, engine, lambda: _report(engine, made))
    except OverspillError:
        engine.close()
        raise
    _prepared[model] = (weakref.ref(engine), weakref.ref(prepared))
    model.no_sync = _NoSync(prepared)  # type: ignore[assignment]
    return model, prepared


def plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    machine: Mapping[str, int] | None = None,
    world: int = 1,
    **keywords: Any,
) -> Plan:
    """What `prepare` with the same keywords would do. Allocates nothing and needs no GPU.

    `machine` stands in for this one: {"device": bytes, "host": bytes}; the "auto" budgets are shares of it.
    """
    if world != 1:
        raise OptionError(f"expected world=1, found {world!r}; several processes are not in this version yet")
    chosen = options(keywords)
    _check_trainable(model, optimizer, chosen)
    return _plan(model, optimizer, chosen, _compute_device(model), machine)[1]


def full(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which all weights are on the device, current, and may be changed."""
    return _engine(model).full()


def grad(p: Tensor) -> Tensor | None:
    """A copy of a parameter's gradient, as plain torch would have it in `p.grad`; None if there is none."""
    _engine_of(p)
    held = p.grad
    return held.clone() if isinstance(held, Tensor) else None


def state(p: Tensor) -> dict[str, Any]:
    """Copies of what the optimizer keeps for a parameter, as of the last step."""
    return read_state(_engine_of(p), p)


def settle(model: nn.Module) -> None:
    """Finish pending updates and wait until every byte is home."""
    _engine(model).settle()


def close(model: Model) -> Model:
    """Give a plain model back, and the optimizer that was given to `prepare` its states."""
    engine, prepared = _engine(model), _prepared[model][1]()
    assert prepared is not None, "the model keeps its optimizer"
    prepared.revive()
    engine.close()
    del model.__dict__["no_sync"]
    return model


@contextmanager
def trace(model: nn.Module, path: str | PathLike[str]) -> Iterator[None]:
    """Record what every lane does inside the context, as a trace for Perfetto or chrome://tracing."""
    engine = _engine(model)
    if not Path(path).parent.is_dir() or Path(path).is_dir():
        raise OptionError(f"expected a file in an existing folder for the trace, found {str(path)!r}; make the folder")
    engine.parts.recorder.on = True
    try:
        yield
    finally:
        engine.parts.recorder.on = False
        engine.executor.finish()
        engine.parts.recorder.write(Path(path))


class _NoSync:
    """`model.no_sync`, as in DistributedDataParallel; with one process there is nothing to hold back.

    It also keeps the optimizer, whose states `close` gives back, as long as the model. A copied model is a plain one.
    """

    def __init__(self, prepared: SpilledOptimizer | None) -> None:
        self._keeps = prepared

    def __call__(self) -> AbstractContextManager[None]:
        return nullcontext()

    def __reduce__(self) -> Any:
        return _NoSync, (None,)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_NoSync":
        return _NoSync(None)


def _engine(model: nn.Module) -> Engine:
    engine = _prepared[model][0]() if isinstance(model, nn.Module) and model in _prepared else None
    if engine is None:
        raise StateError(
            f"expected a model that overspill.prepare returned, found {type(model).__name__} that was not prepared; "
            "call overspill.prepare(model, optimizer, ...) first"
        )
    engine.check_open()
    return engine


def _engine_of(p: Tensor) -> Engine:
    keeper = keeper_of(p) if isinstance(p, Tensor) else None
    for found, _ in _prepared.values():
        engine = found()
        if engine is not None and engine.residency is keeper:
            return engine
    raise StateError("expected a parameter of a prepared model, found another tensor; pass one of model.parameters()")


def _say_what_is_cast(model: nn.Module, dtype: torch.dtype) -> None:
    others = {p.dtype for p in model.parameters() if p.is_floating_point()} - {dtype}
    if others:
        found = ", ".join(sorted(str(d).removeprefix("torch.") for d in others))
        log.warning("parameters of %s are cast to %s, which is what precision= asks for", found, dtype)


def _compute_device(model: nn.Module) -> torch.device:
    """Where the model is, if that is a GPU; else the GPU, if there is one; else plain memory."""
    gpus = {p.device for p in model.parameters() if p.device.type == "cuda"}
    if len(gpus) > 1:
        raise ModelError(f"expected a model on one GPU or in host memory, found one spread over {len(gpus)}; move it")
    if gpus:
        return gpus.pop()
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _check_trainable(model: nn.Module, optimizer: torch.optim.Optimizer, chosen: Options) -> None:
    """Refuse what cannot be trained unit by unit, before anything is touched."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"expected a torch.nn.Module, found {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, SpilledOptimizer):
        raise ModelError(f"expected a torch.optim.Optimizer of your own, found {type(optimizer).__name__}")
    names = {id(p): name for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        if keeper_of(p) is not None:
            raise StateError(
                f"expected a model that is not prepared, found {name!r} in a prepared one; close that first"
            )
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if id(p) not in names:
                raise ModelError(
                    f"expected every parameter of the optimizer to belong to the model, found parameter {i} of group "
                    f"{g}, of shape {tuple(p.shape)}, which does not; build the optimizer from model.parameters()"
                )
    kind = type(optimizer)
    if kind in COUPLED or (kind not in SEPARABLE and not chosen.separable):
        raise ModelError(_not_separable(kind))


def _not_separable(kind: type[torch.optim.Optimizer]) -> str:
    if kind in COUPLED:
        return (
            f"expected an optimizer that runs parameter by parameter, found {kind.__name__}, which {COUPLED[kind]}; "
            "use AdamW"
        )
    return (
        f"expected one of torch's own separable optimizers, found {kind.__module__}.{kind.__name__}; if its step "
        "treats every parameter by itself and keeps nothing across parameters, say prepare(..., separable=True)"
    )


def _plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    chosen: Options,
    device: torch.device,
    machine: Mapping[str, int] | None = None,
) -> tuple[Layout, Plan]:
    budget = _budget(chosen, device, machine)
    probe, dtype = StateProbe(optimizer), DTYPES[chosen.precision]
    if isinstance(chosen.place, Plan):
        laid_out = lay_out(model, probe.bytes_of, dtype, chosen.place.page_bytes)
        if chosen.place.model != laid_out.spec:
            raise OptionError("expected place= to be a plan of this model and optimizer, found one of another")
        return laid_out, _within(chosen.place, budget, chosen)
    if chosen.place and "nvme" in chosen.place.values() and not chosen.nvme:
        raise OptionError('expected nvme= with place= on nvme, found none; give a path on a fast disk: nvme="/scratch"')
    dtypes = {"weight": chosen.precision, "gradient": chosen.precision, "state": "as the optimizer makes it"}
    refused: BudgetError | None = None
    for page in page_sizes(budget.device):
        laid_out = lay_out(model, probe.bytes_of, dtype, page)
        try:
            return laid_out, solve(Request(laid_out.spec, budget, dtypes, page, chosen.micro_batches, chosen.place))
        except BudgetError as error:
            refused = error
    assert refused is not None, "there is at least one page size"
    raise refused


def _within(made: Plan, budget: Budget, chosen: Options) -> Plan:
    """A plan made earlier, in the budgets that are given now; "auto" keeps those that it was made for."""
    device = made.budget.device if chosen.gpu == "auto" else budget.device
    host = made.budget.host if chosen.host == "auto" else budget.host
    now = Budget(device, host, budget.nvme)
    for tier, limit in (("device", now.device), ("host", now.host), ("nvme", now.nvme)):
        if made.peaks[tier] > limit:
            raise BudgetError(
                f"expected a plan within the {tier} budget of {human(limit)}, found one with a peak of "
                f"{human(made.peaks[tier])}; plan anew with this budget, or raise it"
            )
    return dataclasses.replace(made, budget=now)


def _budget(chosen: Options, device: torch.device, machine: Mapping[str, int] | None) -> Budget:
    shares = dict(zip(("gpu", "host"), AUTO_SHARE[device.type], strict=True))
    there = dict(machine) if machine else {"device": device_available(device), "host": host_available()}
    sizes = {}
    for name, tier in (("gpu", "device"), ("host", "host")):
        value = getattr(chosen, name)
        sizes[tier] = int(shares[name] * there[tier]) if value == "auto" else parse_size(name, value, there[tier])
    room = sum(size if size is not None else int(0.95 * _free(path)) for path, size in parse_nvme(chosen.nvme))
    return Budget(device=sizes["device"], host=sizes["host"], nvme=room)


def _free(path: Path) -> int:
    try:
        return disk_free(path)
    except OSError as error:
        raise TierError(
            f"expected a folder at nvme path {str(path)!r}, found {error.strerror!r}; make it or give another path"
        ) from error


def _build(
    model: nn.Module, optimizer: torch.optim.Optimizer, what: tuple[Layout, Plan], how: tuple[Options, torch.device]
) -> Engine:
    """Allocate, adopt the weights, hook up. The model is not touched before all storage is there."""
    (laid_out, made), (chosen, device) = what, how
    with ExitStack() as undo:
        tiers = _tiers(model, made, parse_nvme(chosen.nvme), device.type == "cuda", undo)
        units, executor, grads, states, updates, recorder = build(laid_out, made.program, tiers, optimizer, device)
        undo.pop_all()
    buffers = tuple((buffer, buffer.device) for buffer in model.buffers())
    for buffer, _ in buffers:
        buffer.data = buffer.data.to(device)
    keep_no_freed_memory(device)
    arena = tiers.get("host")
    if isinstance(arena, HostTier) and device.type == "cuda":
        arena.pin()
    activations = made.bytes_of("device", "activations")
    parts = Parts(
        layout=laid_out,
        buffers=buffers,
        dtype=DTYPES[chosen.precision],
        budget=made.budget,
        owned=Budget(**{**made.peaks, "device": made.peak("device") - activations}),
        device_peak=made.peak("device"),
        tiers=tiers,
        units=units,
        executor=executor,
        grads=grads,
        states=states,
        updates=updates,
        recorder=recorder,
    )
    return Engine(model, parts)


def _tiers(model: nn.Module, made: Plan, paths: list[tuple[Path, int | None]], pin: bool, undo: ExitStack) -> Tiers:
    """The storage that the plan asks for; what was made is closed again if the rest cannot be."""
    host, nvme = (sum(made.bytes_of(tier, role) for role in ROLES) for tier in HOMES)
    tiers: Tiers = {"null": NullTier()}
    if nvme:
        tiers["nvme"] = NvmeTier(paths, nvme, made.staging, pin)
        undo.callback(tiers["nvme"].close)
    if host:
        here = sum(p.nbytes for p in model.parameters() if p.device.type == "cpu")
        tiers["host"] = HostTier(host, moving_in=min(here, made.bytes_of("host", "weight")))
        undo.callback(tiers["host"].close)
    return tiers


def _report(engine: Engine, made: Plan) -> dict[str, Any]:
    homes: dict[str, dict[str, int]] = {}
    for line in made.lines:
        homes.setdefault(line.tier, {})[line.what] = line.nbytes
    return {
        "bytes": homes,
        "peak": made.peaks,
        "plan": made,
        "measured": engine.measures.peaks(),
        **engine.measures.last,
    }
