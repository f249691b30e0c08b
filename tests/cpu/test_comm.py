"""Ranks that talk to each other over gloo, and ranks that die while they do.

Each test starts its processes once and checks many things in them, because importing torch takes longer than all else.
"""

import os
import signal
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overspill.comm import Comm, connect
from overspill.comm.mesh import data_parallel_ranks
from overspill.errors import OptionError, RankError
from tests.ranks import Ended, run, run_raw

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.complex64, torch.uint8, torch.float64, torch.float16)


def connected() -> Comm:
    comm = connect(None, CPU)
    assert comm is not None
    return comm


def wholes(size: int, dtype: torch.dtype, length: int) -> list[torch.Tensor]:
    """What each rank starts from."""
    generator = torch.Generator().manual_seed(length)
    found = []
    for _ in range(size):
        values = torch.randn(length, 2, generator=generator) * 10
        if dtype.is_complex:
            found.append(torch.view_as_complex(values).to(dtype))
        else:
            reals = values[:, 0].contiguous()
            found.append((reals.abs() if dtype == torch.uint8 else reals).to(dtype))
    return found


def in_order(tensors: list[torch.Tensor]) -> torch.Tensor:
    small = tensors[0].dtype in (torch.bfloat16, torch.float16)
    total = tensors[0].float() if small else tensors[0].clone()
    for tensor in tensors[1:]:
        total = total + tensor
    return total.to(tensors[0].dtype)


def all_bounds(size: int) -> list[list[int]]:
    even = [12 * rank for rank in range(size + 1)]
    uneven = [rank * (rank + 3) for rank in range(size + 1)]
    first_empty = [0, *[0 if rank == 0 else 7 + rank for rank in range(size)]]
    all_in_last = [0] * size + [9]
    return [even, uneven, first_empty, all_in_last, [0] * (size + 1)]


# ---- what every size can do


def talk() -> dict[str, Any]:
    comm = connected()
    rank, size = comm.rank, comm.size
    sums: dict[Any, torch.Tensor] = {}
    for dtype in DTYPES:
        for case, bounds in enumerate(all_bounds(size)):
            every = wholes(size, dtype, bounds[-1])
            mine = slice(bounds[rank], bounds[rank + 1])
            whole = torch.zeros(bounds[-1], dtype=dtype)
            whole[mine] = every[0][mine]
            before = comm.sent["gather"], comm.sent["reduce"]
            comm.gather(whole, bounds)
            assert torch.equal(whole, every[0]), (dtype, bounds)
            given = every[rank].clone()
            piece = comm.reduce(given, bounds)
            assert torch.equal(given, every[rank])
            assert piece.dtype == dtype and torch.equal(piece, in_order(every)[mine]), (dtype, bounds)
            sums[case, dtype] = piece
            length = mine.stop - mine.start
            assert comm.sent["gather"] - before[0] == length * (size - 1)
            assert comm.sent["reduce"] - before[1] == bounds[-1] - length
        tensor = wholes(size, dtype, 30)[rank].view(5, 6)
        comm.broadcast(tensor)
        assert torch.equal(tensor, wholes(size, dtype, 30)[0].view(5, 6))
    parameter = torch.nn.Parameter(torch.full((4,), float(rank)))
    comm.broadcast(parameter)
    assert parameter.eq(0).all()
    comm.broadcast(torch.empty(0))
    vector = torch.tensor([0.1 * (rank + 1), float(rank)])
    assert torch.equal(
        comm.total(vector, "sum"), in_order([torch.tensor([0.1 * (r + 1), float(r)]) for r in range(size)])
    )
    assert comm.total(vector, "max")[1] == size - 1
    assert comm.total(torch.tensor(float(rank)), "max").shape == ()
    assert comm.exchange({"rank": rank, "text": "x" * rank}) == [{"rank": r, "text": "x" * r} for r in range(size)]
    assert comm.meet([rank, -5], "the start") == [(r, -5) for r in range(size)]
    assert comm.meet([rank] * rank, "unequal numbers") == [(r,) * r for r in range(size)]
    assert comm.meet(range(23), "the most") == [tuple(range(23))] * size
    assert comm.everyone(True) and not comm.everyone(rank != size - 1)
    facts = {"size": size, "ranks": comm.ranks, "replicas": comm.replicas, "locals": comm.locals, "rank": rank}
    assert comm.world_ranks == tuple(range(size)) and comm.place == rank
    both_threads(comm)
    # A second one beside the first, and one after it was closed.
    for _ in range(2):
        other = connected()
        assert other.meet([rank], "another") == [(r,) for r in range(size)]
        other.close()
        other.close()
    comm.close()
    return {**facts, "sums": sums, "sent": dict(comm.sent)}


