"""From a plan to an engine; and what is refused before there is one."""

from __future__ import annotations

import dataclasses
import logging
import os
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from overspill.config import DTYPES, Options, parse_nvme
from overspill.errors import BudgetError, ModelError, OptionError, StateError
from overspill.forms import update_rule
from overspill.kernels.masters import KEPT
from overspill.plan.memory import tracking_bytes
from overspill.plan.plan import Plan
from overspill.planning import ELEMENTWISE, Ground
from overspill.runtime.building import builder_of, span_of
from overspill.runtime.door import keeper_of
from overspill.runtime.engine import Engine
from overspill.runtime.optimizer import SpilledOptimizer
from overspill.runtime.parts import Materials, Parts, Planned, Tiers, build
from overspill.runtime.scaling import LossScale
from overspill.runtime.watch import refuse_wrappers
from overspill.specs import ROLES, MiB, TierName, human
from overspill.tiers import (
    HeldBudget,
    HostTier,
    NullTier,
    NvmeTier,
    Tier,
    check_folder,
    current,
    host_available,
    keep_no_freed_memory,
    node_of,
    share_one_heap,
)
from overspill.units.layout import Layout, refuse_overlaps
from overspill.units.local import check_kind, is_wrapper, local_of

if TYPE_CHECKING:
    from overspill.comm import Comm

log = logging.getLogger("overspill")

HOMES: tuple[TierName, ...] = ("host", "nvme")
LATER = ("activations", "grad", "gradients before their update")
"""Of the device, what nobody has before the first step."""
SPARE = 64 * MiB
"""Bytes of the machine's memory that are left for whatever else the process takes while it is filled."""
MORE_STAGING = 2**20
"""Bytes of each of two buffers beside the disk room that is taken beyond the plan."""
SEPARABLE = ELEMENTWISE | {getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)}
"""torch's optimizers that treat every parameter by itself."""

REFUSED: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "couples all parameters",
    torch.optim.SparseAdam: "needs sparse gradients",
}
"""torch's optimizers that are never run parameter by parameter, and why; separable=True does not change that."""


def say_what_is_cast(model: nn.Module, chosen: Options) -> None:
    """Masters keep what trainable parameters come with; anything else that loses precision deserves a line."""
    dtype = DTYPES[chosen.precision]
    others = {p.dtype for p in model.parameters() if p.is_floating_point()} - {dtype}
    expected = {torch.float32} if dtype in KEPT else set()
    if dtype in KEPT and any(p.dtype == torch.float32 and not p.requires_grad for p in model.parameters()):
        log.warning(
            "frozen parameters of float32 are rounded to %s for good, because only trained ones have masters; say "
            "precision='fp32' to keep them as they are, or load them in that dtype to silence this",
            dtype,
        )
    if others - expected:
        found = ", ".join(sorted(str(d).removeprefix("torch.") for d in others))
        log.warning("parameters of %s are cast to %s, which is what precision= asks for", found, dtype)


