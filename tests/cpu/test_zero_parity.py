"""Over ranks: training is that of DistributedDataParallel, whatever is divided and wherever it lives.

With up to two ranks bit for bit. Otherwise there are two causes of a tolerance, and no others:
- torch sums over three ranks and more in another order than ours, which is that of the ranks;
- torch reduces, with every pass, the average so far and this pass together; ours reduces this pass and adds it.
Clipping by a norm adds a third: the norms of shares are put together in fp64, so the last bit of it may be another.
In each case ours at any stage has the bits of ours at stage 0, clipping apart.
"""

import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import overspill
from tests import small
from tests.ranks import run
from tests.reference import weights
from tests.zero import CLIP, OPTIMIZERS, Case, Found, batches, build, compare, digest, prepared

SIZES = (1, 2, 3, 4, 8)
STAGES = (0, 1, 2, 3)
WAYS = ("plain", "clip", "accumulate", "no_sync", "recompute", "reentrant")
TIERS = ("device", "host", "nvme")
WHAT = ("small adamw fp32", "small sgd fp32", "small adafactor fp32", "matrices muon fp32", "frozen adamw fp32")
WHAT += ("tiny adamw fp32", "small adamw bf16", "small adamw fp16")
TOLERANCE = 3e-5
"""Of the largest weight: 20 steps of lr 1e-2, in which Adam divides rounding errors by the size of the gradient."""
WIDER = {"muon": 5e-3, "bf16": 2e-2, "fp16": 2e-3}
"""Muon iterates in bf16 whatever it is given; torch sums gradients of bf16 in bf16, and ours in fp32; where weights
have 16 bits, the last bit of a norm can become the last bit of a weight."""


def tolerance(case: Case) -> float:
    return WIDER.get(case.optimizer, WIDER.get(case.precision, TOLERANCE))


def exact(case: Case, size: int) -> bool:
    """Whether the bits of DistributedDataParallel are expected."""
    several = case.way == "accumulate" or (case.way == "no_sync" and case.zero in (2, 3))
    return size == 1 or (size == 2 and not several and case.way != "clip")


def wrong(size: int, cases: list[Case], timeout: float = 280.0) -> Iterator[str]:
    results = run(compare, size, cases, timeout=timeout)
    for case in cases:
        found = [result[case] for result in results]
        if len({ours.digest for _, ours in found}) > 1:
            yield f"{case} on {size}: the ranks ended with different weights"
        for rank, (ddp, ours) in enumerate(found):
            if ddp is not None and not _right(ddp, exact(case, size), tolerance(case)):
                yield f"{case} on {size}, rank {rank}: {ddp} beside DistributedDataParallel"
            if not _right(ours, case.way != "clip", tolerance(case)):
                yield f"{case} on {size}, rank {rank}: {ours} beside stage 0"


def _right(found: Found, bits: bool, tolerance: float) -> bool:
    return found.exact if bits else found.error <= tolerance * found.scale


# ---- a few with every change


def test_two_ranks_train_as_ddp() -> None:
    cases = [Case(1, "nvme", "no_sync"), Case(2, "mixed", "accumulate"), Case(3, "host", "reentrant")]
    cases += [Case(3, "mixed", model="tiny"), Case(2, "host", model="frozen"), Case(3, "nvme", precision="bf16")]
    cases += [Case(3, "mixed", optimizer="adafactor"), Case(1, "host", model="matrices", optimizer="muon")]
    assert list(wrong(2, [Case(3, "nvme", "clip"), *(replace(case, steps=4) for case in cases)])) == []


@pytest.mark.full
def test_three_ranks_train_as_ddp() -> None:
    assert list(wrong(3, [Case(3, "mixed", "clip", steps=4), Case(1, "host", model="tiny", steps=4)])) == []


def test_one_rank_is_plain_torch_at_every_stage() -> None:
    cases = [Case(0, "device", "accumulate"), Case(1, "host", "clip"), Case(2, "nvme", "no_sync"), Case(3, "mixed")]
    assert list(wrong(1, [replace(case, steps=4) for case in cases])) == []


# ---- all of them


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_every_stage_on_every_tier(way: str) -> None:
    cases = [Case(zero, tier, way) for zero in STAGES for tier in TIERS]
    assert list(wrong(2, cases)) == []


def pairwise(*columns: tuple) -> list[tuple]:
    """Rows in which every two values of different columns meet at least once: greedily, the most new pairs first."""
    pairs = lambda row: {((i, row[i]), (j, row[j])) for i, j in itertools.combinations(range(len(row)), 2)}  # noqa: E731
    rows = list(itertools.product(*columns))
    open_, found = set().union(*map(pairs, rows)), []
    while open_:
        found.append(max(rows, key=lambda row: len(pairs(row) & open_)))
        open_ -= pairs(found[-1])
    return found


MATRIX = pairwise(SIZES, STAGES, (*TIERS, "mixed"), WAYS, WHAT)


@pytest.mark.full
@pytest.mark.parametrize("size", SIZES)
def test_pairwise(size: int) -> None:
    cases = [Case(zero, place, way, *what.split()) for n, zero, place, way, what in MATRIX if n == size]
    assert list(wrong(size, cases)) == []


def test_clipping_acts_on_some_steps_only() -> None:
    """Else the tests above would not show that both cases are right."""
    model = build(Case(0))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    streams, acted = [batches(0), batches(1)], []
    for _ in range(20):
        for stream in streams:
            (small.loss_of(model, next(stream)) / 2).backward()
        acted.append(bool(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP))
        optimizer.step()
        optimizer.zero_grad()
    assert True in acted and False in acted


# ---- fp16


def overflow(place: str, stages: list[int]) -> list[tuple[list[float], int, int]]:
    """Rank 1 overflows at the third step, rank 0 at the fifth."""
    dist.init_process_group("gloo")
    found = []
    for zero in stages:
        with tempfile.TemporaryDirectory() as nvme:
            model, optimizer = prepared(Case(zero, place, precision="fp16"), nvme)
            stream, scales = batches(), []
            for step in range(6):
                loss = small.loss_of(model, next(stream))
                overflows = (step, dist.get_rank()) in ((2, 1), (4, 0))
                (loss * 1e30 if overflows else loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                scales.append(optimizer.report()["loss_scale"])
            found.append((scales, optimizer.report()["skipped"], digest(weights(model))))
            overspill.close(model)
    dist.destroy_process_group()
    return found


@pytest.mark.full
@pytest.mark.parametrize("stages", [[0, 3], [0, 1, 2]], ids=str)
def test_an_overflow_on_one_rank_skips_the_step_on_all(stages: list[int]) -> None:
    results = run(overflow, 2, "mixed", stages)
    scales, skipped, _ = results[0][0]
    # The first scale is too large for the gradients of the first steps anyway.
    assert scales[2] < scales[1] and scales[4] < scales[3] and skipped >= 2
    assert all(each == results[0][0] for result in results for each in result)