def both_threads(comm: Comm) -> None:
    """A lane gathers while the main thread meets, each rank at its own pace."""
    bounds = [8 * rank for rank in range(comm.size + 1)]

    def lane() -> None:
        for turn in range(30):
            whole = torch.full((bounds[-1],), float(turn))
            comm.gather(whole, bounds)
            got.append(bool(whole.eq(turn).all()))

    got: list[bool] = []
    thread = threading.Thread(target=lane)
    thread.start()
    for turn in range(30):
        assert comm.meet([turn], f"turn {turn}") == [(turn,)] * comm.size
        comm.total(torch.ones(1), "sum")
    thread.join()
    assert got == [True] * 30


@pytest.mark.parametrize(
    "size", [1, pytest.param(2, marks=pytest.mark.full), 3, pytest.param(4, marks=pytest.mark.full)]
)
def test_ranks_talk(size: int) -> None:
    results = run(talk, size)
    for rank, found in enumerate(results):
        assert (found["size"], found["ranks"], found["replicas"], found["rank"]) == (size, size, 1, rank)
        assert found["locals"] == size
    for dtype in DTYPES:  # the bits do not depend on who owns what
        lengths = [bounds[-1] for bounds in all_bounds(size)]
        for case, length in enumerate(lengths):
            whole = torch.cat([found["sums"][case, dtype] for found in results])
            assert torch.equal(whole, in_order(wholes(size, dtype, length)))


# ---- meshes


def on_meshes() -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    found = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    comm = connect(mesh, CPU)
    assert comm is not None
    bounds = [0, 5, 13]
    mine = slice(bounds[comm.rank], bounds[comm.rank + 1])
    every = wholes(4, torch.float32, 13)
    piece = comm.reduce(every[dist.get_rank()], bounds)
    assert torch.equal(piece, in_order([every[0] + every[1], every[2] + every[3]])[mine])
    assert comm.sent["reduce"] == 13 - piece.numel() and comm.sent["replicate"] == piece.numel()
    tensor = torch.full((3,), float(dist.get_rank() + 1))
    comm.broadcast(tensor)
    assert tensor.eq(1).all()
    assert comm.total(torch.tensor([1.0 + comm.place]), "sum").item() == [3.0, 7.0][comm.place // 2]
    assert comm.exchange(comm.place) == [0, 1, 2, 3] and comm.locals == 4
    found.append((comm.rank, comm.size, comm.replicas, comm.place, comm.world_ranks))
    comm.close()
    for mesh in (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp")),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"],
    ):
        comm = connect(mesh, CPU)
        assert comm is not None
        whole = torch.zeros(2)
        whole[comm.rank] = float(dist.get_rank())
        comm.gather(whole, [0, 1, 2])
        assert tuple(whole.int().tolist()) == comm.world_ranks
        assert comm.exchange(dist.get_rank()) == list(comm.world_ranks)
        found.append((comm.rank, comm.size, comm.replicas, comm.place, comm.world_ranks))
        comm.close()
    return found


def test_meshes_of_four() -> None:
    results = run(on_meshes, 4)
    everyone = (0, 1, 2, 3)
    assert [found[0] for found in results] == [
        (0, 2, 2, 0, everyone),
        (1, 2, 2, 1, everyone),
        (0, 2, 2, 2, everyone),
        (1, 2, 2, 3, everyone),
    ]
    rows = [(0, 2, 1, 0, (0, 2)), (0, 2, 1, 0, (1, 3)), (1, 2, 1, 1, (0, 2)), (1, 2, 1, 1, (1, 3))]
    columns = [(0, 2, 1, 0, (0, 1)), (1, 2, 1, 1, (0, 1)), (0, 2, 1, 0, (2, 3)), (1, 2, 1, 1, (2, 3))]
    assert [found[1] for found in results] == rows
    assert [found[2] for found in results] == columns
    assert [found[3] for found in results] == rows


class FakeMesh:
    def __init__(self, shape: tuple[int, ...], names: tuple[str, ...] | None) -> None:
        self.mesh = torch.arange(torch.Size(shape).numel()).view(shape)
        self.mesh_dim_names = names


def test_dims_are_read_by_name_and_order() -> None:
    assert data_parallel_ranks(FakeMesh((4,), None), 2) == [[0, 1, 2, 3]]
    assert data_parallel_ranks(FakeMesh((2, 2), None), 2) == [[0, 1], [2, 3]]
    assert data_parallel_ranks(FakeMesh((2, 2), ("fsdp", "replicate")), 2) == [[0, 2], [1, 3]]
    assert data_parallel_ranks(FakeMesh((2, 2), ("dp_shard", "other")), 2) == [[0, 2], [1, 3]]
    assert data_parallel_ranks(FakeMesh((2, 2, 2), ("replicate", "shard", "tp")), 3) == [[1, 3], [5, 7]]
    assert data_parallel_ranks(FakeMesh((2, 3), ("Tensor_parallel", "dp")), 4) == [[3, 4, 5]]
    for shape, names in (((4,), ("tp",)), ((2, 2), ("pp", "dp")), ((2, 2, 2), None), ((2, 2), ("shard", "fsdp"))):
        with pytest.raises(OptionError, match="expected"):
            data_parallel_ranks(FakeMesh(shape, names), 0)
    with pytest.raises(OptionError, match="holds rank 9"):
        data_parallel_ranks(FakeMesh((4,), None), 9)
    with pytest.raises(OptionError, match="DeviceMesh"):
        data_parallel_ranks("mesh", 0)


