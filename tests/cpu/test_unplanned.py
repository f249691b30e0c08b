"""Gradients wider than planned: where the budget has no room for them they are refused, and all else goes on."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import overspill
from overspill import setup
from overspill.config import options
from overspill.errors import BudgetError
from overspill.plan.plan import UNPLANNED
from overspill.runtime.parts import Planned
from overspill.specs import ROLES, TIERS, MiB
from tests import small
from tests.places import PLACES
from tests.ranks import run
from tests.reference import differing, weights
from tests.zero import Case, batches, prepared

Batches = Iterator[dict[str, Tensor]]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def made(place: str, precision: str, nvme: Path, tight: bool) -> tuple[Any, Any]:
    """Tight: in budgets of what the plan takes, to the byte."""
    model = small.build()
    optimizer, how = adamw(model), {"place": PLACES[place], "precision": precision}
    if not tight:
        return overspill.prepare(model, optimizer, nvme=nvme, **how)
    plan = overspill.plan(model, optimizer, nvme=nvme, **how)
    on_disk = {str(nvme): plan.peak("nvme")} if plan.peak("nvme") else None
    return overspill.prepare(model, optimizer, host=plan.peak("host"), nvme=on_disk, **how)


def train(model: Any, optimizer: Any, stream: Batches, steps: int = 2) -> None:
    for _ in range(steps):
        small.loss_of(model, next(stream)).backward()
        optimizer.step()
        optimizer.zero_grad()


def expected(place: str, precision: str, nvme: Path) -> tuple[dict[str, Tensor], list[Tensor], dict[str, Tensor]]:
    """Of a loop without the pass that is refused: the weights then, the first pass's gradients, the last weights."""
    model, optimizer = made(place, precision, nvme, tight=False)
    stream = small.batches()
    train(model, optimizer, stream)
    small.loss_of(model, next(stream)).backward()
    then, grads = weights(model), [overspill.grad(p) for p in model.parameters()]
    next(stream)
    optimizer.zero_grad()
    train(model, optimizer, stream)
    return then, grads, weights(overspill.close(model))


def large(model: nn.Module, grads: list[Tensor]) -> list[tuple[nn.Parameter, Tensor]]:
    """What has no room for a sum: what is smaller may have one before the first is refused."""
    return [(p, g) for p, g in zip(model.parameters(), grads, strict=True) if p.numel() > 256]


def interrupted(place: str, precision: str, nvme: Path) -> tuple[Any, Any, Batches]:
    """A model of which a second backward pass has been refused."""
    model, optimizer = made(place, precision, nvme, tight=True)
    stream = small.batches()
    train(model, optimizer, stream)
    small.loss_of(model, next(stream)).backward()
    with pytest.raises(BudgetError, match=r"found a second one: .*; say micro_batches=2 .*; now call zero_grad\(\)"):
        small.loss_of(model, next(stream)).backward()
    return model, optimizer, stream


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("place", ["host", "mixed", "nvme"])
def test_a_second_pass_that_is_refused_changes_nothing(place: str, precision: str, tmp_path: Path) -> None:
    then, grads, last = expected(place, precision, tmp_path)
    model, optimizer, stream = interrupted(place, precision, tmp_path)
    uses: list[Callable[[], Any]] = [
        lambda: model.last.weight.detach().sum(),
        optimizer.state_dict,
        lambda: overspill.save(tmp_path / "saved", model, optimizer),
        lambda: overspill.export(model, tmp_path / "exported"),
        lambda: overspill.settle(model),
        lambda: overspill.state(model.last.weight),
    ]
    for use in uses:
        use()
    assert differing(weights(model), then) == []
    assert all(torch.equal(overspill.grad(p), g) for p, g in large(model, grads))
    with pytest.raises(BudgetError, match="found a second one"):
        small.loss_of(model, next(small.batches())).backward()
    optimizer.zero_grad()
    train(model, optimizer, stream)
    assert differing(weights(overspill.close(model)), last) == []


def test_a_model_is_closed_and_prepared_with_more_room(tmp_path: Path) -> None:
    then, grads, _ = expected("host", "bf16", tmp_path)
    model, optimizer, stream = interrupted("host", "bf16", tmp_path)
    given = optimizer.given
    overspill.close(model)
    assert differing(weights(model), then) == []
    assert all(torch.equal(p.grad, g) for p, g in large(model, grads))
    model.zero_grad()
    model, optimizer = overspill.prepare(model, given, place=PLACES["host"], micro_batches=2)
    for _ in range(2):
        small.loss_of(model, next(stream)).backward()
    optimizer.step()


