"""Many cases of training over ranks in one group of processes, each beside DistributedDataParallel on the same data.

Starting processes and importing torch takes longer than most cases, so a test hands a list of them to `compare`.
"""

import contextlib
import functools
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import overspill
from tests import small
from tests.places import PLACES
from tests.reference import Mixed, differing, weights

STEPS, MICRO_BATCHES = 20, 3
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
CLIP = 2.9
"""Between the norms that occur."""
Batches = Iterator[dict[str, Tensor]]


@dataclass(frozen=True)
class Case:
    """What is trained, how the loop is written, and where the bytes live."""

    zero: int | str
    place: str = "device"
    way: str = "plain"
    """plain, clip, accumulate, no_sync, recompute or reentrant"""
    model: str = "small"
    optimizer: str = "adamw"
    precision: str = "fp32"
    steps: int = STEPS

    def __str__(self) -> str:
        return f"{self.model}-{self.optimizer}-{self.precision}-{self.way}-zero{self.zero}-{self.place}"


class Found(NamedTuple):
    """What came of a case on one rank."""

    exact: bool
    """losses, weights and optimizer states have the bits of the reference"""
    error: float
    """the largest difference of two weights"""
    scale: float
    """the largest weight"""
    digest: int
    """of all weights"""


# ---- models


class Again(nn.Module):
    """A block that is computed again in the backward pass."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block = block
        self._reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self._reentrant)


class Matrices(nn.Module):
    """Nothing but matrices, of awkward shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(small.VOCABULARY, small.WIDTH)
        shapes = [(7, small.WIDTH), (small.WIDTH, 7), (31, small.WIDTH), (small.WIDTH, 31)]
        self.blocks = nn.ModuleList(nn.Linear(b, a, bias=False) for a, b in shapes)
        self.head = nn.Linear(small.WIDTH, small.VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


class Tiny(nn.Module):
    """Fewer elements than there may be ranks: a layer of one element, one of two, an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(small.VOCABULARY, 1)
        self.blocks = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 2), nn.Linear(2, 3, bias=False)])
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.head = nn.Linear(3, small.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x) + self.none.sum()


def _frozen() -> nn.Module:
    model = small.build()
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.weight.requires_grad_(False)
    return model


def _seeded(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "small": small.build,
    "frozen": _frozen,
    "matrices": functools.partial(_seeded, Matrices),
    "tiny": functools.partial(_seeded, Tiny),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "sgd": lambda params: torch.optim.SGD(params, lr=5e-2, momentum=0.9, weight_decay=1e-2),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "muon": lambda params: torch.optim.Muon(params, lr=1e-2),
}


def build(case: Case) -> nn.Module:
    model = MODELS[case.model]()
    if case.precision != "fp32" and hasattr(model, "shift"):
        model.shift = model.shift.to(NARROW[case.precision])  # the plain loop has nobody who casts between dtypes
    if case.way in ("recompute", "reentrant"):
        model.blocks = nn.ModuleList(Again(block, case.way == "reentrant") for block in model.blocks)
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def batches(rank: int | None = None) -> Batches:
    """Each rank its own."""
    return small.batches(7 + 100 * (dist.get_rank() if rank is None else rank))


# ---- the loop, and two ways to run it


def train(model: Any, optimizer: Any, case: Case, stream: Batches | None = None) -> list[float]:
    stream, losses = stream or batches(), []
    micro = micro_batches(case)
    for _ in range(case.steps):
        for turn in range(micro):
            with model.no_sync() if case.way == "no_sync" and turn < micro - 1 else contextlib.nullcontext():
                loss = small.loss_of(model, next(stream)) / micro
                loss.backward()
            losses.append(loss.item())
        if case.way == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def micro_batches(case: Case) -> int:
    return MICRO_BATCHES if case.way in ("accumulate", "no_sync") else 1


Result = tuple[list[float], dict[str, Tensor], dict[Any, Any]]


@functools.cache
def reference(case: Case) -> Result:
    """DistributedDataParallel and torch's optimizer; in 16 bits with masters beside it."""
    model = build(case)
    if case.precision == "fp32":
        optimizer = OPTIMIZERS[case.optimizer](trained(model))
        losses = train(DistributedDataParallel(model), optimizer, case)
        return losses, weights(model), flat_states(optimizer)
    loop = Masters(model, case)
    losses = train(DistributedDataParallel(model), loop, case)
    return losses, loop.mixed.weights(), flat_states(loop.mixed.optimizer)


class Masters:
    """The optimizer of the masters, as the loop sees it."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        self.mixed = Mixed(model, OPTIMIZERS[case.optimizer], NARROW[case.precision])

    def step(self) -> None:
        self.mixed.gather()
        self.mixed.optimizer.step()
        self.mixed.write()

    def zero_grad(self) -> None:
        self.mixed.optimizer.zero_grad()


@functools.cache
def alone(case: Case) -> Result:
    """Ours at stage 0 with everything on the device."""
    return spilled(case)[0]


def prepared(case: Case, nvme: str, model: nn.Module | None = None, **more: Any) -> tuple[Any, Any]:
    model = build(case) if model is None else model
    optimizer = OPTIMIZERS[case.optimizer](trained(model))
    options: dict[str, Any] = {"gpu": "64MiB", "host": f"{64 * dist.get_world_size()}MiB", "nvme": nvme}
    options |= {"zero": case.zero, "precision": case.precision, "micro_batches": micro_batches(case)}
    return overspill.prepare(model, optimizer, place=PLACES[case.place], **{**options, **more})


def spilled(case: Case, delays: dict[Any, float] | None = None) -> tuple[Result, Any]:
    with tempfile.TemporaryDirectory() as nvme:
        model, optimizer = prepared(case, nvme)
        overspill.api._engine(model).executor.lanes.delays.update(delays or {})
        losses = train(model, optimizer, case)
        result = losses, weights(model), flat_states(optimizer)
        report = optimizer.report()
        overspill.close(model)
    return result, report


def flat_states(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    return {
        f"{index}.{key}": value if isinstance(value, Tensor) else torch.tensor(value)
        for index, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
    }


def judged(got: Result, expected: Result) -> Found:
    exact = got[0] == expected[0] and not differing(got[1], expected[1]) and not differing(got[2], expected[2])
    pairs = [(got[1][name].double(), value.double()) for name, value in expected[1].items() if value.numel()]
    error = max((a - b).abs().max().item() for a, b in pairs)
    return Found(exact, error, max(b.abs().max().item() for _, b in pairs), digest(got[1]))


def digest(values: dict[str, Tensor]) -> int:
    """Differs if any bit does, within one run of processes and between them."""
    found = 0
    for name in sorted(values):
        found = zlib.crc32(values[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes(), found)
    return found


def compare(cases: list[Case]) -> dict[Case, tuple[Found | None, Found]]:
    """On every rank: each case, and how it compares with DistributedDataParallel, and with ours at stage 0."""
    dist.init_process_group("gloo")
    found = {}
    for case in cases:
        print(case, flush=True)  # shown if it fails
        plain = replace(case, zero=0, place="device")
        got = spilled(case)[0]
        # Torch adds several passes up in 16 bits, and clips what it finds there; ours does both in fp32.
        has_ddp = case.precision == "fp32" or (case.precision == "bf16" and case.way in ("plain", "recompute"))
        if case.way == "no_sync" and case.zero in (2, 3):
            plain = replace(plain, way="accumulate")
        ddp = judged(got, reference(plain)) if has_ddp else None
        found[case] = (ddp, ddp if ddp is not None and ddp.exact else judged(got, alone(plain)))
    dist.destroy_process_group()
    return found
