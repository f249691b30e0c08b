"""Pages overlap with what the model computes: in virtual time, see tests/virtual.py."""

from dataclasses import replace

import pytest

from overspill.runtime import handing
from overspill.specs import Limits
from tests.virtual import LINK, PAGE, Gpu, Work

ALL = frozenset(range(35))
LIMITS = Limits(window=0, depth=4, flight=0)
CONSUMED = Limits(window=0, depth=4, flight=0, consumed=2_000_000_000)
STEPS = 5


def steady(work: Work, twice: bool = False) -> float:
    """Seconds of a step. `twice`: whether some pages may be fetched in vain."""
    gpu = Gpu(work)
    found = gpu.steps(STEPS)
    assert max(found[2:]) < 1.1 * min(found[2:]), "steps are alike"
    assert twice or gpu.ways.fetched <= STEPS * pages(work) + work.limits.depth
    return found[-1]


def pages(work: Work) -> int:
    """That pass."""
    counts = [work.pages * 2 // 3, *[work.pages] * work.layers, work.pages * 2 // 3]
    return sum(count for unit, count in enumerate(counts) if unit not in work.resident)


def computing(work: Work) -> float:
    """With all states on the device."""
    return steady(replace(work, resident=ALL))


def passing(work: Work) -> float:
    """Of all pages over the link, one way."""
    return pages(work) * PAGE / LINK


@pytest.mark.parametrize("waits", [False, True], ids=["loop ahead", "loop waits"])
@pytest.mark.parametrize("depth", [4, 9])
@pytest.mark.parametrize("resident", [frozenset(), frozenset({0, 34})], ids=["none", "some"])
def test_eager_updates_are_beside_the_step(resident: frozenset[int], depth: int, waits: bool) -> None:
    work = Work(limits=replace(CONSUMED, depth=depth), eager=True, resident=resident, waits=waits)
    assert passing(work) < computing(work), "there is time for them"
    assert steady(work) < 1.1 * computing(work)


@pytest.mark.parametrize("depth", [4, 9])
def test_lazy_updates_are_beside_the_forward_pass(depth: int) -> None:
    work = Work(limits=replace(LIMITS, depth=depth))
    backward = (work.layers + 2) * work.backward
    assert passing(work) > computing(work) - backward, "the link is what takes longer"
    assert steady(work) < 1.05 * (passing(work) + backward)


@pytest.mark.parametrize("eager", [False, True], ids=["lazy", "eager"])
def test_short_steps_take_as_long_as_the_link(eager: bool) -> None:
    work = Work(forward=3e-3, backward=9e-3, host=(1e-3, 3e-3), eager=eager, limits=CONSUMED if eager else LIMITS)
    least = passing(work) + (0 if eager else (work.layers + 2) * work.backward)
    assert steady(work) < 1.1 * least


@pytest.mark.parametrize("waits", [False, True], ids=["loop ahead", "loop waits"])
def test_what_is_next_may_be_foreseen_wrongly(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that nobody needs for long leave their slots to the others."""
    monkeypatch.setattr(handing, "next_updates", lambda program, state: (5, 4, 3, 2, 1))
    work = Work(limits=replace(CONSUMED, depth=9), eager=True, waits=waits)
    assert steady(work, twice=True) < 1.1 * computing(work)