def test_one_process_without_torchrun_is_no_comm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert connect(None, CPU) is None
    with pytest.raises(OptionError, match="torchrun"):
        connect(FakeMesh((2,), None), CPU)


# ---- ranks that die


def survive(way: str, victim: int, call: str) -> None:
    """One rank ends in the given way in step 3, the others wait for it in a meeting or in a gather."""
    comm = connected()
    for step in range(3):
        comm.meet([step], f"the forward of unit h.{step}, step {step}")
    if comm.rank == victim:
        time.sleep(0.5)
        end(way)
        return
    try:
        if call == "meet":
            comm.meet([3], "the forward of unit h.3, step 3")
        else:
            comm.gather(torch.zeros(2 * comm.size), range(0, 2 * comm.size + 1, 2))
    except RankError as error:
        print(f"FOUND {error}", flush=True)
        # From here on every call says the same.
        with pytest.raises(RankError, match="expected all ranks"):
            comm.total(torch.zeros(1), "sum")
        raise


def end(way: str) -> None:
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "raises":
        raise ValueError("boom in the loss")
    if way == "exits":
        sys.exit(3)


def check(ended: list[Ended], victim: int, *words: str) -> None:
    for rank, end in enumerate(ended):
        if rank != victim:
            found = [line for line in end.stdout.splitlines() if line.startswith("FOUND")]
            assert end.code == 1 and found, f"rank {rank}: {end}"
            assert f"found that rank {victim}" in found[0], found
            for word in ("expected all ranks at", "the forward of unit h.2, step 2", *words):
                assert word in found[0], f"{word!r} is not in {found[0]!r}"
            assert "RankError" in end.stderr
            assert end.seconds - ended[victim].seconds < 20, [end.seconds for end in ended]


@pytest.mark.parametrize("call", ["meet", "gather"])
def test_a_killed_rank_is_named(call: str) -> None:
    where = "the forward of unit h.3, step 3" if call == "meet" else "a gather of 6 elements"
    check(run_raw(survive, 3, "killed", 1, call), 1, "rank 1 died (last seen at", where, "look at the output of rank 1")


def test_the_rank_that_keeps_the_store_is_named() -> None:
    check(run_raw(survive, 3, "killed", 0, "meet"), 0, "rank 0 died")


def test_a_rank_that_raises_is_named_with_its_error() -> None:
    ended = run_raw(survive, 3, "raises", 2, "meet")
    assert "boom in the loss" in ended[2].stderr
    check(ended, 2, "left: its script ended with ValueError: boom in the loss")


@pytest.mark.parametrize(("way", "victim"), [("returns", 0), pytest.param("exits", 1, marks=pytest.mark.full)])
def test_a_rank_whose_script_ends_is_named(way: str, victim: int) -> None:
    check(run_raw(survive, 2, way, victim, "gather"), victim, "left: its script ended")


def late(seconds: float) -> str:
    """Rank 1 goes elsewhere for too long; then ranks call different things."""
    os.environ["OVERSPILL_TIMEOUT"] = "2"
    comm = connected()
    comm.meet([], "the backward of unit h.7, step 11")
    if comm.rank == 1:
        time.sleep(seconds)
        return ""
    with pytest.raises(RankError) as error:
        comm.meet([], "the forward of unit h.3, step 12")
    return str(error.value)


@pytest.mark.full
def test_a_rank_that_never_comes_is_named() -> None:
    text = run(late, 2, 8.0)[0]
    assert "the forward of unit h.3, step 12, found that rank 1 did not come within 2 s, though alive" in text
    assert "last seen at the backward of unit h.7, step 11" in text and "OVERSPILL_TIMEOUT" in text


def diverge() -> str:
    comm = connected()
    with pytest.raises(RankError) as error:
        if comm.rank == 0:
            comm.meet([1], "the forward of unit h.3")
        else:
            comm.everyone(True)
    return str(error.value)


def test_ranks_that_call_different_things_are_told() -> None:
    first, second = run(diverge, 2)
    assert "a meeting at the forward of unit h.3 and not at a vote, found rank 1" in first
    assert "a vote" in second and "rank 0 (last seen at the forward of unit h.3)" in second
