"""The user's door: everything public is here. Plans, builds the engine, and hands objects out."""

import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from overspill.config import NvmeOption, Size, options, parse_path
from overspill.errors import OptionError, OverspillError, StateError
from overspill.plan.plan import Plan
from overspill.planning import Ground, make_plan
from overspill.replanning import CurrentPlan, watch
from overspill.runtime.building import building
from overspill.runtime.door import keeper_of
from overspill.runtime.engine import Engine
from overspill.runtime.loads import giving_back
from overspill.runtime.optimizer import SpilledOptimizer, read_state
from overspill.setup import (
    build_engine,
    check_trainable,
    compute_device,
    data_parallel_ranks,
    refuse_early_updates,
    say_what_is_cast,
    say_what_only_adds_up,
)
from overspill.tiers import current, no_budgets

__all__ = [
    "Plan",
    "building",
    "close",
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

CHECKPOINT = "the folder of a checkpoint"
log = logging.getLogger("overspill")

Model = TypeVar("Model", bound=nn.Module)

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
    precision: str = "bf16",
    states: str = "exact",
    update: str = "lazy",
    delay_after: int = 40,
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
    Every keyword has a default that looks at the machine; README.md has the table.
    """
    given = {k: v for k, v in locals().items() if k not in ("model", "optimizer", "unknown")}
    chosen = options({**given, **unknown})
    check_trainable(model, optimizer, chosen)
    comm = data_parallel_ranks(model, chosen, compute_device(model))
    try:
        refuse_early_updates(chosen, comm)
        ground = Ground(compute_device(model), comm=comm)
        laid_out, made = make_plan(model, optimizer, chosen, ground)
        log.info("%s", made)
        say_what_is_cast(model, chosen)
        say_what_only_adds_up(model, optimizer)
        with current(ground.device), no_budgets(ground.device):
            engine = build_engine(model, optimizer, (laid_out, made), (chosen, ground))
    except BaseException:
        if comm is not None:
            comm.close()
        raise
    held = CurrentPlan(made)
    watch(engine, held, (chosen, ground))
    try:
        prepared = SpilledOptimizer(optimizer, engine, lambda: _report(engine, held.plan))
    except BaseException as error:
        # Over ranks all come to what we refuse; of anything else the others may know nothing, and closing takes all.
        if comm is None or isinstance(error, OverspillError):
            engine.close()
        else:
            comm.close()
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

    `machine` stands in for this one, and has a GPU, whatever this one has: {"device": bytes, "host": bytes}; the "auto"
    budgets are shares of it. For the step's time to be predicted, also {"link": bytes per second, both ways together,
    "disk": bytes per second}.
    """
    if not isinstance(world, int) or isinstance(world, bool) or world < 1:
        raise OptionError(f"expected world= as the number of processes, from 1, found {world!r}; give a whole number")
    tiers = {"device", "host"}
    rates = {"link", "disk"}
    if machine is not None and (not isinstance(machine, Mapping) or not tiers <= machine.keys() <= tiers | rates):
        raise OptionError(
            f'expected machine= as {{"device": bytes, "host": bytes}}, found {machine!r}; say both (and "link" and '
            '"disk", in bytes per second, if they are known), or leave it out for this machine'
        )
    for name, value in (machine or {}).items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise OptionError(
                f"expected machine= with {name!r} as a number of bytes above zero, found {value!r}; give bytes, or "
                "bytes per second, as 50e9"
            )
    chosen = options(keywords)
    check_trainable(model, optimizer, chosen)
    refuse_early_updates(chosen, None, world)
    return make_plan(model, optimizer, chosen, Ground(compute_device(model), machine, None, world))[1]


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
    """Give a plain model back, and the optimizer that was given to `prepare` its states. A closed model stays as it is,
    so that it may be closed in a `finally`."""
    found = _prepared.get(model) if isinstance(model, nn.Module) else None
    open_one = found[0]() if found is not None else None
    if found is not None and (open_one is None or open_one.closed):
        return model
    engine, prepared = _engine(model), _prepared[model][1]()
    assert prepared is not None, "the model keeps its optimizer"
    with giving_back(engine.executor):
        prepared.revive()
        engine.close()
    del model.__dict__["no_sync"]
    return model


def save(path: str | PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer, extra: Any = None) -> None:
    """Write a checkpoint: weights in master precision, buffers, optimizer states, groups, and `extra` (nested lists,
    dicts, numbers, texts and tensors). It is complete or not there; one that exists at `path` is replaced, and what
    else is in its folder stays. Where files of yours are in the way, nothing is touched, and StateError raised."""
    from overspill.saving import save as save_all

    engine, prepared = _engine(model), _optimizer(model, optimizer)
    save_all(parse_path(path, CHECKPOINT), engine, prepared, extra)


def load(path: str | PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Read what `save` wrote, into any placement and precision; returns its `extra`."""
    from overspill.saving import load as load_all

    engine, prepared = _engine(model), _optimizer(model, optimizer)
    return load_all(parse_path(path, CHECKPOINT), engine, prepared)


def export(model: nn.Module, path: str | PathLike[str]) -> None:
    """Write plain safetensors in the layout of Hugging Face, each parameter in the dtype that it came with."""
    from overspill.saving import export as export_all

    engine = _engine(model)
    export_all(parse_path(path, "a folder for the model"), engine)


@contextmanager
def trace(model: nn.Module, path: str | PathLike[str]) -> Iterator[None]:
    """Record what every lane does inside the context, and which unit the model is at, as a trace for Perfetto or
    chrome://tracing. On cuda the times are those of the GPU."""
    engine, file = _engine(model), parse_path(path, "a file for the trace")
    if not file.parent.is_dir() or file.is_dir():
        raise OptionError(
            f"expected a file in an existing folder for the trace, found {str(path)!r}; give a name for the file, in a "
            "folder that is there"
        )
    recorder = engine.parts.made.recorder
    recorder.start(engine.executor.lanes.device)
    try:
        yield
    finally:
        recorder.stop()
        engine.executor.finish()
        recorder.write(file)


def join_ranks() -> tuple[int, int]:
    """The rank of this process, and how many there are. For the command line, whose ranks agree before `prepare`."""
    from overspill.comm import join

    joined = join(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if joined else (0, 1)


def processes() -> tuple[Callable[[], Any], Callable[[Any], bool]]:
    """What tells this process from others, and whether such a one has ended. For the command line too."""
    from overspill.comm.pulse import has_ended, origin

    return origin, has_ended


class _NoSync:
    """`model.no_sync`, as in DistributedDataParallel: at stages 0 and 1 gradients are held on their rank until a
    backward pass outside of it. At 2 and 3 there is no room for that, and with one process nothing to hold back.

    It also keeps the optimizer, whose states `close` gives back, as long as the model. A copied model is a plain one.
    """

    def __init__(self, prepared: SpilledOptimizer | None) -> None:
        self._keeps = prepared

    def __call__(self) -> AbstractContextManager[None]:
        engine = self._keeps.engine if self._keeps is not None else None
        return nullcontext() if engine is None else (engine.rounds or engine.early).no_sync()

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


def _optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> SpilledOptimizer:
    prepared = _prepared[model][1]()
    if prepared is None or optimizer is not prepared:
        raise StateError(
            f"expected the optimizer that overspill.prepare returned with this model, found another "
            f"{type(optimizer).__name__}; use `model, optimizer = overspill.prepare(model, optimizer, ...)`"
        )
    return prepared


def _engine_of(p: Tensor) -> Engine:
    keeper = keeper_of(p) if isinstance(p, Tensor) else None
    for found, _ in _prepared.values():
        engine = found()
        if engine is not None and engine.residency is keeper:
            return engine
    raise StateError("expected a parameter of a prepared model, found another tensor; pass one of model.parameters()")


def _ranks(engine: Engine) -> dict[str, Any]:
    """Which rank this is, of how many that divide the model and that have copies of it; elements sent in all."""
    sharding, ranks = engine.executor.program.model.sharding, engine.parts.made.ranks
    sent = dict(ranks.comm.sent) if ranks is not None else {}
    copies = ranks.comm.replicas if ranks is not None else 1
    return {"zero": sharding.zero, "rank": sharding.rank, "size": sharding.size, "copies": copies, "sent": sent}


def _report(engine: Engine, made: Plan) -> dict[str, Any]:
    homes: dict[str, dict[str, int]] = {}
    scale = engine.parts.scale.state() if engine.parts.scale else {"value": None, "skipped": 0}
    made = made.beside(engine.parts.planned.granted)
    for line in made.lines:
        homes.setdefault(line.tier, {})[line.what] = line.nbytes
    return {
        "bytes": homes,
        "peak": made.peaks,
        "plan": made,
        "passing_seconds": None if made.times is None else made.times.passing,
        "measured": engine.measures.peaks(),
        "loss_scale": scale["value"],
        "skipped": scale["skipped"],
        "ranks": _ranks(engine),
        **engine.measures.last,
    }
