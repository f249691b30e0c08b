"""Where values come from over ranks: whoever holds them, all ranks begin with those of rank 0."""

import itertools
import logging
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import overspill
from overspill import planning
from overspill.config import options
from overspill.errors import BudgetError, ModelError, RankError
from overspill.planning import Ground, make_plan
from tests import small
from tests.ranks import run
from tests.reference import differing, weights
from tests.zero import MODELS, Case, batches, digest, prepared


class Said(logging.Handler):
    """Keeps the warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Bytes:
    """Counts what is read of files of weights, byte by byte."""

    def __init__(self) -> None:
        self.read: Counter[tuple[str, int, int]] = Counter()
        self._preadv = os.preadv

    def __call__(self, fd: int, buffers: Any, offset: int, *rest: int) -> int:
        got = self._preadv(fd, buffers, offset, *rest)
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path.endswith(".safetensors"):
            self.read[Path(path).name, offset, got] += 1
        return got


def on_meta(build: Callable[[], nn.Module] = small.build) -> nn.Module:
    with torch.device("meta"):
        return build()


def held(way: str, folder: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model of this rank, and what prepare is told."""
    rank = dist.get_rank()
    if way == "equal":
        return small.build(3), {}
    if way == "different":
        return small.build(3 + rank), {}
    if way == "only on rank 0":
        return small.build(3) if rank == 0 else on_meta(), {}
    if way == "in a folder":
        return on_meta(), {"weights": folder}
    # Not the small one: it has a buffer without an initialiser.
    model = on_meta(MODELS["matrices"])
    torch.manual_seed(9 + rank)
    return model, {}


