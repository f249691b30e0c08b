"""First values for a model that was built on the meta device, a few parameters at a time, by the model's own means.

An ordinary build runs each module's `reset_parameters`, children before parents, and then, for Transformers,
`_init_weights` of the model for each of its modules in the same order. The same is done here for the modules above the
parameters in question, which are real meanwhile; all others are on meta, where writing is harmless. What a constructor
does to its parameters by itself cannot be repeated, so parameters that nobody writes to are refused, and those to
which the constructor wrote more often than their initialisers do.

Note [Where values are made]: random numbers take a CPU minutes where they take a GPU seconds, so they are made on the
device if there is room, which there is before the first activation. Initialisers that mix their parameters with
tensors of their own in host memory fail there, and are called again for parameters in host memory, from then on.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from overspill.errors import ModelError
from overspill.specs import dense_stride

log = logging.getLogger("overspill")

CURES = (
    "give prepare the values with weights=FOLDER, or build the model inside overspill.building(nvme=...), not on meta"
)
_PATTERN = 0xA5
_NO_MARKS = ("_is_hf_initialized", "_overspill")
_COPIES = 3
"""What initialisers and checks may take in all, as a multiple of the values that are made."""
_HOST = torch.device("cpu")

Step = tuple[nn.Module, nn.Module | None]
"""A module, and the model whose `_init_weights` is called for it."""
Shields = dict[int, tuple[Tensor, Tensor]]
"""By id a tensor, which is kept so that nobody else gets the id, and what stands in for it."""


class Initialiser:
    """Makes first values for the parameters of a model on meta, which itself stays as it is. `device` has `room` bytes
    for them. See Note [Where values are made]."""

    def __init__(self, model: nn.Module, device: torch.device = _HOST, room: int = 0) -> None:
        self._model = model
        self._device, self._room = device, room
        self._tree = _Tree(model)
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        self._shields: Shields = {}
        for module in model.modules():
            for key, p in module._parameters.items():
                if p is not None:
                    self._places.setdefault(id(p), []).append((module, key))

    def fill(self, params: Sequence[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
        """New values for these parameters of the model (same sizes and dtypes), by name."""
        fits = _COPIES * sum(p.nbytes for _, p in params) <= self._room
        if self._device == _HOST or not fits:
            return self._fill(params, _HOST)
        try:
            return self._fill(params, self._device)
        except (ModelError, torch.OutOfMemoryError) as error:
            # What else is there, or is held to a budget, may leave less room than there seemed to be.
            log.info("first values are made in host memory, because on %s: %s", self._device, error)
            self._device = _HOST
            return self._fill(params, _HOST)

    def _fill(self, params: Sequence[tuple[str, nn.Parameter]], device: torch.device) -> dict[str, Tensor]:
        owners = {name: _owner(self._places[id(p)]) for name, p in params}
        for name, (module, _) in owners.items():
            self._tree.check(name, module)
        blanks = {(id(owners[name][0]), owners[name][1]): _like(p, _blank(p, device)) for name, p in params}

        def choose(module: nn.Module, key: str, tensor: Tensor) -> Tensor:
            blank = blanks.get((id(module), key))
            return _shield(tensor, self._shields) if blank is None else blank

        def writes() -> dict[str, int]:
            return {name: module.get_parameter(key)._version for name, (module, key) in owners.items()}

        with _instead(self._model, choose):
            steps = self._tree.above(module for module, _ in owners.values())
            start = writes()
            _reset_all(steps)
            early = writes()
            _init_weights_all(steps)
            late = writes()
            found = {name: module.get_parameter(key).detach() for name, (module, key) in owners.items()}
        for name, p in params:
            _check(name, p, found[name], given=False)
            # Transformers calls _init_weights when all else is done, so what a constructor wrote before is lost.
            last_word = late[name] > early[name] and self._tree.of_transformers(owners[name][0])
            if len(self._places[id(p)]) == 1 and not last_word:
                _check_writes(name, p, late[name] - start[name])
        return found


def materialise_buffers(model: nn.Module, device: torch.device, known: Mapping[str, Tensor] | None = None) -> None:
    """Give the model's buffers on meta their first values, on `device`; those in `known` get what is there. Others
    stay."""
    every, known = list(model.named_buffers(remove_duplicate=False)), known or {}
    for name, here in every:
        if name in known and not here.is_meta:
            _check(name, here, known[name], given=True)
            here.copy_(known[name])
    named = [(name, b) for name, b in every if b.is_meta]
    given = {id(b): known[name] for name, b in named if name in known}
    blanks = {id(b): _blank(b, _HOST) for _, b in named if id(b) not in given}
    owners: dict[int, tuple[nn.Module, str]] = {}
    for module in model.modules():
        for key, b in module._buffers.items():
            if id(b) in blanks:
                owners.setdefault(id(b), (module, key))

    shields: Shields = {}

    def choose(module: nn.Module, key: str, tensor: Tensor) -> Tensor:
        return blanks[id(tensor)] if id(tensor) in blanks else _shield(tensor, shields)

    with _instead(model, choose):
        steps = _Tree(model).above(module for module, _ in owners.values())
        _reset_all(steps)
        _init_weights_all(steps)
        values = given | {i: module.get_buffer(key) for i, (module, key) in owners.items()}
    for name, b in named:
        _check(name, b, values[id(b)], given=id(b) in given)
    placed = {i: value.to(device) for i, value in values.items()}
    for module in model.modules():
        for key, old in module._buffers.items():
            if id(old) in placed:
                module._buffers[key] = placed[id(old)]


def _owner(places: list[tuple[nn.Module, str]]) -> tuple[nn.Module, str]:
    """Where a tied parameter gets its value: models tie others to an embedding, whose row for padding is zero; without
    one it is the first place."""
    return next((place for place in places if isinstance(place[0], nn.Embedding)), places[0])


class _Tree:
    """A model's modules, children first, with what is above each and with the model whose `_init_weights` it gets."""

    def __init__(self, model: nn.Module) -> None:
        self._steps: list[Step] = []
        self._above: dict[int, set[int]] = {}
        self._chiefs: dict[int, nn.Module | None] = {}
        self._adapters: set[int] = set()
        self._walk(model, (), None)

    def _walk(self, module: nn.Module, above: tuple[int, ...], chief: nn.Module | None) -> None:
        chief = module if callable(getattr(module, "_init_weights", None)) else chief
        first = id(module) not in self._above
        self._above.setdefault(id(module), {id(module)}).update(above)
        for name, child in module.named_children():
            if id(module) in self._adapters or name in getattr(module, "adapter_layer_names", ()):
                self._adapters.add(id(child))
            self._walk(child, (*above, id(module)), chief)
        if first:
            self._steps.append((module, chief))
            self._chiefs[id(module)] = chief

    def above(self, modules: Iterable[nn.Module]) -> list[Step]:
        """These modules and all that are above them."""
        ids = {above for module in modules for above in self._above[id(module)]}
        return [(module, chief) for module, chief in self._steps if id(module) in ids]

    def of_transformers(self, module: nn.Module) -> bool:
        return callable(getattr(self._chiefs[id(module)], "post_init", None))

    def check(self, name: str, module: nn.Module) -> None:
        """Refuse adapters: PEFT makes their values itself, others than those of the layers they consist of."""
        if id(module) in self._adapters:
            raise ModelError(f"expected no adapter on the meta device, found {name!r}; {CURES}")


