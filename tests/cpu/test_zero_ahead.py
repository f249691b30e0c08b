"""Over ranks, as on GPUs: pages by a thread of their own, or by the host's cores, give the bits of those on demand."""

import pytest
import torch.distributed as dist

from overspill.kernels import cpu, executors
from overspill.kernels.reference import ieee_root
from overspill.plan import sharing
from overspill.plan.hands import Chosen
from overspill.program import Kind
from overspill.runtime import pager, parts, rooms
from overspill.runtime.kernel_update import KernelUpdate
from overspill.specs import Hands
from tests.ranks import run
from tests.zero import Case, digest, spilled

CASES = [
    Case(zero, "host", way, model, precision="bf16", steps=4)
    for model, way in (("tiny", "clip"), ("small", "accumulate"))
    for zero in (1, 2, 3)
]


WAYS: tuple[tuple[set[str], Hands], ...] = ((set(), "streamed"), ({"cpu"}, "streamed"), ({"cpu"}, "host"))
"""Where there is a thread of pages, and who updates."""


def every_way(cases: list[Case]) -> list[tuple[Case, list[object], list[bool]]]:
    """What each case gives on demand; by the thread, with one rank that is late; and by the cores, which read
    gradients in their homes. And whether this rank's cores updated something: it may have too few elements of its
    own for them."""
    dist.init_process_group("gloo")
    found, started, updated = [], list[object](), list[object]()
    begin, run_on_host = pager.Pager.__init__, KernelUpdate.run_on_host

    def noted(*given: object) -> None:
        started.append(given)
        begin(*given)  # type: ignore[arg-type]

    def counted(*given: object) -> None:
        updated.append(given)
        run_on_host(*given)  # type: ignore[arg-type]

    pager.Pager.__init__ = noted  # type: ignore[method-assign]
    KernelUpdate.run_on_host = counted  # type: ignore[method-assign]
    # The root of the cores, and of a GPU.
    executors.torch_root, parts.CORES = ieee_root, {"cpu"}
    for case in cases:
        outcomes, by_cores = list[object](), list[bool]()
        for kinds, hands in WAYS if cpu.library() is not None else WAYS[:2]:
            parts.PAGED = rooms.PIECES = kinds
            sharing.choose = lambda speeds, sizes, hands=hands: Chosen(hands)
            started.clear()
            updated.clear()
            late = {Kind.REDUCE: 0.002, Kind.GATHER: 0.002} if kinds and dist.get_rank() == 1 else {}
            (losses, got, _), _ = spilled(case, late)
            assert bool(started) == bool(kinds), "the thread is what is tested here"
            assert hands != "streamed" or not updated, "and not the cores"
            by_cores.append(bool(updated))
            outcomes.append((digest(got), losses))
        found.append((case, outcomes, by_cores))
    dist.destroy_process_group()
    return found


def check(size: int, cases: list[Case]) -> None:
    of_ranks = run(every_way, size, cases, timeout=250)
    for rank, found in enumerate(of_ranks):
        for case, (on_demand, *others), _ in found:
            assert all(other == on_demand for other in others), f"rank {rank}: {case}"
    for each in zip(*of_ranks, strict=True):
        some = [any(by_rank) for by_rank in zip(*(by_cores for _, _, by_cores in each), strict=True)]
        assert some == [hands != "streamed" for _, hands in WAYS[: len(some)]], f"{each[0][0]}: who updated"


def test_two_ranks() -> None:
    check(2, CASES)


@pytest.mark.full
@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks_than_some_units_have_elements(size: int) -> None:
    check(size, CASES)
