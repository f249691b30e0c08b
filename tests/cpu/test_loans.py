"""Room of gradients, lent to pages while there are none: nobody gets more than there is, and the bits stay the same."""

import dataclasses
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.plan import solver
from overspill.plan.memory import Request
from overspill.program import Kind
from overspill.runtime import handing, parts, rooms
from overspill.runtime.loans import Loans
from overspill.runtime.ring import Ring
from overspill.specs import Activations, Placement
from tests.cpu.test_ahead import check, loop, prepare, trained
from tests.reference import weights

HERE = Placement("device", "device", "host")


def made(total: int, most: int) -> Loans:
    loans = Loans()
    loans.allow(total, most)
    return loans


def test_what_gradients_leave_is_lent() -> None:
    loans = made(100, 70)
    loans.add_gradients(60)
    assert loans.room() == 40 and not loans.take(41) and loans.take(30) and loans.room() == 10
    loans.remove_gradients(60)
    assert loans.room() == 40, "no more than may be lent"
    loans.paused = True
    assert loans.room() == 0 and not loans.take(1)


def test_gradients_wait_until_enough_is_given_back() -> None:
    loans = made(100, 100)
    assert loans.take(40) and loans.take(40)
    came: list[float] = []
    thread = threading.Thread(target=lambda: (loans.add_gradients(50), came.append(1.0)))
    thread.start()
    time.sleep(0.05)
    assert not came and loans.room() == 0, "what is wanted is not lent again"
    loans.give_back(40)
    thread.join(5)
    assert came


def test_nobody_waits_for_what_will_not_come() -> None:
    loans = made(100, 100)
    assert loans.take(80)
    thread = threading.Thread(target=loans.add_gradients, args=(50,))
    thread.start()
    loans.end()
    thread.join(5)
    assert not thread.is_alive() and not loans.take(1)
    loans.add_gradients(200)  # more than planned: not our business


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A short ring of small pages, and all that gradients leave is lent; yields the slots that were."""
    monkeypatch.setattr(parts, "PAGED", {"cpu"})
    monkeypatch.setattr(rooms, "PIECES", {"cpu"})
    monkeypatch.setattr(solver, "DEPTHS", (2,))
    monkeypatch.setattr(solver, "MOST_SLOTS", 2)
    monkeypatch.setattr(solver, "PAGE", (512, 2048))
    monkeypatch.setattr(handing, "SPARE", 0)
    found: list[int] = []
    take = Ring.take

    def taken(ring: Ring, slot: int, stream: Any) -> bool:
        found.append(slot)
        return take(ring, slot, stream)

    monkeypatch.setattr(Ring, "take", taken)
    yield found


def lending(nvme: Path, delays: dict[Kind, float] | None = None, **keywords: Any) -> tuple[Any, Any]:
    model, optimizer = prepare("states", nvme, **keywords)
    engine = overspill.api._engine(model)
    program = engine.executor.program
    engine.executor.program = dataclasses.replace(program, limits=dataclasses.replace(program.limits, lent=1 << 40))
    loans = engine.parts.made.grads.rooms.loans
    loans.allow(rooms.bytes_in_rooms(program.model.units, program.placements), 1 << 40)
    counts: list[tuple[int, int]] = []
    add = loans.add_gradients
    loans.add_gradients = lambda nbytes: (add(nbytes), counts.append((loans._gradients, loans._lent)))
    # The model shall come by, and let gradients go, before all pages are updated.
    engine.executor.lanes.delays |= {Kind.UPDATE: 0.001, **(delays or {})}
    found = loop(model, optimizer, clip=0.5)
    assert counts and all(gradients + lent <= loans._total for gradients, lent in counts)
    kept = weights(overspill.close(model))
    assert loans._lent == 0
    return found, kept


@pytest.mark.parametrize("states", ["exact", "compact"])
def test_the_same_bits_with_lent_slots(states: str, tight: list[int], tmp_path: Path) -> None:
    expected = trained("states", tmp_path, clip=0.5, states=states)
    assert not tight
    check(lending(tmp_path, states=states), expected)
    assert len(tight) > 5


@pytest.mark.parametrize("kind", [Kind.STATE_FETCH, Kind.UPDATE, Kind.STATE_STORE, Kind.UPDATED])
def test_delays_change_no_bit(kind: Kind, tight: list[int], tmp_path: Path) -> None:
    check(lending(tmp_path, {kind: 0.001}), trained("states", tmp_path, clip=0.5))
    assert tight


def test_without_a_hole_nothing_is_lent(tight: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(ring: Ring, slot: int, stream: Any) -> bool:
        tight.append(slot)
        return False

    monkeypatch.setattr(Ring, "take", full)
    check(lending(tmp_path), trained("states", tmp_path, clip=0.5))
    assert len(tight) == 1, "it is not tried again"


def test_a_plan_lends_what_activations_leave() -> None:
    """Before the first gradient they may need more than afterwards."""
    model, optimizer = prepare_plain()
    made = overspill.plan(model, optimizer, gpu="64MiB", host="64MiB", place={"state": "host"}, precision="bf16")
    grads = made.bytes_of("device", "grad")
    request = Request(made.model, made.budget, {}, made.page_bytes, copied_norms=True, paged=True)
    rest = made.budget.device - made.peak("device") + made.bytes_of("device", "activations")
    for before, lent in ((0, grads), (rest + grads // 2, grads - grads // 2), (rest + grads, 0)):
        seen = dataclasses.replace(request, activations=Activations(before, rest))
        found = solver.improve(seen, made, roles=())
        assert (found.limits.lent if found is not None else 0) == lent, before


def prepare_plain() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
    return model, torch.optim.AdamW(model.parameters())