def _reset_all(steps: Sequence[Step]) -> None:
    with torch.no_grad():
        for module, _chief in steps:
            _call(module, _reset, module)


def _init_weights_all(steps: Sequence[Step]) -> None:
    with torch.no_grad():
        for module, chief in steps:
            if chief is not None:
                _call(module, chief._init_weights, module)


def _call(module: nn.Module, function: Any, *args: Any) -> None:
    try:
        function(*args)
    except Exception as error:
        raise ModelError(
            f"expected the initialiser of {type(module).__name__} to work while other parts of the model are on meta, "
            f"found {type(error).__name__}: {error}; {CURES}"
        ) from error


def _reset(module: nn.Module) -> None:
    if parametrize.is_parametrized(module):
        _reset_parametrized(module)
        return
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, name, None)
        if callable(reset):
            reset()


def _reset_parametrized(module: nn.Module) -> None:
    """Initialise a stand-in without parametrizations, then let these take their own tensors from its values."""
    plain_type = parametrize.type_before_parametrizations(module)
    lists = module.parametrizations
    assert isinstance(lists, nn.ModuleDict), f"parametrizations in a {type(lists).__name__}"
    plain: nn.Module = object.__new__(plain_type)
    values = {}
    for name in lists:
        made = getattr(module, name)
        values[name] = nn.Parameter(made.detach() if made.is_meta else _blank(made, made.device))
    children = {name: child for name, child in module._modules.items() if child is not lists}
    vars(plain).update(vars(module), _parameters={**module._parameters, **values}, _modules=children)
    _reset(plain)
    for name, value in values.items():
        if not value.is_meta and not _is_blank(value):
            setattr(module, name, value.detach())