def say_what_only_adds_up(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gradients that no step takes and no zero_grad of the optimizer drops: hardly ever what was meant."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in stepped]
    if left:
        log.warning(
            "%d trainable parameters (the first is %r) are not in the optimizer: their gradients only add up; give "
            "them to the optimizer, or freeze them with requires_grad_(False)",
            len(left),
            left[0],
        )


def compute_device(model: nn.Module) -> torch.device:
    """Where the model is, if that is a GPU; else the GPU, if there is one; else plain memory."""
    gpus = {p.device for p in model.parameters() if p.device.type == "cuda"}
    if len(gpus) > 1:
        raise ModelError(f"expected a model on one GPU or in host memory, found one spread over {len(gpus)}; move it")
    if gpus:
        return gpus.pop()
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # torchrun says which of a machine's GPUs is whose; a script that chose one has made it the current one.
    current, local = torch.cuda.current_device(), int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", current or local % torch.cuda.device_count())


def data_parallel_ranks(model: nn.Module, chosen: Options, device: torch.device) -> Comm | None:
    """The ranks that train the same model on other data; None: this one alone. Beside tensor-parallel parameters those
    are not all that there are."""
    parts = [(name, p) for name, p in model.named_parameters() if is_wrapper(p)]
    if parts and chosen.precision == "fp16":
        raise OptionError(
            f"expected precision='bf16' or 'fp32' beside tensor-parallel parameters, found 'fp16' and {parts[0][0]!r}: "
            "its parts would not agree on which steps overflow; say precision='bf16'"
        )
    if parts and chosen.mesh is None:
        mesh: Any = parts[0][1].device_mesh  # type: ignore[attr-defined]
        if mesh.size() == torch.distributed.get_world_size():
            return None
        raise OptionError(
            f"expected mesh= beside tensor-parallel parameters over {mesh.size()} of "
            f"{torch.distributed.get_world_size()} ranks, found none; give the DeviceMesh with its data-parallel "
            'dimension, named as in init_device_mesh(..., mesh_dim_names=("shard", "tp"))'
        )
    # Only where it is used: it costs half as much again as importing all the rest.
    from overspill.comm import connect

    if device.type == "cuda":
        torch.cuda.set_device(device)
    return connect(chosen.mesh, device)


def refuse_early_updates(chosen: Options, comm: Comm | None, world: int = 1) -> None:
    if chosen.update != "lazy" and (comm is not None or world > 1):
        raise OptionError(
            f"expected update='lazy' over several ranks, found {chosen.update!r}, which works with one process only as "
            "yet; leave it out"
        )


def check_trainable(model: nn.Module, optimizer: torch.optim.Optimizer, chosen: Options) -> None:
    """Refuse what cannot be trained unit by unit, before anything is touched."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"expected a torch.nn.Module, found {type(model).__name__}; give the model itself")
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, SpilledOptimizer):
        raise ModelError(
            f"expected a torch.optim.Optimizer of your own, found {type(optimizer).__name__}"
            + (
                "; close the model that it was prepared with"
                if isinstance(optimizer, SpilledOptimizer)
                else "; make one"
            )
        )
    if chosen.precision != "fp32" and not hasattr(torch.Tensor, "grad_dtype"):
        raise OptionError(
            f"expected torch 2.10 or newer for precision={chosen.precision!r}, found {torch.__version__}; update it or "
            "say precision='fp32'"
        )
    refuse_wrappers(model)
    names = {id(p): name for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        check_kind(name, p)
        if keeper_of(p) is not None and builder_of(p) is None:
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
    refuse_overlaps(model, _span)
    kind = type(optimizer)
    if kind not in ELEMENTWISE and any(map(is_wrapper, model.parameters())):
        raise ModelError(
            "expected one of torch's own optimizers that treat every element by itself beside DTensors, found "
            f"{kind.__module__}.{kind.__name__}, which would see the part of each parameter that is on this rank; use "
            "AdamW"
        )
    if kind in REFUSED or (kind not in SEPARABLE and not chosen.separable):
        raise ModelError(_not_separable(kind))


def _span(p: Tensor) -> tuple[object, int, int] | None:
    """Where the bytes of a parameter or a buffer lie."""
    if p.is_meta or p.numel() == 0 or p.layout != torch.strided:
        return None
    if builder_of(p) is not None:
        key, begin, end = span_of(p)
        return ("built", key), begin, end
    part = local_of(p)
    extent = 1 + sum((n - 1) * s for n, s in zip(part.shape, part.stride(), strict=True))
    return p.device, part.data_ptr(), part.data_ptr() + extent * part.element_size()


def _not_separable(kind: type[torch.optim.Optimizer]) -> str:
    if kind in REFUSED:
        return (
            f"expected an optimizer that runs parameter by parameter, found {kind.__name__}, which {REFUSED[kind]}; "
            "use AdamW"
        )
    return (
        f"expected one of torch's own separable optimizers, found {kind.__module__}.{kind.__name__}; if its step "
        "treats every parameter by itself and keeps nothing across parameters, say prepare(..., separable=True)"
    )


def refuse_more_than_there_is(model: nn.Module, made: Plan, ground: Ground) -> None:
    """Without a GPU the device is the machine's memory, too: what is planned there and on the host must fit in it
    together, beside all that is there now. Activations are left out: only room is kept for them."""
    if ground.device.type != "cpu":
        return
    owned = made.peak("device") - made.bytes_of("device", "activations")
    # What the model takes now is given up part by part, as it moves in.
    here = sum(local_of(t).nbytes for t in (*model.parameters(), *model.buffers()) if t.device.type == "cpu")
    more = ground.local_ranks * max(0, owned + made.peak("host") - here)
    mine = [more + SPARE if more else 0, host_available()]
    heard = ground.comm.exchange(mine) if ground.comm is not None else [mine]
    needed, there = max(heard, key=lambda each: each[0] - each[1])
    if needed > there:
        ranks = f" for each of {ground.local_ranks} ranks" if ground.local_ranks > 1 else ""
        raise BudgetError(
            f"expected a plan that fits the memory of this machine, found one that takes {human(needed)} more of it "
            f"({human(owned)} on the device, which is plain memory without a GPU, {human(made.peak('host'))} on the "
            f"host{ranks}; {human(SPARE)} must stay free) where {human(there)} ({there} bytes) are available; give "
            "smaller budgets for gpu= and host=, with nvme= for the rest, or stop what else runs"
        )


def build_engine(
    model: nn.Module, optimizer: torch.optim.Optimizer, what: tuple[Layout, Plan], how: tuple[Options, Ground]
) -> Engine:
    """Allocate, adopt the weights, hook up. The model is not touched before all storage is there."""
    (laid_out, made), (chosen, ground) = what, how
    device, comm = ground.device, ground.comm
    paths, on_gpu = parse_nvme(chosen.nvme), device.type == "cuda"
    for path, _ in paths:
        check_folder(path)  # though the plan may need no disk
    refuse_more_than_there_is(model, made, ground)
    share_one_heap(device)
    own = sum(local_of(t).nbytes for t in (*model.parameters(), *model.buffers()) if t.device == device)
    there = torch.cuda.memory_allocated(device) - own if on_gpu else 0
    owned = made.peak("device") - made.bytes_of("device", "activations")
    planned = Planned(owned, made.peak("device"), made.bytes_of("device", "grad"))
    with ExitStack() as undo:
        tiers = _tiers(model, made, paths, device, undo)
        extend = _Extend(made, planned, chosen, tiers, device)
        # Only now: it takes time, and plans do without it.
        from overspill.loading import source_of

        room = sum(made.bytes_of("device", what) for what in LATER)
        source = source_of(model, chosen.weights, (device, room), comm)
        materials = Materials(device, optimizer, update_rule(optimizer, chosen), source, extend, comm)
        program = dataclasses.replace(made.program, eager=chosen.update != "lazy")
        with _without_weak_references(model):
            built = build(laid_out, program, tiers, materials)
        undo.pop_all()
    buffers = tuple((buffer, buffer.device) for buffer in model.buffers())
    for buffer, _ in buffers:
        buffer.data = buffer.data.to(device)
    keep_no_freed_memory(device)
    arena = tiers.get("host")
    if isinstance(arena, HostTier) and on_gpu:
        arena.pin()
    scale = LossScale(device) if chosen.precision == "fp16" else None
    if scale is not None:
        built.grads.factor, built.masters.factor = scale.factor, lambda: scale.factor
    held = HeldBudget(device, made.budget.device, there) if on_gpu else None
    planned.others = held.others if held is not None else 0
    parts = Parts(
        layout=laid_out,
        buffers=buffers,
        dtype=DTYPES[chosen.precision],
        budget=made.budget,
        planned=planned,
        tiers=tiers,
        scale=scale,
        made=built,
        optimizer=optimizer,
        held=held,
        eager=chosen.update == "eager",
        delay_after=chosen.delay_after if chosen.update == "delayed" else None,
    )
    return Engine(model, parts)


@contextmanager
def _without_weak_references(model: nn.Module) -> Iterator[None]:
    """RNNs keep some to their weights, and torch swaps no tensor that has any (see Unit._point)."""
    rnns = [m for m in model.modules() if isinstance(m, nn.RNNBase)]
    for rnn in rnns:
        rnn._flat_weight_refs = []
    try:
        yield
    finally:
        for rnn in rnns:
            rnn._flat_weight_refs = [None if w is None else weakref.ref(w) for w in rnn._flat_weights]


class _Extend:
    """Makes more room on a tier than the plan has, within its budget."""

    def __init__(self, made: Plan, planned: Planned, chosen: Options, tiers: Tiers, device: torch.device) -> None:
        self._made = made
        self._planned = planned
        self._device = device
        self._paths = parse_nvme(chosen.nvme)
        self._precision = chosen.precision
        self._tiers = tiers

    def __call__(self, wanted: Mapping[TierName, int], sums: bool) -> dict[TierName, Tier | None]:
        wanted = {tier: nbytes for tier, nbytes in wanted.items() if nbytes}
        taken = Counter[TierName](wanted)
        if "nvme" in wanted:
            taken += Counter({"host": 2 * MORE_STAGING, "nvme": tracking_bytes(wanted["nvme"])})
        for tier, nbytes in taken.items():
            self._check(tier, nbytes, sums)
        made: dict[TierName, Tier | None] = {"device": None}
        with current(self._device):
            made |= {tier: self._more(tier, nbytes) for tier, nbytes in wanted.items() if tier != "device"}
        self._planned.owned += wanted.get("device", 0)
        self._planned.granted += taken
        return made

    def _check(self, tier: TierName, nbytes: int, sums: bool) -> None:
        budget, peak = getattr(self._made.budget, tier), self._made.peak(tier) + self._planned.granted[tier]
        if tier == "device":
            # Activations may take less than is kept free for them, but never less than the largest unit.
            peak = self._planned.owned + max(u.weight_bytes for u in self._made.model.units)
        if peak + nbytes <= budget:
            return
        left = human(max(0, budget - peak))
        room = f"{human(nbytes)} more on {tier}, where {left} of the budget of {human(budget)} are left"
        if sums:
            raise BudgetError(
                "expected one backward pass per step, for which the plan has room, found a second one: its sums take "
                f"{room}; say micro_batches=2 (or how many there are) to prepare, or zero_grad() before each; now call "
                "zero_grad() to start over, for some gradients may be sums already"
            )
        scaler = ", and leave torch.amp.GradScaler out: the loss is scaled without it" * (self._precision == "fp16")
        raise BudgetError(
            f"expected gradients of {self._precision}, as a backward pass makes them, for which the plan has room, "
            "found some of fp32, as sums are, what is put into p.grad, and what a GradScaler has unscaled: all of them "
            f"take {room}; say micro_batches=2 to prepare, which plans room for fp32, or change gradients in place "
            f"(p.grad.mul_(x)){scaler}"
        )

    def _more(self, tier: TierName, nbytes: int) -> Tier:
        node, pin = node_of(self._device), self._device.type == "cuda"
        more: Tier = HostTier(nbytes, node=node) if tier == "host" else NvmeTier(self._paths, nbytes, MORE_STAGING, pin)
        if isinstance(more, HostTier) and pin:
            more.pin()
        self._tiers[f"{tier}+"] = more  # type: ignore[index]
        return more


def _tiers(
    model: nn.Module, made: Plan, paths: list[tuple[Path, int | None]], device: torch.device, undo: ExitStack
) -> Tiers:
    """The storage that the plan asks for; what was made is closed again if the rest cannot be."""
    host, nvme = (sum(made.bytes_of(tier, role) for role in ROLES) for tier in HOMES)
    tiers: Tiers = {"null": NullTier()}
    if nvme:
        tiers["nvme"] = NvmeTier(paths, nvme, made.staging, device.type == "cuda")
        undo.callback(tiers["nvme"].close)
    if host:
        here = sum(local_of(p).nbytes for p in model.parameters() if p.device.type == "cpu" and builder_of(p) is None)
        moving_in = min(here, made.bytes_of("host", "weight"))
        tiers["host"] = HostTier(host, moving_in, node_of(device))
        undo.callback(tiers["host"].close)
    return tiers
