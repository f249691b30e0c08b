"""Ranks that do not all do the same: what is meant to work gives the bits of DistributedDataParallel, what cannot work
ends soon, on all ranks, with a message that says who was where."""

import os
import signal
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import overspill
from overspill.errors import RankError
from tests import small
from tests.ranks import Ended, run, run_raw
from tests.reference import differing, weights
from tests.zero import OPTIMIZERS, Case, batches, prepared

STEPS = 5


# ---- what works


class Experts(nn.Module):
    """Each batch goes to one of three experts, which differ from rank to rank; some are not used by any."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(small.VOCABULARY, small.WIDTH)
        self.blocks = nn.ModuleList(small.Block() for _ in range(3))
        self.bias = nn.Parameter(torch.zeros(3, small.VOCABULARY))
        self.head = nn.Linear(small.WIDTH, small.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        chosen = int(tokens.sum()) % 3
        return self.head(self.blocks[chosen](self.embedding(tokens))) + self.bias[chosen]


def experts() -> nn.Module:
    torch.manual_seed(0)
    return Experts()


def loss_of(model: Any, batch: dict[str, Tensor], **call: Any) -> Tensor:
    logits = model(batch["tokens"], **call)
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def skipping(model: Any, batch: dict[str, Tensor], step: int) -> Tensor:
    """At step 3 no rank uses the last block, at step 4 all use all."""
    skip = (dist.get_rank() + step) % 3 if step < 3 else 3 if step == 3 else None
    return loss_of(model, batch, skip=skip)


def fewer_rows(model: Any, batch: dict[str, Tensor], step: int) -> Tensor:
    rows = 1 + (dist.get_rank() + step) % 3
    return loss_of(model, {name: value[:rows] for name, value in batch.items()})


def usual(model: Any, batch: dict[str, Tensor], step: int) -> Tensor:
    return loss_of(model, batch)


def looks(model: Any, batch: dict[str, Tensor], step: int) -> Tensor:
    """Between steps rank 1 evaluates, rank 0 looks at weights; only in ours."""
    if not isinstance(model, DistributedDataParallel):
        if dist.get_rank() == 1 or step == 2:
            model.eval()
            with torch.no_grad():
                for _ in range(1 + step):
                    model(batch["tokens"])
            model.train()
        if dist.get_rank() == 0:
            torch.stack([p.norm() for p in model.parameters()]).sum().item()
            if step % 2:
                model.state_dict()
                overspill.state(model.embedding.weight)
    return loss_of(model, batch)


def idle(model: Any, batch: dict[str, Tensor], step: int) -> Tensor | None:
    """At step 2 the last rank has no backward pass: as if its gradients were zero."""
    if step != 2 or dist.get_rank() != dist.get_world_size() - 1:
        return loss_of(model, batch)
    return loss_of(model, batch) * 0 if isinstance(model, DistributedDataParallel) else None


LOOPS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, dict[str, Tensor], int], Tensor | None]]] = {
    "a block unused on some ranks, then on all": (small.build, skipping),
    "experts": (experts, usual),
    "batches of different sizes": (small.build, fewer_rows),
    "looks and evaluations on some ranks": (small.build, looks),
    "a rank without a backward pass": (small.build, idle),
    "a look at gradients on one rank": (small.build, usual),
}


def loop(model: Any, optimizer: Any, name: str) -> list[float]:
    stream, losses = batches(), []
    for step in range(STEPS):
        loss = LOOPS[name][1](model, next(stream), step)
        if loss is not None:
            loss.backward()
            losses.append(loss.item())
        if name == "a look at gradients on one rank" and dist.get_rank() == 0:
            # The norm of all of them is refused on one rank alone: whoever clips must do so on all.
            torch.stack([p.grad.sum() for p in model.parameters()]).sum().item()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def both(names: list[str], stages: list[int], place: str) -> list[str]:
    """What differs from DistributedDataParallel."""
    dist.init_process_group("gloo")
    found = []
    for name in names:
        model = LOOPS[name][0]()
        expected = loop(
            DistributedDataParallel(model, find_unused_parameters=True), OPTIMIZERS["adamw"](model.parameters()), name
        )
        for zero in stages:
            print(name, zero, flush=True)
            with tempfile.TemporaryDirectory() as nvme:
                ours, optimizer = prepared(Case(zero, place), nvme, LOOPS[name][0]())
                losses = loop(ours, optimizer, name)
                # The loss of a rank without a backward pass is not in both.
                if losses != expected and name != "a rank without a backward pass":
                    found.append(f"{name} at stage {zero}: losses {losses} beside {expected}")
                if different := differing(weights(ours), weights(model)):
                    found.append(f"{name} at stage {zero}: {different}")
                overspill.close(ours)
    dist.destroy_process_group()
    return found


def test_ranks_may_differ_at_stage_3() -> None:
    assert run(both, 2, list(LOOPS), [3], "mixed", timeout=250) == [[]] * 2


@pytest.mark.full
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_ranks_may_differ(zero: int) -> None:
    assert run(both, 2, list(LOOPS), [zero], "mixed", timeout=250) == [[]] * 2


# ---- what does not


def one_batch_less(zero: int) -> None:
    """The last rank's loader ends a step earlier, and its script with it."""
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as nvme:
        model, optimizer = prepared(Case(zero, "host"), nvme)
        stream = batches()
        for _ in range(3 - (dist.get_rank() == dist.get_world_size() - 1)):
            loss_of(model, next(stream)).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("zero", [3, pytest.param(0, marks=pytest.mark.full)])