@contextlib.contextmanager
def _instead(model: nn.Module, choose: Callable[[nn.Module, str, Tensor], Tensor]) -> Iterator[None]:
    """Inside, the modules hold other parameters and buffers than their own, which are not touched."""
    saved: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for module in model.modules():
            both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for tensors in both:
                for key, tensor in tensors.items():
                    if tensor is not None:
                        saved.append((tensors, key, tensor))
                        tensors[key] = choose(module, key, tensor)
        yield
    finally:
        for tensors, key, tensor in saved:
            tensors[key] = tensor


def _shield(tensor: Tensor, made: Shields) -> Tensor:
    """What an initialiser may write to in place of a tensor that must stay as it is."""
    if id(tensor) not in made:
        stand_in = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        made[id(tensor)] = tensor, _like(tensor, stand_in) if isinstance(tensor, nn.Parameter) else stand_in
    return made[id(tensor)][1]


def _like(p: nn.Parameter, value: Tensor) -> nn.Parameter:
    """A parameter in the place of another. Initialisers look at the marks that constructors leave, as in
    `weight._no_reinit = True`; those of Transformers and ours are not the constructor's."""
    other = nn.Parameter(value, p.requires_grad)
    other.__dict__.update({key: mark for key, mark in p.__dict__.items() if key not in _NO_MARKS})
    return other


def _blank(like: Tensor, device: torch.device) -> Tensor:
    """A tensor that is filled with what no initialiser writes."""
    stride = dense_stride(like.shape, like.stride())
    blank = torch.empty_strided(like.shape, stride, dtype=like.dtype, device=device)
    if blank.is_floating_point() or blank.is_complex():
        return blank.fill_(torch.nan)
    torch.empty(0, dtype=torch.uint8, device=device).set_(blank.untyped_storage()).fill_(_PATTERN)
    return blank


def _is_blank(value: Tensor) -> bool:
    """Whether some of it was never written. NaN spreads through whatever is computed from it."""
    if value.numel() == 0:
        return False
    if value.is_floating_point() or value.is_complex():
        wide = value if value.element_size() > 1 else value.float()
        return bool(wide.isnan().any())
    left = value.detach().contiguous().flatten().view(torch.uint8).view(-1, value.element_size()).eq(_PATTERN).all(1)
    # A single byte may well be written as such, but not everywhere.
    return bool(left.any() if value.element_size() > 1 or value.dtype is torch.bool else left.all())


def _check(name: str, expected: Tensor, found: Tensor, given: bool) -> None:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise ModelError(
            f"expected {expected.dtype} {tuple(expected.shape)} for {name!r}, found {found.dtype} "
            f"{tuple(found.shape)}; {CURES}"
        )
    if not given and (found.is_meta or _is_blank(found)):
        raise ModelError(
            f"expected the model's own initialisers (reset_parameters, _init_weights) to give {name!r} a value, found "
            f"that they leave it unset, at least in part; {CURES}"
        )


def _check_writes(name: str, p: nn.Parameter, writes: int) -> None:
    """A constructor that wrote to its parameter after the initialiser had may have given it another value."""
    if p._version > writes:
        raise ModelError(
            f"expected the initialisers of {name!r} to be all that wrote to it while the model was built, found "
            f"{p._version} writes where they make {writes}: its constructor gave it a value that cannot be repeated; "
            f"{CURES}"
        )