def begin(stages: list[int], folder: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    said, found = Said(), {}
    logging.getLogger("overspill").addHandler(said)
    for zero in stages:
        for way in ("equal", "different", "only on rank 0", "in a folder", "nowhere"):
            print(way, zero, flush=True)
            model, more = held(way, folder)
            for buffer in model.buffers():
                buffer.fill_(dist.get_rank() + 1)
            counted = Bytes()
            os.preadv = counted
            with tempfile.TemporaryDirectory() as nvme:
                model, optimizer = prepared(Case(zero, "mixed", precision="fp32"), nvme, model, **more)
                os.preadv = counted._preadv
                before = weights(model)
                loss = small.loss_of(model, next(batches()))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                after = weights(overspill.close(model))
            found[way, zero] = (before, digest(after), dict(counted.read), list(said.texts))
            said.texts.clear()
    dist.destroy_process_group()
    return found


def check(size: int, stages: list[int], tmp_path: Path) -> None:
    torch.manual_seed(0)
    given = small.build(5)
    given.shift.fill_(4.0)
    prepared_alone = overspill.prepare(given, torch.optim.SGD(given.parameters(), lr=0.1), precision="fp32")[0]
    overspill.export(prepared_alone, tmp_path)
    results = run(begin, size, stages, str(tmp_path), timeout=250)
    seeds = {"equal": small.build(3), "different": small.build(3), "only on rank 0": small.build(3)}
    for (way, zero), (first, last, _, _) in results[0].items():
        where = f"{way} at stage {zero}"
        assert all(digest(found[way, zero][0]) == digest(first) for found in results), where
        assert all(found[way, zero][1] == last for found in results), where
        told = [len(found[way, zero][3]) for found in results]
        warned = way in ("different", "nowhere")
        assert told == [int(warned)] * size, (where, [found[way, zero][3] for found in results])
        if way in seeds:
            expected = {**weights(seeds[way]), "shift": torch.ones(1)}
            assert digest(first) == digest(expected), where
        if way == "in a folder":
            assert digest(first) == digest(weights(prepared_alone)), where
            read = sum((Counter(found[way, zero][2]) for found in results), Counter())
            assert_read_once(read, tmp_path)
        if way == "nowhere":
            assert first["embedding.weight"].std() > 0.5 and first["head.weight"].std() > 0.05, where


def assert_read_once(read: Counter[tuple[str, int, int]], folder: Path) -> None:
    """All ranks together read every byte of every tensor once. Headers apart: they say where the tensors are."""
    assert set(read.values()) == {1}, read
    ranges = sorted((name, offset, offset + length) for name, offset, length in read)
    for (name, _, end), (other, start, _) in itertools.pairwise(ranges):
        assert name != other or end <= start, "bytes were read twice"
    model = small.build()
    stored = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert sum(end - start for _, start, end in ranges) == stored


def test_all_ranks_begin_with_the_same_values(tmp_path: Path) -> None:
    check(2, [3], tmp_path)


@pytest.mark.full
def test_three_ranks_begin_with_the_same_values(tmp_path: Path) -> None:
    check(3, [0, 1, 2, 3], tmp_path)


class Alike(nn.Module):
    """Blocks of matrices that only their names tell apart: of two ranks each owns other ones."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(5))) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def seeded(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Alike() if kind == "alike" else small.build(seed)


NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
Begun = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Masters, and the weights beside them."""


def begun(model: nn.Module) -> Begun:
    """What a prepared model begins with; it is a plain one afterwards."""
    masters = weights(model)
    with overspill.full(model):
        narrow = {name: p.detach().clone() for name, p in model.named_parameters()}
    closed = weights(overspill.close(model))
    assert digest(closed) == digest(masters), "a model that is closed at once has other values"
    return masters, narrow


def begin_narrow(stages: list[int], folder: str) -> dict[str, Begun]:
    """On every rank: what each way of having values on the first rank only, or others on others, begins with."""
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    for zero, precision, kind, states in itertools.product(stages, NARROW, ("alike", "small"), ("exact", "compact")):
        for way in ("different", "only on rank 0", "in a folder"):
            where = f"{kind} {states} {precision} {way} at stage {zero}"
            print(where, flush=True)
            model = on_meta(lambda kind=kind: seeded(kind, 0))
            if way == "different" or (way == "only on rank 0" and rank == 0):
                model = seeded(kind, 5 + rank)
            more = {"weights": f"{folder}/{kind}"} if way == "in a folder" else {}
            with tempfile.TemporaryDirectory() as nvme:
                case = Case(zero, "mixed", precision=precision)
                found[where] = begun(prepared(case, nvme, model, states=states, **more)[0])
    dist.destroy_process_group()
    return found


def check_narrow(size: int, stages: list[int], tmp_path: Path) -> None:
    expected = {}
    for kind, precision, states in itertools.product(("alike", "small"), NARROW, ("exact", "compact")):
        model = seeded(kind, 5)
        plain = overspill.prepare(model, torch.optim.AdamW(model.parameters()), precision=precision, states=states)[0]
        overspill.export(plain, tmp_path / kind)
        expected[f"{kind} {states} {precision}"] = begun(plain)
        narrow = expected[f"{kind} {states} {precision}"][1]
        assert all(value.dtype == NARROW[precision] for value in narrow.values())
    for rank, results in enumerate(run(begin_narrow, size, stages, str(tmp_path), timeout=250)):
        for where, got in results.items():
            right = next(each for begin, each in expected.items() if where.startswith(begin))
            for mine, its in zip(got, right, strict=True):
                assert differing(mine, its) == [], f"rank {rank}: {where}"


@pytest.mark.parametrize("stages", [pytest.param([0, 2], marks=pytest.mark.full), [1, 3]], ids=str)
def test_two_ranks_begin_with_the_same_masters(stages: list[int], tmp_path: Path) -> None:
    check_narrow(2, stages, tmp_path)


@pytest.mark.full
def test_three_ranks_begin_with_the_same_masters(tmp_path: Path) -> None:
    check_narrow(3, [0, 1, 2, 3], tmp_path)


def wrong_way_round() -> str:
    dist.init_process_group("gloo")
    model = on_meta() if dist.get_rank() == 0 else small.build()
    with pytest.raises(ModelError) as error, tempfile.TemporaryDirectory() as nvme:
        prepared(Case(3, "host"), nvme, model)
    return str(error.value)


@pytest.mark.full
def test_weights_on_another_rank_only_are_refused() -> None:
    for text in run(wrong_way_round, 2):
        assert "found them on ranks [1] only" in text


def said_otherwise(how: str) -> list[str]:
    """What each refusal says, where the second rank says something else."""
    rank, found = int(os.environ["RANK"]), []
    model = small.build(3)
    rate = 1e-2 * (1 + rank) if how == "rate" else 1e-2
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, amsgrad=how == "amsgrad" and rank == 1)
    keywords = {"zero": 1 + rank} if how == "zero" else {"zero": 1}
    try:
        model, optimizer = overspill.prepare(model, optimizer, **keywords)
        if how == "later" and rank == 1:
            optimizer.param_groups[0]["lr"] = 0.5
        small.loss_of(model, next(small.batches())).backward()
        optimizer.step()
    except RankError as error:
        found.append(str(error))
    return found


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("rate", "lr of parameter group 0: 0.01 on rank 0 and 0.02 on rank 1"),
        pytest.param(
            "amsgrad", "amsgrad of parameter group 0: False on rank 0 and True on rank 1", marks=pytest.mark.full
        ),
        pytest.param("zero", "zero: 1 on rank 0 and 2 on rank 1", marks=pytest.mark.full),
        pytest.param("later", "learning rates differ", marks=pytest.mark.full),
    ],
)
def test_ranks_that_say_something_else_are_refused(how: str, message: str) -> None:
    for found in run(said_otherwise, 2, how):
        assert len(found) == 1 and message in found[0], found


@pytest.mark.parametrize("world", [2, 8])
def test_a_refusal_tells_a_budget_that_is_enough_for_every_rank(world: int) -> None:
    """Ranks own slightly different bytes: of this model the last one needs 1 KiB more than the first one."""
    widths, machine = (33, 1000, 77, 512, 33), {"device": 1 << 40, "host": 1 << 40}
    model = nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(widths)))
    optimizer = torch.optim.AdamW(model.parameters())
    asked: dict[str, Any] = {"zero": 3, "host": "1GiB"}
    with pytest.raises(BudgetError) as refused:
        overspill.plan(model, optimizer, gpu=1, machine=machine, world=world, **asked)
    chosen = options({**asked, "gpu": refused.value.least})
    for rank in range(world):
        planning.make_plan(model, optimizer, chosen, planning.Ground(torch.device("cpu"), machine, None, world, rank))


