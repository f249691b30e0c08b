"""Over ranks: the peak that the operating system sees of each rank is within that rank's plan, on every tier.

Budgets are the smallest that are not refused, so the plan has nothing to spare. With `-s` the tests print both."""

import ctypes
import gc
import itertools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import overspill
from overspill.specs import STRIPE, KiB, MiB
from overspill.units import stripes
from tests.memory_run import disk_blocks, resident
from tests.places import PLACES, smallest_budget
from tests.ranks import run

WIDTH, LAYERS, STEPS = 384, 8, 3
PROCESS = 4 * MiB
"""What a process takes for itself while it trains, whatever the size of the model; up to 2.5 MiB were seen with this
many layers, of which 1 to 2 are Python's own objects (which take memory in arenas of 1 MiB), about 1 what torch keeps
for each tensor and each node of a graph (in malloc's heap), and 0.1 the stacks of our threads. gloo's threads take
nothing that can be seen. All code was run before, so that none of it is loaded meanwhile (15 to 20 MiB)."""
PREPARING = 6 * MiB
"""The same while a model is prepared, and 4 MiB for the fingerprint of its weights, that all ranks compare."""
HOMES = {
    **PLACES,
    "states": {"weight": "device", "grad": "device", "state": "host"},
    "spread": {"weight": "device", "grad": "host", "state": "nvme"},
    "solved": None,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """What is trained, and where its bytes live."""

    zero: int
    place: str = "device"
    precision: str = "fp32"
    passes: int = 1
    held: bool = False
    """Whether all passes but the last are inside no_sync."""
    optimizer: str = "AdamW"
    unused: bool = False
    """Whether each layer has a parameter that gets no gradient: then layers wait for one, as many as may."""
    single: bool = False
    """Whether a layer is one matrix."""
    stripe: int = STRIPE
    """Small ones, so that a layer has many, as a large layer has."""

    def __str__(self) -> str:
        more = [name for name in ("held", "unused", "single") if getattr(self, name)]
        more += [f"{self.stripe // KiB}KiB"] if self.stripe != STRIPE else []
        return "-".join([f"zero{self.zero}", self.place, self.precision, f"{self.passes}x", self.optimizer, *more])


class Layers(nn.Module):
    """Mostly weights: layers of 4.5 MiB in fp32, next to no activations."""

    def __init__(self, case: Case, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(_matrices(case, width)) for _ in range(layers))
        for layer in self.layers if case.unused else ():
            layer.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = x
            for matrix in layer:  # type: ignore[attr-defined]
                y = torch.tanh(matrix(y))
            x = x + y
        return x


def _matrices(case: Case, width: int) -> list[nn.Module]:
    if case.single:
        return [nn.Linear(3 * width, 3 * width, bias=False)]
    return [nn.Linear(width, 4 * width), nn.Linear(4 * width, width)]


# ---- in a rank


def loss_of(model: Any, case: Case, width: int) -> Tensor:
    found: Tensor = model(torch.ones(4, 3 * width if case.single else width)).float().square().mean()
    return found


def built(case: Case, width: int, layers: int = LAYERS) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Layers(case, width, layers)
    return model, getattr(torch.optim, case.optimizer)(model.parameters(), lr=1e-3)


def options(case: Case, nvme: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Budgets that are just not refused; "solved" has some for every tier."""
    size, place = dist.get_world_size(), HOMES[case.place]
    kept: dict[str, Any] = {"zero": case.zero, "precision": case.precision, "micro_batches": case.passes}
    kept |= {"nvme": nvme, "place": place, "host": f"{(512 if place else 24) * size}MiB"}
    smallest = smallest_budget(model, optimizer, {**kept, "gpu": 1, "world": size})
    return {**kept, "gpu": smallest + (0 if place else 12) * MiB}


def step(model: Any, optimizer: torch.optim.Optimizer, case: Case, width: int) -> None:
    for turn in range(case.passes):
        held = case.held and turn < case.passes - 1
        context: AbstractContextManager[None] = model.no_sync() if held else nullcontext()
        with context:
            loss_of(model, case, width).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def warm_up(case: Case, nvme: Path) -> None:
    """All code is run once with a small model, and torch's own libraries get what they keep for layers of this size
    (oneDNN: 8 MiB)."""
    plain, optimizer = built(case, WIDTH, 1)
    plain.to(DTYPES[case.precision])
    x = torch.ones(4, 3 * WIDTH if case.single else WIDTH, dtype=DTYPES[case.precision])
    for _ in range(2):
        plain(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    del plain, optimizer
    small, optimizer = built(case, 16)
    kept = options(case, nvme, small, optimizer)
    model, prepared = overspill.prepare(small, optimizer, **kept)
    for _ in range(2):
        step(model, prepared, case, 16)
    overspill.close(model)


def measure(case: Case, nvme: Path) -> dict[str, Any]:
    stripes.STRIPE = case.stripe
    warm_up(case, nvme)
    model, optimizer = built(case, WIDTH)
    kept = options(case, nvme, model, optimizer)
    own = sum(p.nbytes for p in model.parameters())
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    base = resident("VmRSS") - own
    Path("/proc/self/clear_refs").write_text("5")
    model, prepared = overspill.prepare(model, optimizer, **kept)
    preparing = resident("VmHWM") - base
    Path("/proc/self/clear_refs").write_text("5")
    disk = 0
    for _ in range(STEPS):
        step(model, prepared, case, WIDTH)
        disk = max(disk, disk_blocks(nvme))
    stepping = resident("VmHWM") - base
    plan = prepared.report()["plan"]
    overspill.close(model)
    del model, prepared, optimizer
    assert list(nvme.iterdir()) == [], "something is left on nvme"
    found = {"case": str(case), "preparing": preparing, "stepping": stepping, "disk": disk, "model": own}
    found |= {"planned": plan.peaks, "activations": plan.bytes_of("device", "activations")}
    found |= {"budget": {tier: getattr(plan.budget, tier) for tier in plan.peaks}}
    return found | {"beside": beside(plan, case), "unit": max(u.weight_bytes for u in plan.model.units)}


def beside(plan: overspill.Plan, case: Case) -> int:
    """What is there while the model moves over, unit by unit: all of the host's memory that is not for weights, and
    pages of the device that hold what is kept of masters."""
    host = plan.peak("host") - plan.bytes_of("host", "weight")
    return host + (plan.bytes_of("device", "state") if case.precision != "fp32" else 0)


def measured(cases: list[Case], folder: str) -> list[dict[str, Any]]:
    dist.init_process_group("gloo")
    nvme = Path(folder) / str(dist.get_rank())
    nvme.mkdir()
    found = []
    for case in cases:
        print(case, flush=True)  # shown if it fails
        found.append(measure(case, nvme))
    dist.destroy_process_group()
    return found


# ---- what is checked


def check(size: int, cases: list[Case], folder: Path) -> None:
    results = run(measured, size, cases, str(folder), timeout=60 + 60 * len(cases))
    for number, rank in itertools.product(range(len(cases)), range(size)):
        found = results[rank][number]
        planned = found["planned"]
        memory = planned["device"] + planned["host"] - found["activations"]
        shown = [f"{n / MiB:7.2f}" for n in (found["preparing"], found["stepping"], memory, found["disk"])]
        print(f"{found['case']} rank {rank}: prepared {shown[0]}, trained {shown[1]}, planned {shown[2]} MiB", end="")
        print(f"; disk {shown[3]}, planned {planned['nvme'] / MiB:7.2f}")
        # There are next to no activations, so the plan must hold without the room that is kept for them.
        assert found["stepping"] <= memory + PROCESS, found
        assert found["preparing"] <= found["model"] + found["beside"] + found["unit"] + PREPARING, found
        assert found["disk"] <= planned["nvme"], found
        assert all(planned[tier] <= budget for tier, budget in found["budget"].items()), found


@pytest.fixture(autouse=True)
def freed_memory_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it glibc keeps freed blocks for itself, and what was freed before prepare would count again."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(64 * KiB))


MANY = 512 * KiB
"""Bytes of a stripe, where a layer is to have many."""


@pytest.mark.full
def test_peaks_of_ranks_are_within_their_plans(tmp_path: Path) -> None:
    large = Case(2, passes=2, unused=True, stripe=MANY)
    check(2, [large, Case(3, "mixed", "bf16")], tmp_path)


def turns(number: int) -> str:
    """The precisions by turns."""
    return tuple(DTYPES)[number % 2]


@pytest.mark.full
@pytest.mark.parametrize("zero", range(4))
def test_every_stage_and_tier(zero: int, tmp_path: Path) -> None:
    """Each stage and each tier with both precisions, and with one pass and two."""
    places = enumerate(HOMES)
    check(2, [Case(zero, place, turns(zero + n), 1 + (zero // 2 + n) % 2) for n, place in places], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("unused", [False, True], ids=["all used", "some unused"])
def test_layers_of_many_stripes(unused: bool, tmp_path: Path) -> None:
    """Some of which wait for a gradient that never comes."""
    places = ("device", "host")
    pairs = [(zero, place) for zero in range(4) for place in places]
    cases = [Case(zero, place, turns(zero + n), 2, unused=unused, stripe=MANY) for n, (zero, place) in enumerate(pairs)]
    check(2, cases[unused::2], tmp_path)


@pytest.mark.full
def test_gradients_that_are_held(tmp_path: Path) -> None:
    pairs = [(zero, place, stripe) for zero in (0, 1) for place in ("device", "host") for stripe in (STRIPE, MANY)]
    cases = [Case(z, place, turns(n + n // 2), 3, held=True, stripe=size) for n, (z, place, size) in enumerate(pairs)]
    check(2, cases, tmp_path)


@pytest.mark.full
def test_four_ranks(tmp_path: Path) -> None:
    places = ("device", "host", "host", "device")
    check(4, [Case(zero, places[zero], turns(zero), 2) for zero in range(4)], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["Adafactor", "Muon"])
def test_optimizers_that_need_whole_parameters(optimizer: str, tmp_path: Path) -> None:
    """A rank that owns a whole parameter receives it from all others at once."""
    places = ("device", "host")
    check(4, [Case(zero, place, optimizer=optimizer, single=True) for zero in (1, 3) for place in places], tmp_path)
