"""Host memory near a GPU, on machines with several nodes."""

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from overspill.tiers import HostTier, cores_near, node_of, stay_on, workers
from overspill.tiers.numa import prefer


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two nodes and a GPU on the second."""
    nodes, pci = tmp_path / "node", tmp_path / "pci"
    for name in ("node0", "node1", "possible"):
        (nodes / name).mkdir(parents=True)
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    describe(pci / "0000:1b:03.0", 1)
    return nodes, pci


def describe(folder: Path, node: int, kind: str = "0x030200", vendor: str = "0x10de") -> None:
    folder.mkdir(parents=True)
    for name, told in (("numa_node", str(node)), ("class", kind), ("vendor", vendor)):
        (folder / name).write_text(f"{told}\n")


def test_a_gpu_hangs_on_a_node(machine: tuple[Path, Path]) -> None:
    nodes, pci = machine
    assert node_of(torch.device("cuda", 0), nodes, pci) == 1
    assert node_of(torch.device("cpu"), nodes, pci) is None
    (pci / "0000:1b:03.0" / "numa_node").write_text("-1\n")
    assert node_of(torch.device("cuda", 0), nodes, pci) is None, "the kernel does not know"
    (nodes / "node1").rmdir()
    assert node_of(torch.device("cuda", 0), nodes, pci) is None, "there is one node only"


def test_a_gpu_that_nobody_knows_is_said(machine: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    nodes, pci = machine
    (pci / "0000:1b:03.0" / "numa_node").unlink()
    with caplog.at_level(logging.INFO, "overspill"):
        assert node_of(torch.device("cuda", 0), nodes, pci) is None
    assert "any NUMA node" in caplog.text


@pytest.fixture
def cores(machine: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Sixteen, eight of them on each node; another GPU on each, and what is no GPU of that kind."""
    nodes, pci = machine
    (nodes / "node0" / "cpulist").write_text("0-3,8-11\n")
    (nodes / "node1" / "cpulist").write_text("4-7,12-15\n")
    describe(pci / "0000:1c:00.0", 1, kind="0x030000")
    describe(pci / "0000:5b:00.0", 0)
    describe(pci / "0000:1d:00.0", 1, kind="0x068000")
    describe(pci / "0000:1e:00.0", 1, vendor="0x1a03")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    return nodes, pci


NEAR = {4, 5, 6, 7, 12, 13, 14, 15}


@pytest.mark.parametrize(
    ("ranks", "threads", "near"), [(1, 8, True), (1, 9, False), (2, 4, True), (2, 5, False), (8, 4, True)]
)
def test_threads_stay_near_if_there_are_cores_for_all(
    ranks: int, threads: int, near: bool, cores: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two GPUs hang on the node, so no more than two ranks need cores of it."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert cores_near(torch.device("cuda", 0), threads, *cores) == (NEAR if near else None)


def test_threads_stay_near_on_cores_of_the_process_alone(
    cores: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 4, 5, 6})
    assert cores_near(torch.device("cuda", 0), 3, *cores) == {4, 5, 6}
    assert cores_near(torch.device("cuda", 0), 4, *cores) is None
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert cores_near(torch.device("cuda", 0), 1, *cores) is None


def test_threads_run_anywhere_if_nobody_knows(cores: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    nodes, _pci = cores
    assert cores_near(torch.device("cpu"), 1, *cores) is None
    for spoil in ((nodes / "node1" / "cpulist").unlink, lambda: (nodes / "node1" / "cpulist").write_text("4-x\n")):
        caplog.clear()
        spoil()
        with caplog.at_level(logging.INFO, "overspill"):
            assert cores_near(torch.device("cuda", 0), 1, *cores) is None
        assert "cores of any NUMA node" in caplog.text


def test_a_thread_stays_where_it_is_told(caplog: pytest.LogCaptureFixture) -> None:
    before = os.sched_getaffinity(0)
    with workers(1, "near") as pool:
        pool.submit(stay_on, {max(before)}).result()
        assert pool.submit(os.sched_getaffinity, 0).result() == {max(before)} and os.sched_getaffinity(0) == before
        with caplog.at_level(logging.INFO, "overspill"):
            pool.submit(stay_on, {1000}).result()
    assert "cores of any NUMA node" in caplog.text


def test_a_node_that_is_not_there_is_said(caplog: pytest.LogCaptureFixture) -> None:
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    page = (memory.data_ptr() + 4095) // 4096 * 4096
    with caplog.at_level(logging.INFO, "overspill"):
        assert not prefer(page, 4096, 1000)
    assert "any NUMA node" in caplog.text


def test_an_arena_of_one_node_works_as_any() -> None:
    tier = HostTier(1 << 16, node=0)
    slot = tier.reserve(1 << 10)
    value = torch.arange(1 << 10, dtype=torch.int64).to(torch.uint8)
    tier.store(slot, value)
    out = torch.empty_like(value)
    tier.load(slot, out)
    assert torch.equal(out, value)
    tier.close()
