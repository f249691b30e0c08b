"""Over ranks, as on GPUs: pages by a thread of their own give the bits that updates on demand give."""

import pytest
import torch.distributed as dist

from overspill.program import Kind
from overspill.runtime import pager, parts, rooms
from tests.ranks import run
from tests.zero import Case, digest, spilled

CASES = [
    Case(zero, "host", way, model, precision="bf16", steps=4)
    for model, way in (("tiny", "clip"), ("small", "accumulate"))
    for zero in (1, 2, 3)
]


def both_ways(cases: list[Case]) -> list[tuple[Case, tuple[object, object]]]:
    """What each case gives on demand, and by the thread with one rank that is late."""
    dist.init_process_group("gloo")
    found = []
    started = []
    begin = pager.Pager.__init__

    def noted(*given: object) -> None:
        started.append(given)
        begin(*given)  # type: ignore[arg-type]

    pager.Pager.__init__ = noted  # type: ignore[method-assign]
    for case in cases:
        outcomes = []
        for kinds in (set(), {"cpu"}):
            parts.PAGED = rooms.PIECES = kinds
            started.clear()
            late = {Kind.REDUCE: 0.002, Kind.GATHER: 0.002} if kinds and dist.get_rank() == 1 else {}
            (losses, got, _), _ = spilled(case, late)
            assert bool(started) == bool(kinds), "the thread is what is tested here"
            outcomes.append((digest(got), losses))
        found.append((case, (outcomes[0], outcomes[1])))
    dist.destroy_process_group()
    return found


def check(size: int, cases: list[Case]) -> None:
    for rank, found in enumerate(run(both_ways, size, cases, timeout=250)):
        for case, (on_demand, ahead) in found:
            assert on_demand == ahead, f"rank {rank}: {case}"


def test_two_ranks() -> None:
    check(2, CASES)


@pytest.mark.full
@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks_than_some_units_have_elements(size: int) -> None:
    check(size, CASES)
