"""Finds the units of a model.

A unit is a block (a member of a ModuleList or Sequential that owns parameters), or a run of modules that are left
between blocks. A parameter that is used in several places belongs to the first unit that has it; the others need that
unit too. A block that is mostly frozen, as beside adapters, is two units that are needed together: the frozen one is
only ever read.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from overspill.errors import ModelError
from overspill.specs import ModelSpec, ParamSpec, Sharding, StateFormat, UnitSpec, align, dense_stride
from overspill.units.local import local_of
from overspill.units.pages import cut
from overspill.units.stripes import Member, arrange, owned, share

FROZEN = " (frozen)"
NARROW = (torch.bfloat16, torch.float16)
SPLIT_SHARE = 4
"""A block with more than 1/4 of the model's bytes is cut into its own blocks, where it has any."""


@dataclass(frozen=True, slots=True)
class Call:
    """A module whose calls need units: what its pre-forward hook has to ask for."""

    name: str
    module: nn.Module
    units: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """A model cut into units: the data (`spec`), and the user's objects that belong to it."""

    spec: ModelSpec
    params: tuple[tuple[nn.Parameter, ...], ...]
    """One tuple per unit, in the order of the unit's ParamSpecs."""
    calls: tuple[Call, ...]


@dataclass(slots=True)
class _Group:
    name: str
    params: list[tuple[str, nn.Parameter]]
    block: bool

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(p) for _, p in self.params)

    @property
    def trained(self) -> bool:
        return any(p.requires_grad for _, p in self.params)


@dataclass(frozen=True, slots=True)
class Forms:
    """In what form the bytes of each role are kept."""

    weight: torch.dtype | None
    """What floating parameters will be cast to; None keeps them as they are."""
    grad: torch.dtype | None
    """What the gradients of those have room for; None: of the weight's dtype."""
    state: StateFormat
    state_bytes: Callable[[nn.Parameter, Sequence[int]], int | None]
    """What the user's optimizer will keep for a parameter, or a piece of it of this shape; None where it does not have
    it."""
    sharding: Sharding = field(default_factory=Sharding)
    states: str = "exact"
    """The format of what is kept for parameters, but for those of norms and embeddings, and for some:"""
    grads: int = 1
    """Gradients of a parameter that are kept at a time; see ParamSpec."""
    said: Mapping[int, str] = field(default_factory=dict)
    """Formats of parameters (by id) whose groups say so."""

    def states_of(self, p: nn.Parameter, embeddings: set[int]) -> str:
        small = p.dim() < 2 or id(p) in embeddings
        return self.said.get(id(p), "exact" if small else self.states)

    def weight_of(self, p: nn.Parameter, wide: set[int]) -> torch.dtype:
        if not p.is_floating_point() or self.weight is None:
            return p.dtype
        return torch.float32 if id(p) in wide else self.weight


def wide_parameters(model: nn.Module) -> set[int]:
    """Parameters (by id) that stay fp32 in every precision: norms that keep running statistics. Buffers are not cast,
    and torch takes 16-bit inputs beside fp32 statistics only with fp32 parameters."""
    norms = (m for m in model.modules() if isinstance(m, _NormBase) and m.running_mean is not None)
    return {id(p) for m in norms for p in m.parameters(recurse=False)}


def lay_out(model: nn.Module, forms: Forms, page_bytes: int) -> Layout:
    """Cut `model` into units."""
    groups = _merge_left_over(_groups(model))
    owner = {id(p): i for i, group in enumerate(groups) for _, p in group.params}
    if not groups:
        raise ModelError("expected a model with parameters, found none; there is nothing to place")
    apart = _Apart(wide_parameters(model), _embeddings(model))
    units = tuple(_unit_spec(group, forms, apart, page_bytes) for group in groups)
    calls = tuple(_calls(model, owner, [g.name.removesuffix(FROZEN) for g in groups]))
    buffers = sum(b.nbytes for b in model.buffers())
    spec = ModelSpec(units, _together(model, calls), buffers, forms.state, forms.sharding)
    return Layout(spec=spec, params=tuple(tuple(p for _, p in g.params) for g in groups), calls=calls)


def _nbytes(p: torch.Tensor) -> int:
    part = local_of(p)
    return part.numel() * part.element_size()