def test_host_memory_that_is_asked_for_is_that_of_all_ranks_of_a_machine() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    optimizer, asked = torch.optim.AdamW(model.parameters()), {"gpu": "4MiB", "zero": 2, "world": 4}
    with pytest.raises(BudgetError, match="of which 4 ranks have") as refused:
        overspill.plan(model, optimizer, host="64KiB", **asked)
    least = re.search(r"host= to at least .*? \((\d+) bytes\)", str(refused.value))
    assert least is not None
    overspill.plan(model, optimizer, host=int(least[1]), **asked)


def test_room_on_a_disk_that_is_asked_for_is_that_of_all_ranks_of_a_machine(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    place = {"weight": "device", "grad": "device", "state": "nvme"}
    optimizer, asked = torch.optim.AdamW(model.parameters()), {"zero": 2, "world": 4, "place": place, "host": "1GiB"}
    with pytest.raises(BudgetError, match="of which 4 ranks have") as refused:
        overspill.plan(model, optimizer, nvme={str(tmp_path): "64KiB"}, **asked)
    least = re.search(r"nvme= a path with room for .*? \((\d+) bytes\)", str(refused.value))
    assert least is not None
    overspill.plan(model, optimizer, nvme={str(tmp_path): int(least[1])}, **asked)


def hooked(stages: list[int]) -> list[list[float]]:
    """Gradients to which a hook adds a quarter of one."""
    dist.init_process_group("gloo")
    found = []
    for zero in stages:
        torch.manual_seed(0)
        model: Any = nn.Linear(4, 4, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = overspill.prepare(model, optimizer, precision="fp32", zero=zero)
        model.weight.register_post_accumulate_grad_hook(lambda p: (p.grad.add_(torch.ones(4, 4), alpha=0.25), None)[1])
        model(torch.full((2, 4), dist.get_rank() + 1.0)).sum().backward()
        found.append(model.weight.grad.flatten().tolist())
        overspill.close(model)
    dist.destroy_process_group()
    return found


def wrapped() -> list[str]:
    """In DistributedDataParallel, as a script of before may do it still: before and after prepare."""
    dist.init_process_group("gloo")
    told = []
    for after in (False, True):
        model: Any = small.build()
        optimizer: Any = torch.optim.AdamW(model.parameters())
        model = model if after else nn.Sequential(DistributedDataParallel(model))
        with pytest.raises(ModelError) as refused:
            model, optimizer = overspill.prepare(model, optimizer, precision="fp32", zero=0)
            around = DistributedDataParallel(model)
            around(next(small.batches())["tokens"])
        told.append(str(refused.value))
    # Nothing is lost.
    small.loss_of(model, next(small.batches())).backward()
    optimizer.step()
    overspill.close(model)
    return told


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_wrapped_model_is_refused(ranks: int) -> None:
    for before, after in run(wrapped, ranks):
        assert "found DistributedDataParallel as '0' in it; leave it out" in before
        assert "found DistributedDataParallel around the model that overspill.prepare returned" in after


def test_what_a_hook_adds_is_multiplied_as_it_says() -> None:
    for rank in run(hooked, 2, [0, 1, 2, 3]):
        assert rank == [[2 * 1.5 + 0.25] * 16] * 4


def matrices() -> nn.Module:
    shapes = [(500, 500), (500, 400), (400, 500)]
    return nn.Sequential(*(nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in shapes)) for _ in range(8)))


def test_a_plan_for_several_ranks_fits_all_of_them() -> None:
    """Whole parameters are divided unevenly: another rank than the first may need more."""
    model = on_meta(matrices)
    optimizer = torch.optim.Adafactor(model.parameters())
    there = {"device": 1e12, "host": 1e12}
    chosen: dict[str, Any] = {"precision": "bf16", "zero": 3}

    def least(rank: int, **budgets: int) -> int:
        """What is said to be needed; 0: it fits."""
        try:
            make_plan(
                model, optimizer, options({**chosen, **budgets}), Ground(torch.device("cpu"), there, None, 2, rank)
            )
        except BudgetError as error:
            return error.least
        return 0

    chosen["gpu"] = max(least(rank, gpu=1, host=10**9) for rank in (0, 1))
    low, high = 0, 2**26
    while high - low > 2**16:
        middle = (low + high) // 2
        low, high = (middle, high) if least(1, host=middle) else (low, middle)
    overspill.plan(model, optimizer, host=high, world=2, machine=there, **chosen)
    with pytest.raises(BudgetError):
        # More than enough for the first.
        overspill.plan(model, optimizer, host=low, world=2, machine=there, **chosen)
