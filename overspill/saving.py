"""From a prepared model to files and back, a piece at a time: checkpoints and exports.

Weights are stored in the precision of their masters and states under torch's own names, so a checkpoint fits any
placement, any precision, and any way in which the updates are done.
"""

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from overspill.checkpoint.export import write_export
from overspill.checkpoint.folder import Saved, open_folder, save_folder
from overspill.checkpoint.writer import Stored, stored, write_tensors
from overspill.errors import ModelError, OverspillError, StateError
from overspill.runtime.adopt import PIECE
from overspill.runtime.engine import Engine
from overspill.runtime.executor import LOADED
from overspill.runtime.loads import loading
from overspill.runtime.optimizer import NOT_LOADED, SpilledOptimizer
from overspill.runtime.ranks import Meeting
from overspill.specs import ParamSpec, dense_stride
from overspill.units.local import is_wrapper

log = logging.getLogger("overspill")

WEIGHTS, STATES = "weights.safetensors", "states.safetensors"
STATE = "state of "


@contextmanager
def _by_one(engine: Engine, what: str) -> Iterator[bool]:
    """Over ranks, the first one writes, and the others give it what it asks for, until it is done. Whether it is this
    one that writes."""
    _refuse_parts(engine.model, what)
    ranks = engine.parts.made.ranks
    if ranks is None:
        yield True
        return
    ranks.meet(Meeting.SAVE)
    failed: BaseException | None = None
    try:
        yield ranks.comm.place == 0
    except BaseException as error:
        failed = error
        raise
    finally:
        # Of what is no refusal of ours, as Ctrl-C, the others hear when this process ends.
        if failed is None or isinstance(failed, OverspillError):
            ranks.meet(Meeting.SAVE, 1)
            if not ranks.comm.everyone(failed is None) and failed is None:
                raise StateError(
                    f"expected rank {ranks.comm.world_ranks[0]} to {what}, found that it could not; look at its message"
                )


def _refuse_parts(model: nn.Module, what: str) -> None:
    """Of a tensor-parallel parameter every rank has another part."""
    for name, p in model.named_parameters():
        if is_wrapper(p):
            raise ModelError(
                f"expected parameters that are whole on this rank to {what}, found {name!r}, a DTensor; save "
                "model.state_dict() and optimizer.state_dict() with torch.distributed.checkpoint"
            )


def save(path: str | PathLike[str], engine: Engine, optimizer: SpilledOptimizer, extra: Any) -> None:
    """Everything that training changes, as of now."""
    engine.settle()
    with _by_one(engine, "save a checkpoint") as writes:
        if writes:
            _save(path, engine, optimizer, extra)


def _save(path: str | PathLike[str], engine: Engine, optimizer: SpilledOptimizer, extra: Any) -> None:
    names = _names(engine.model)
    weights = [_weight(engine, name, p) for name, p in engine.model.named_parameters()]
    weights += [stored(name, b.contiguous()) for name, b in engine.model.named_buffers() if b is not None]
    tensors, small = _states(engine, optimizer)
    body = {
        "optimizer": type(optimizer.given).__name__,
        "groups": [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [names[id(p)] for p in group["params"]]}
            for group in optimizer.param_groups
        ],
        "states": small,
        "steps": engine.steps.count,
        "scale": engine.parts.scale.state() if engine.parts.scale else None,
        "modules": {name: module.get_extra_state() for name, module in _with_extra_state(engine.model)},
        "extra": extra,
    }
    save_folder(path, {WEIGHTS: weights, STATES: tensors}, body)


def load(path: str | PathLike[str], engine: Engine, optimizer: SpilledOptimizer) -> Any:
    """Put everything back as it was saved; what it has is checked before anything is changed. Returns `extra`.

    Checksums are known when all bytes are read, and those of a large checkpoint are not read twice. A load that fails
    then leaves a mixture, with which nobody may go on; another load makes it whole again.
    """
    _refuse_parts(engine.model, "load a checkpoint")
    with loading(engine.executor, *LOADED) as begun:
        engine.settle()
        if engine.parts.made.ranks is not None:
            engine.parts.made.ranks.meet(Meeting.LOAD)
        with open_folder(path) as saved:
            body = saved.body()
            _check(saved, body, engine, optimizer)
            begun(
                f"that a load of {str(path)!r} failed before its end: what the model and its optimizer have is part of "
                "what they had before, and part of that"
            )
            _replace(saved, body, engine, optimizer)
        engine.settle()
    return body["extra"]


