"""Updates by addresses alone, as a GPU's kernels take them: they are where the arrays are, and few launches do."""

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill.errors import BudgetError
from overspill.kernels import executors, masters, reference
from overspill.kernels.elements import Addresses, Elements
from overspill.kernels.executors import Executor, in_torch
from overspill.kernels.reference import ieee_root
from overspill.plan import solver
from overspill.runtime import kernel_update, parts, rooms
from overspill.specs import KERNEL_PIECE, STATE_BLOCK
from tests.cpu.test_ahead import check, loop, prepare, trained
from tests.reference import weights

FIELDS = {"exact": torch.float32, "bf16": torch.bfloat16, "compact": torch.uint8}


def array(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """What is there."""
    found = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(found, dtype=dtype)


def elements(at: Addresses) -> Elements:
    weight, kept, gradient = at.dtypes
    blocks = -(-at.numel // STATE_BLOCK)
    tops = at.format == "compact"
    return Elements(
        array(at.weight, at.numel, weight),
        None if at.kept is None or kept is None else array(at.kept, at.numel, kept),
        array(at.gradient, at.numel, gradient),
        [array(factor, 1, torch.float32).reshape(()) for factor in at.factors],
        [array(each, blocks if tops and i % 2 else at.numel, FIELDS[at.format]) for i, each in enumerate(at.arrays)],
        at.format,
        at.first,
        at.key,
    )


def by_addresses(used: list[Addresses], every: int) -> Callable[..., Executor]:
    """An executor that refuses some."""

    def executor_for(rule: reference.Rule, device: torch.device, format: str) -> Executor:
        plain = executors.executor_for(rule, device, format)

        def widened(gradient: Tensor, factors: Sequence[Tensor]) -> Tensor:
            gradient = gradient.float().clone()
            for factor in factors:
                gradient *= factor
            return gradient

        def fused(on: Elements, hypers: reference.Hypers, step: int) -> None:
            gradient = widened(on.gradient, on.factors)
            whole = Elements(on.weight, on.kept, gradient, (), on.arrays, on.format, on.first, on.key)
            in_torch(rule, ieee_root, whole, hypers, step)

        def quick(at: Addresses, hypers: reference.Hypers, step: int) -> bool:
            used.append(at)
            if len(used) % every == 0:
                return False
            fused(elements(at), hypers, step)
            return True

        assert not plain.fused, "as on the CPU"
        return Executor(fused, True, quick)

    return executor_for


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("states", ["exact", "bf16", "compact"])
@pytest.mark.parametrize("place", ["states", "host"])
def test_addresses_are_those_of_the_arrays(
    place: Any, states: str, passes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whole and cut parameters, of gradients that are on the device and that came from elsewhere."""
    monkeypatch.setattr(executors, "torch_root", ieee_root)
    expected = trained("device", tmp_path, clip=0.5, states=states, passes=passes)
    used: list[Addresses] = []
    monkeypatch.setattr(parts, "PAGED", {"cpu"})
    monkeypatch.setattr(rooms, "PIECES", {"cpu"})
    monkeypatch.setattr(kernel_update, "executor_for", by_addresses(used, 5))
    model, optimizer = prepare(place, tmp_path, states=states, micro_batches=passes)
    found = loop(model, optimizer, passes, 0.5)
    overspill.settle(model)
    check((found, weights(overspill.close(model))), expected)
    assert len(used) > 20


class Block(nn.Module):
    """Parameters that lie one behind the other, but for what is behind the bias."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(32, 32, bias=i == 1) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def updated(groups: int, states: str, **keywords: Any) -> tuple[list[Tensor], int]:
    """Weights after a few steps, and how many pages have states."""
    model = Blocks()
    split = [list(model.parameters())[i::groups] for i in range(groups)]
    said = [{"params": params, "lr": 1e-3 * (i + 1)} for i, params in enumerate(split)]
    optimizer = torch.optim.AdamW(said, weight_decay=0.1)
    model, optimizer = overspill.prepare(model, optimizer, states=states, **keywords)
    for step in range(3):
        model(torch.randn(4, 32, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.clip_grad_norm_(0.1, foreach=True)  # as on a GPU: one factor for all
        optimizer.step()
        optimizer.zero_grad()
    pages = sum(len(unit.pages) for unit in optimizer.report()["plan"].model.units)
    return list(weights(overspill.close(model)).values()), pages


@pytest.mark.parametrize(
    ("groups", "states", "launches"),
    # A bias of 32 elements has room for 256: what comes behind it begins anew. Of a block that is two launches.
    [(1, "exact", 2 * 2), (1, "bf16", 5 * 2), (1, "compact", 5 * 2), (2, "exact", 5 * 2)],
)
def test_neighbours_are_updated_in_one_launch(
    groups: int, states: str, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same hyperparameters, where chance has no part in it: the same bits."""
    monkeypatch.setattr(executors, "torch_root", ieee_root)
    expected, _ = updated(groups, states)
    used: list[Addresses] = []
    monkeypatch.setattr(parts, "PAGED", {"cpu"})
    monkeypatch.setattr(rooms, "PIECES", {"cpu"})
    monkeypatch.setattr(kernel_update, "executor_for", by_addresses(used, 1000))
    found, pages = updated(groups, states)
    assert len(used) == 3 * launches and pages == (2 if states == "exact" else 4)
    assert sum(at.numel for at in used) == 3 * sum(p.numel() for p in Blocks().parameters())
    assert all(map(torch.equal, found, expected))
    # Some are refused: those of a launch are updated each for itself.
    monkeypatch.setattr(kernel_update, "executor_for", by_addresses([], 2))
    assert all(map(torch.equal, updated(groups, states)[0], expected))


@pytest.mark.parametrize(
    "change",
    [
        {"weight": 4},
        {"kept": 4},
        {"kept": None},
        {"gradient": 4},
        {"arrays": (1, 2)},
        {"factors": (9,)},
        {"skip": 9},
        {"dtypes": (torch.bfloat16, torch.int16, torch.float32)},
        {"format": "bf16"},
        {"numel": 7},
    ],
    ids=str,
)
def test_what_is_no_neighbour_is_not_joined(change: dict[str, Any]) -> None:
    dtypes = (torch.bfloat16, torch.int16, torch.bfloat16)
    at = Addresses(1000, 2000, 3000, (8,), (4000, 5000), 16, dtypes, "exact", 0, 1)
    behind = at._replace(weight=1032, kept=2032, gradient=3032, arrays=(4064, 5064), numel=48, first=3, key=2)
    assert at.joined(behind) == at._replace(numel=64)
    assert at.joined(behind._replace(**change)) is None
    assert behind.joined(at) is None


@pytest.mark.parametrize(
    ("keywords", "page", "pages"),
    [
        ({"gpu": "64GiB"}, 1 << 30, 4),
        ({"gpu": "16GiB"}, 1 << 29, 4 * 2),
        ({"gpu": "8GiB"}, 1 << 28, 4 * 4),
        ({"gpu": "7GiB"}, 1 << 27, 4 * 7),
        ({"gpu": "64GiB", "place": {"state": "host"}}, 1 << 27, 4 * 7),
        ({"gpu": "64GiB", "place": {"grad": "host"}}, 1 << 27, 4 * 7),
        ({"gpu": "64GiB", "precision": "fp32"}, 1 << 27, 4),
    ],
    ids=str,
)
def test_pages_that_pass_nowhere_are_large(keywords: dict[str, Any], page: int, pages: int) -> None:
    """67 M elements of 12 bytes in each unit; in fp32 a page is a parameter."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(4)))
    made = overspill.plan(
        model, torch.optim.AdamW(model.parameters()), machine={"device": 1 << 37, "host": 1 << 37}, **keywords
    )
    assert made.page_bytes == page and sum(len(unit.pages) for unit in made.model.units) == pages


def test_large_pages_change_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little host memory there is, and at the edge of where all fits on the device."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(16)))

    def planned(gpu: int, host: int) -> tuple[bool, Any]:
        """Whether pages are large, and the homes; or why there is no plan."""
        optimizer, machine = torch.optim.AdamW(model.parameters()), {"device": 1 << 37, "host": 1 << 37}
        try:
            made = overspill.plan(model, optimizer, machine=machine, gpu=gpu, host=host)
        except BudgetError as error:
            return False, str(error)
        return made.page_bytes > solver.PAGE[1], made.placements

    budgets = [(gpu, 1 << 20) for gpu in range(16_000_000_000, 16_500_000_000, 1 << 26)]
    budgets += [(gpu, 1 << 36) for gpu in range(30_000_000_000, 32_000_000_000, 1 << 27)]
    found = [planned(*budget) for budget in budgets]
    assert {large for large, _ in found} == {True, False}
    monkeypatch.setattr(solver, "LARGE_PAGE", 0)
    before = [planned(*budget) for budget in budgets]
    assert not any(large for large, _ in before)
    assert [homes for _, homes in found] == [homes for _, homes in before]


def test_masters_are_read_and_written_in_pieces_however_large_a_page_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1024, 3 * KERNEL_PIECE // 1024, bias=False)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    model, optimizer = overspill.prepare(model, torch.optim.AdamW(model.parameters()))
    pieces = list(optimizer.engine.parts.made.masters.pieces((0, 0)))
    assert [begin for begin, _ in pieces] == list(range(0, 3 * KERNEL_PIECE, KERNEL_PIECE))
    assert torch.equal(model.state_dict()["weight"], first["weight"])
    second = torch.randn(first["weight"].shape)
    written: list[int] = []
    split = masters.split

    def counted(master: Tensor, *rest: Tensor) -> None:
        written.append(master.numel())
        split(master, *rest)

    monkeypatch.setattr(masters, "split", counted)
    model.load_state_dict({"weight": second})
    assert written == [KERNEL_PIECE] * 3
    assert torch.equal(model.state_dict()["weight"], second)
