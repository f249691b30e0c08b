"""A rank that is late with any kind of op changes no bit on any rank."""

import pytest
import torch.distributed as dist

from overspill.program import Kind
from tests.ranks import run
from tests.zero import Case, digest, spilled

CASES = [Case(3, "nvme", "accumulate"), Case(2, "mixed", "clip"), Case(1, "host", "no_sync"), Case(0, "nvme", "clip")]


def delayed(case: Case, kinds: list[Kind | None], late: int) -> dict[Kind | None, tuple[int, list[float]]]:
    """What each delay on one rank gives; None stands for a little of all of them."""
    dist.init_process_group("gloo")
    found = {}
    for kind in [*kinds, ""]:
        print(case, kind, flush=True)
        delays = {kind: 0.005} if kind else dict.fromkeys(Kind, 0.001) if kind is None else {}
        (losses, got, _), _ = spilled(case, delays if dist.get_rank() == late else {})
        found[kind] = digest(got), losses
    dist.destroy_process_group()
    return found


def check(size: int, case: Case, kinds: list[Kind | None], late: int) -> None:
    results = run(delayed, size, case, kinds, late, timeout=280)
    for rank, found in enumerate(results):
        expected = found.pop("")
        assert [kind for kind, value in found.items() if value != expected] == [], f"rank {rank}"
    assert len({digest for found in results for digest, _ in found.values()}) == 1


def test_a_late_rank_changes_no_bit() -> None:
    check(2, Case(3, "nvme", "accumulate", steps=3), [None, Kind.REDUCE], late=1)


@pytest.mark.full
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_kind_of_op_may_be_late(case: Case, late: int) -> None:
    """The case with its steps cut short: every kind runs in each of them."""
    check(2, Case(case.zero, case.place, case.way, steps=3), [None, *Kind], late)


@pytest.mark.full
def test_one_of_three_is_late() -> None:
    check(3, Case(3, "mixed", "clip", steps=3), [None, Kind.GATHER, Kind.REDUCE, Kind.STORE], late=2)