def _replace(saved: Saved, body: Any, engine: Engine, optimizer: SpilledOptimizer) -> None:
    with torch.no_grad():
        for name, p in engine.model.named_parameters():
            p.copy_(saved.tensor(name))
        for name, buffer in engine.model.named_buffers():
            if name in saved.entries and saved.entries[name].shape == tuple(buffer.shape):
                _once(buffer, buffer).copy_(_once(saved.tensor(name), buffer))
    _load_states(saved, body["states"], engine)
    for group, values in zip(optimizer.param_groups, body["groups"], strict=True):
        group.update({k: v for k, v in values.items() if k not in NOT_LOADED})
    for name, module in _with_extra_state(engine.model):
        module.set_extra_state(body["modules"].get(name))
    # Of checkpoints of an earlier version they are not known.
    engine.steps.count = body.get("steps", engine.steps.count)
    if engine.parts.scale is not None and body["scale"] is not None:
        engine.parts.scale.load(body["scale"])
        engine.parts.made.grads.factor = engine.parts.scale.factor


def _once(value: Tensor, like: Tensor) -> Tensor:
    """Each element once, of what has the shape of a tensor that may be expanded."""
    for dim, (n, stride) in enumerate(zip(like.shape, like.stride(), strict=True)):
        value = value.narrow(dim, 0, 1) if n > 1 and stride == 0 else value
    return value


def export(path: str | PathLike[str], engine: Engine) -> None:
    """Plain safetensors, every parameter in the dtype that it came with; beside them what Transformers needs."""
    engine.settle()
    with _by_one(engine, "export the model") as writes:
        if writes:
            _export(path, engine)


def _export(path: str | PathLike[str], engine: Engine) -> None:
    model = engine.model
    if hasattr(model, "peft_config"):
        _export_adapters(Path(path), engine)
        return
    is_stock = hasattr(getattr(model, "config", None), "save_pretrained")
    # Transformers ties again what it knows as tied, and wants that once; a plain load_state_dict wants every name.
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {}) if is_stock else {}
    first, retied = _names(model), {*ties, *ties.values()}
    names = [(n, p) for n, p in model.named_parameters(remove_duplicate=False) if first[id(p)] == n or n not in retied]
    tensors = [_weight(engine, name, p, came_as=True) for name, p in names]
    tensors += [stored(name, b.contiguous()) for name, b in _persistent_buffers(model)]
    write_export(path, tensors)
    if is_stock:
        _write_config(model, Path(path), next((t.dtype for t in tensors if t.dtype.is_floating_point), torch.float32))


def _write_config(model: Any, path: Path, dtype: torch.dtype) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = dtype  # which from_pretrained loads it in
    config.save_pretrained(path)
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        model.generation_config.save_pretrained(path)


def _export_adapters(path: Path, engine: Engine) -> None:
    """A PEFT model: its adapters only, in PEFT's own layout."""
    from peft import get_peft_model_state_dict

    model: Any = engine.model
    for adapter, config in model.peft_config.items():
        named = [(name, p) for name, p in model.named_parameters() if f".{adapter}." in f"{name}." or p.requires_grad]
        values = {**dict(model.named_buffers(remove_duplicate=False)), **{name: _whole(engine, p) for name, p in named}}
        found = get_peft_model_state_dict(model, state_dict=values, adapter_name=adapter)
        folder = path if adapter == "default" else path / adapter
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / ".adapter_model.safetensors.partial"
        partial.unlink(missing_ok=True)
        write_tensors(partial, [stored(key, value.contiguous()) for key, value in found.items()], {"format": "pt"})
        partial.replace(folder / "adapter_model.safetensors")
        config.save_pretrained(folder)


def _whole(engine: Engine, p: nn.Parameter) -> Tensor:
    """A parameter in the dtype that it came with."""
    unit, index = engine.residency.place_of(p)
    engine.residency.need((unit,))
    masters = engine.parts.made.masters
    with torch.no_grad():
        rounded = engine.units[unit].came_as[index][1] == p.dtype
        value = masters.read((unit, index)) if (unit, index) in masters and not rounded else p.detach().cpu()
    return value.to(engine.units[unit].came_as[index][1])


def _names(model: nn.Module) -> dict[int, str]:
    return {id(p): name for name, p in model.named_parameters()}


def _with_extra_state(model: nn.Module) -> list[tuple[str, nn.Module]]:
    plain = nn.Module.get_extra_state
    return [(name, m) for name, m in model.named_modules() if type(m).get_extra_state is not plain]


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


# --- one parameter


def _weight(engine: Engine, name: str, p: nn.Parameter, came_as: bool = False) -> Stored:
    unit, index = engine.residency.place_of(p)
    spec = engine.units[unit].spec.params[index]
    in_masters = (unit, index) in engine.parts.made.masters
    dtype = engine.units[unit].came_as[index][1] if came_as else torch.float32 if in_masters else spec.dtype
    # Rounded as the weight is, which is not how torch rounds.
    in_masters = in_masters and dtype != spec.dtype

    def pieces() -> Iterator[Tensor]:
        engine.residency.need((unit,))
        with torch.no_grad():
            if dense_stride(spec.shape, spec.stride) != _row_major(spec):
                whole = engine.parts.made.masters.read((unit, index)) if in_masters else p.detach().cpu()
                yield whole.to(dtype).contiguous().view(-1)
            elif in_masters:
                for _, piece in engine.parts.made.masters.pieces((unit, index)):
                    yield piece.to("cpu", dtype)
            else:
                for piece in engine.units[unit].elements(index).split(PIECE):
                    yield piece.to("cpu", dtype)

    return Stored(name, dtype, spec.shape, pieces)