def _parameters_below(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _blocks(module: nn.Module, prefix: str, large: int) -> Iterator[tuple[str, nn.Module]]:
    """Members of ModuleLists and Sequentials; members above `large` bytes give way to the blocks inside them."""
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if not isinstance(module, nn.ModuleList | nn.Sequential) or not _parameters_below(child):
            yield from _blocks(child, path, large)
            continue
        inner = list(_blocks(child, path, large)) if sum(map(_nbytes, child.parameters())) > large else []
        yield from inner if len(inner) > 1 else [(path, child)]


def _groups(model: nn.Module) -> list[_Group]:
    """Blocks and single left-over modules, in the model's order; every parameter in the first that has it."""
    total = sum(_nbytes(p) for p in model.parameters())
    blocks = {id(block): path for path, block in _blocks(model, "", total // SPLIT_SHARE)}
    inside = {id(m) for _, block in model.named_modules() if id(block) in blocks for m in block.modules()}
    taken: set[int] = set()
    groups: list[_Group] = []
    for path, module in model.named_modules():
        is_block = id(module) in blocks
        if not is_block and id(module) in inside:
            continue
        found = module.named_parameters() if is_block else module.named_parameters(recurse=False)
        params = [(f"{path}.{n}" if path else n, p) for n, p in found if id(p) not in taken]
        taken.update(id(p) for _, p in params)
        if params:
            groups += _parted(_Group(path or "(root)", params, is_block))
    return groups


def _parted(group: _Group) -> list[_Group]:
    """What is frozen and what is trained of a group, apart where the frozen part is the larger one: after an update
    only the trained unit is written home."""
    frozen = [(name, p) for name, p in group.params if not p.requires_grad]
    trained = [(name, p) for name, p in group.params if p.requires_grad]
    apart = [_Group(group.name + FROZEN, frozen, group.block), _Group(group.name, trained, group.block)]
    return apart if trained and apart[0].nbytes > apart[1].nbytes else [group]


def _merge_left_over(groups: list[_Group]) -> list[_Group]:
    """Join neighbours that are no blocks, as long as the result is no larger than the largest group."""
    largest = max((g.nbytes for g in groups), default=0)
    merged: list[_Group] = []
    for group in groups:
        last = merged[-1] if merged else None
        alike = last is not None and last.trained == group.trained
        if last and alike and not last.block and not group.block and last.nbytes + group.nbytes <= largest:
            merged[-1] = _Group(last.name, [*last.params, *group.params], False)
        else:
            merged.append(group)
    return merged


@dataclass(frozen=True, slots=True)
class _Apart:
    """Parameters (by id) that are kept in another form than the others."""

    wide: set[int]
    embeddings: set[int]


def _embeddings(model: nn.Module) -> set[int]:
    found = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return {id(p) for m in found for p in m.parameters(recurse=False)}


def _unit_spec(group: _Group, forms: Forms, apart: _Apart, page_bytes: int) -> UnitSpec:
    params, sharding = [p for _, p in group.params], forms.sharding
    parts = [local_of(p) for p in params]
    members = [
        Member(forms.weight_of(p, apart.wide), part.numel(), p.requires_grad)
        for p, part in zip(params, parts, strict=True)
    ]
    offsets, stripes = arrange(members, sharding)
    specs = []
    for (name, p), part, member, offset in zip(group.params, parts, members, offsets, strict=True):
        grad = forms.grad if forms.grad is not None and p.is_floating_point() else member.dtype
        stepped = member.trainable and forms.state_bytes(p, part.shape) is not None
        if not stepped and member.dtype in NARROW:
            # Where there is one no step takes it, and so it adds up.
            grad = torch.float32
        item, mine = grad.itemsize if member.trainable else 0, owned(member, offset, stripes, sharding)
        specs.append(
            ParamSpec(
                name=name,
                shape=tuple(part.shape),
                stride=dense_stride(part.shape, part.stride()),
                dtype=member.dtype,
                offset=offset,
                nbytes=member.numel * member.dtype.itemsize,
                trainable=member.trainable,
                grad_item=item,
                grad_bytes=align((mine.room if sharding.split("grad") else member.numel) * item),
                owned=mine,
                master=member.dtype in NARROW and forms.state.master is not None and stepped,
                states=forms.states_of(p, apart.embeddings),
                grads=forms.grads,
            )
        )
    pages = cut(specs, lambda i, shape: forms.state_bytes(params[i], shape), forms.state, page_bytes)
    return UnitSpec(group.name, tuple(specs), tuple(pages), stripes, share(stripes, sharding))


def _calls(model: nn.Module, owner: dict[int, int], blocks: list[str]) -> Iterator[Call]:
    """Every module that owns parameters, and, so that a whole block is opened once, every one whose parameters
    below all belong to one block. `blocks`: the block of each unit."""
    for path, module in model.named_modules():
        own = dict.fromkeys(owner[id(p)] for p in module._parameters.values() if p is not None)
        below = dict.fromkeys(owner[id(p)] for p in module.parameters())
        units = tuple(own) if own else tuple(below) if len({blocks[u] for u in below}) == 1 else ()
        if units:
            yield Call(path, module, units)


def _together(model: nn.Module, calls: tuple[Call, ...]) -> tuple[tuple[int, ...], ...]:
    """What a call needs, with what the calls around it need: a caller may use its own parameters afterwards."""
    needs = {id(c.module): c.units for c in calls}
    found: dict[tuple[int, ...], None] = {}

    def visit(module: nn.Module, outer: tuple[int, ...]) -> None:
        here = tuple(sorted({*outer, *needs.get(id(module), ())}))
        if here:
            found[here] = None
        for child in module.children():
            visit(child, here)

    visit(model, ())
    return tuple(found)


Span = tuple[object, int, int]
"""(which memory, first byte, last byte + 1)"""


def refuse_overlaps(model: nn.Module, span_of: Callable[[Tensor], Span | None]) -> None:
    """Two parameters over the same bytes, or one and a buffer, would each get bytes of their own and drift apart
    silently."""
    spans: dict[object, list[tuple[int, int, str]]] = {}
    for name, p in model.named_parameters():
        span = span_of(p)
        if span is not None:
            spans.setdefault(span[0], []).append((span[1], span[2], name))
    for found in spans.values():
        found.sort()
        for (_, end, name), (begin, _, other) in pairwise(found):
            if begin < end:
                raise ModelError(
                    f"expected parameters with bytes of their own, found {name!r} and {other!r} over the same memory; "
                    "tie them by assigning the same nn.Parameter object, or clone one of them before prepare"
                )
    for name, buffer in model.named_buffers():
        span = span_of(buffer)
        params = spans.get(span[0], []) if span is not None else []
        # None of these overlaps another one: the last that begins before the buffer's end is the one that may reach it.
        before = bisect_left(params, span[2], key=lambda each: each[0]) if span is not None else 0
        if span is not None and before and params[before - 1][1] > span[1]:
            raise ModelError(
                f"expected buffers with bytes of their own, found {name!r} over the memory of the parameter "
                f"{params[before - 1][2]!r}; clone it, or make the module use the parameter itself"
            )