def assigned(model: nn.Module, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad = p.grad * 0.5
    optimizer.step()


def unscaled(model: nn.Module, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("how", [assigned, unscaled], ids=lambda how: how.__name__)
def test_one_pass_is_not_taken_for_two(how: Callable[..., None], precision: str, tmp_path: Path) -> None:
    _, _, last = expected("host", precision, tmp_path)
    model, optimizer = made("host", precision, tmp_path, tight=True)
    stream = small.batches()
    train(model, optimizer, stream)
    small.loss_of(model, next(stream)).backward()
    with pytest.raises(BudgetError, match=rf"expected gradients of {precision}, .* put into p.grad,") as caught:
        how(model, optimizer)
    assert "second" not in str(caught.value) and "micro_batches=2" in str(caught.value)
    assert ("leave torch.amp.GradScaler out" in str(caught.value)) == (precision == "fp16")
    next(stream)
    optimizer.zero_grad()
    train(model, optimizer, stream)
    assert differing(weights(overspill.close(model)), last) == []


@pytest.mark.parametrize("place", ["device", "host", "nvme"])
def test_a_report_counts_what_was_taken_beyond_the_plan(place: str, tmp_path: Path) -> None:
    model, optimizer = made(place, "bf16", tmp_path, tight=False)
    stream, before = small.batches(), optimizer.report()["plan"]
    small.loss_of(model, next(stream)).backward()
    assert optimizer.report()["plan"] is before
    small.loss_of(model, next(stream)).backward()
    report = optimizer.report()
    plan, homes = report["plan"], overspill.api._engine(model).parts.tiers
    assert plan.bytes_of(place, UNPLANNED) >= 2 * sum(p.numel() for p in model.parameters())
    assert report["peak"] == plan.peaks and report["bytes"][place][UNPLANNED] == plan.bytes_of(place, UNPLANNED)
    for tier in TIERS:
        assert plan.peak(tier) <= getattr(plan.budget, tier)
        held = sum(found.capacity for name, found in homes.items() if name in (tier, f"{tier}+"))
        assert held <= plan.peak(tier)
        more = held - sum(before.bytes_of(tier, role) for role in ROLES)
        assert tier == "device" or plan.peak(tier) >= before.peak(tier) + more
    overspill.close(model)
    model = small.build()
    model, optimizer = overspill.prepare(model, adamw(model), nvme=tmp_path, place=plan)
    assert not any(line.what == UNPLANNED for line in optimizer.report()["plan"].lines)
    overspill.close(model)


def test_what_is_taken_on_two_tiers_is_within_both_budgets(tmp_path: Path) -> None:
    """Room on a disk takes staging in host memory, beside what was taken of that before."""
    model = small.build()
    keywords = {"place": PLACES["host"], "precision": "bf16", "nvme": {str(tmp_path): "1GiB"}}
    plan = overspill.plan(model, adamw(model), **keywords)
    plan = replace(plan, budget=replace(plan.budget, host=plan.peak("host") + 3 * MiB))
    for first, fits in ((1 << 20, True), (2 << 20, False)):
        planned, tiers = Planned(owned=0, peak=0, grads=0), {}
        extend = setup._Extend(plan, planned, options(keywords), tiers, torch.device("cpu"))
        extend({"host": first}, True)
        with contextlib.nullcontext() if fits else pytest.raises(BudgetError, match="more on host"):
            extend({"nvme": 4096}, True)
        assert plan.peak("host") + planned.granted["host"] <= plan.budget.host
        for tier in tiers.values():
            tier.close()


def test_a_reported_plan_gives_activations_their_room_back(tmp_path: Path) -> None:
    """What was taken beyond a plan that fills its budget came from them; a fresh model has not taken it."""
    model = small.build()
    keywords = {"place": PLACES["device"], "precision": "bf16", "nvme": tmp_path}
    roomy = overspill.plan(model, adamw(model), **keywords)
    gpu = roomy.peak("device") - roomy.bytes_of("device", "activations") + (1 << 18)
    model, optimizer = overspill.prepare(model, adamw(model), gpu=gpu, **keywords)
    first, stream = optimizer.report()["plan"], small.batches()
    for _ in range(2):
        small.loss_of(model, next(stream)).backward()
    told = optimizer.report()["plan"]
    assert told.bytes_of("device", UNPLANNED) and told.peak("device") == gpu
    assert told.bytes_of("device", "activations") < first.bytes_of("device", "activations")
    overspill.close(model)
    again = small.build()
    again, optimizer = overspill.prepare(again, adamw(again), place=told)
    plan = optimizer.report()["plan"]
    assert first.peak("device") <= plan.peak("device") <= gpu
    assert plan.bytes_of("device", "activations") >= first.bytes_of("device", "activations")
    overspill.close(again)


def on_ranks(case: Case) -> list[str]:
    """Every rank is refused at the same place, and all go on together."""
    dist.init_process_group("gloo")
    found: list[dict[str, Tensor]] = []
    host: int | None = None
    for tight in (False, True):
        with tempfile.TemporaryDirectory() as nvme:
            model, optimizer = prepared(case, nvme, **({"host": host} if host else {}))
            peaks: list[Any] = [None, None]
            dist.all_gather_object(peaks, optimizer.report()["plan"].peak("host"))
            host = 2 * max(peaks)
            stream = batches()
            train(model, optimizer, stream)
            small.loss_of(model, next(stream)).backward()
            if tight:
                with pytest.raises(BudgetError, match="found a second one"):
                    small.loss_of(model, next(stream)).backward()
            else:
                next(stream)
            optimizer.zero_grad()
            train(model, optimizer, stream)
            found.append(weights(overspill.close(model)))
    dist.destroy_process_group()
    return differing(*found)


@pytest.mark.parametrize("zero", [*(pytest.param(zero, marks=pytest.mark.full) for zero in (0, 2)), 3])
def test_ranks_are_refused_together(zero: int) -> None:
    assert run(on_ranks, 2, Case(zero, "host", precision="bf16")) == [[], []]