def _row_major(spec: ParamSpec) -> tuple[int, ...]:
    return torch.empty(spec.shape, device="meta").stride()


def _states(engine: Engine, optimizer: SpilledOptimizer) -> tuple[list[Stored], dict[str, dict[str, Any]]]:
    """The tensors of all states, and per parameter what is too small to be one."""
    tensors: list[Stored] = []
    small: dict[str, dict[str, Any]] = {}
    names = _names(engine.model)
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        place, name = engine.residency.place_of(p), names[id(p)]
        state = engine.parts.made.update.outline(*place)
        large = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.is_meta}
        tensors += [_state(engine, place, name, key, value) for key, value in large.items()]
        if state:
            small[name] = {k: v for k, v in state.items() if k not in large}
    return tensors, small


def _state(engine: Engine, place: tuple[int, int], name: str, key: str, outline: Tensor) -> Stored:
    """Read when it is written, so that only one tensor is in memory at a time."""

    def pieces() -> Iterator[Tensor]:
        yield engine.parts.made.update.read(*place, (key,))[key].cpu().contiguous().view(-1)

    return Stored(f"{STATE}{name}: {key}", outline.dtype, tuple(outline.shape), pieces)


def _keys(saved: Saved) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for each, entry in saved.entries.items():
        if entry.path.name == STATES:
            name, key = each.removeprefix(STATE).rsplit(": ", 1)
            found.setdefault(name, []).append(key)
    return found


def _load_states(saved: Saved, small: Mapping[str, Mapping[str, Any]], engine: Engine) -> None:
    found = _keys(saved)
    for index, unit in enumerate(engine.units):
        values = {}
        for i, spec in enumerate(unit.spec.params):
            big = {key: saved.tensor(f"{STATE}{spec.name}: {key}") for key in found.get(spec.name, ())}
            values[i] = {**small.get(spec.name, {}), **big}
        engine.parts.made.update.write(index, values)


def _check_states(saved: Saved, small: Mapping[str, Mapping[str, Any]], engine: Engine) -> None:
    """Whether they can be written; of tensors only the forms count."""
    keys = _keys(saved)
    for index, unit in enumerate(engine.units):
        for i, spec in enumerate(unit.spec.params):
            entries = {key: saved.entry(f"{STATE}{spec.name}: {key}") for key in keys.get(spec.name, ())}
            outline = {k: torch.empty(e.shape, dtype=e.dtype, device="meta") for k, e in entries.items()}
            engine.parts.made.update.check(index, i, {**small.get(spec.name, {}), **outline})


def _check(saved: Saved, body: Any, engine: Engine, optimizer: SpilledOptimizer) -> None:
    # By the names of `save`: that of a buffer that several modules share is its first one.
    lasting = {id(b) for _, b in _persistent_buffers(engine.model)}
    buffers = list(engine.model.named_buffers())
    needed = (*engine.model.named_parameters(), *((name, b) for name, b in buffers if id(b) in lasting))
    wanted = {name: tuple(t.shape) for name, t in needed}
    passing = {name for name, _ in buffers} - wanted.keys()
    there = {n: e.shape for n, e in saved.entries.items() if e.path.name == WEIGHTS and n not in passing}
    wrong = [
        f"{name} ({there.get(name, 'missing')} saved, {wanted.get(name, 'missing')} in the model)"
        for name in dict.fromkeys((*wanted, *there))
        if wanted.get(name) != there.get(name)
    ]
    if wrong:
        raise ModelError(
            f"expected a checkpoint of this model in {str(saved.path)!r}, found {len(wrong)} tensors that differ: "
            f"{', '.join(wrong[:5])}; build the model as it was when it was saved"
        )
    if body["optimizer"] != type(optimizer.given).__name__:
        raise ModelError(
            f"expected a checkpoint that was made with {type(optimizer.given).__name__}, found one made with "
            f"{body['optimizer']}; use the optimizer that it was saved with"
        )
    fields = engine.parts.made.update.fields
    keys = {name.rsplit(": ", 1)[1] for name, entry in saved.entries.items() if entry.path.name == STATES}
    if fields is not None and keys - set(fields):
        raise ModelError(
            f"expected states {sorted(fields)}, found {sorted(keys)} in the checkpoint; use the optimizer's settings "
            "that it was saved with, or prepare with kernels='torch'"
        )
    _check_states(saved, body["states"], engine)
    names = _names(engine.model)
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    if groups != [group["params"] for group in body["groups"]]:
        raise ModelError(
            f"expected parameter groups of {[len(g) for g in groups]} parameters as in this optimizer, found "
            f"{[len(g['params']) for g in body['groups']]} with these or other names; group them as they were saved"
        )