def test_a_loader_that_ends_earlier_is_told(zero: int) -> None:
    ended = run_raw(one_batch_less, 2, zero)
    assert ended[1].code == 0, ended[1].stderr
    assert ended[0].code == 1 and ended[0].seconds - ended[1].seconds < 40, ended[0]
    for word in ("RankError", "rank 1 left: its script ended", "unit ", "step 2"):
        assert word in ended[0].stderr, f"{word!r} is not in {ended[0].stderr[-1500:]}"


REFUSED = {
    "a gradient is gone": ("expected the same on all ranks at optimizer.step()", "do the same"),
    "clips alone": ("rank 0 at the norm of the gradients", "rank 1 at optimizer.step()"),
    "closes": ("rank 0 at overspill.close()", "rank 1 at optimizer.step()"),
}


def refused(zero: int) -> dict[str, str]:
    """What all ranks are told when gradients, or calls, are not alike."""
    dist.init_process_group("gloo")
    found, first = {}, dist.get_rank() == 0
    for way in REFUSED:
        print(way, flush=True)
        with tempfile.TemporaryDirectory() as nvme:
            model, optimizer = prepared(Case(zero, "host"), nvme)
            loss_of(model, next(batches())).backward()
            with pytest.raises(RankError) as error:
                if way == "a gradient is gone" and first:
                    model.blocks[1].up.weight.grad = None
                if way == "clips alone" and first:
                    optimizer.clip_grad_norm_(1.0)
                if way == "closes" and first:
                    overspill.close(model)
                optimizer.step()
            found[way] = str(error.value)
    return found


@pytest.mark.full
@pytest.mark.parametrize("zero", [1, 3])
def test_what_cannot_be_done_alone_is_refused_on_all(zero: int) -> None:
    for found in run(refused, 2, zero):
        for way, words in REFUSED.items():
            assert all(word in found[way] for word in words), found[way]


def broken_off(zero: int) -> str:
    """What is told where a backward pass broke off on the last rank only, which goes on with the next batch."""
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as nvme:
        model, optimizer = prepared(Case(zero, "host"), nvme)
        stream, last = batches(), dist.get_rank() == dist.get_world_size() - 1
        with pytest.raises(RankError) as told:
            if last:
                hook = model.blocks[1].up.weight.register_hook(lambda gradient: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    loss_of(model, next(stream)).backward()
                hook.remove()
            for _ in range(2):
                loss_of(model, next(stream)).backward()
                optimizer.step()
                optimizer.zero_grad()
    return str(told.value)


@pytest.mark.parametrize("zero", [2, *(pytest.param(zero, marks=pytest.mark.full) for zero in (0, 1, 3))])
def test_a_backward_that_broke_off_on_one_rank_is_told_on_all(zero: int) -> None:
    for found in run(broken_off, 2, zero):
        assert "rank 1 at a forward after a backward that an error broke off" in found, found
        assert "rank 0 at optimizer.step()" in found, found


def interrupted_at_the_end_of_prepare() -> None:
    """The other rank, which is prepared, does not use its model."""
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as nvme, pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(overspill.api, "SpilledOptimizer", interrupted)
            with pytest.raises(KeyboardInterrupt):
                prepared(Case(2, "host"), nvme)
        else:
            prepared(Case(2, "host"), nvme)
        dist.barrier()


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_what_fails_on_one_rank_only_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERSPILL_TIMEOUT", "20")
    run(interrupted_at_the_end_of_prepare, 2)


# ---- ranks that die


def killed(where: str, victim: int, zero: int) -> None:
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as nvme:
        model, optimizer = prepared(Case(zero, "host"), nvme)
        stream = batches()
        for step in range(4):
            dies = step == 2 and dist.get_rank() == victim

            def die(*_: object, dies: bool = dies) -> None:
                if dies:
                    os.kill(os.getpid(), signal.SIGKILL)

            hook = model.blocks[2].norm.register_forward_hook(die) if where == "forward" else None
            loss = loss_of(model, next(stream))
            if where == "backward":
                model.blocks[1].up.weight.register_post_accumulate_grad_hook(die)
            loss.backward()
            if where == "step":
                die()
            optimizer.step()
            optimizer.zero_grad()
            if hook is not None:
                hook.remove()


def check_others(ended: list[Ended], victim: int) -> None:
    assert ended[victim].code == -signal.SIGKILL, ended[victim].stderr
    for rank, end in enumerate(ended):
        if rank != victim:
            assert end.code == 1, f"rank {rank}: {end}"
            assert end.seconds - ended[victim].seconds < 60, [end.seconds for end in ended]
            for word in ("RankError", f"rank {victim} died", "step 2", "last seen at"):
                assert word in end.stderr, f"{word!r} is not in {end.stderr[-1500:]}"


LATER = [("forward", 0, 3), ("backward", 0, 1), ("step", 1, 0), ("step", 2, 3), ("forward", 1, 2)]


@pytest.mark.parametrize(
    ("where", "victim", "zero"),
    [("backward", 1, 3), *(pytest.param(*each, marks=pytest.mark.full) for each in LATER)],
)
def test_a_killed_rank_ends_the_others(where: str, victim: int, zero: int) -> None:
    check_others(run_raw(killed, 3, where, victim, zero, timeout=120), victim)
