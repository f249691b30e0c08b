"""Host memory near a GPU, on machines with several nodes."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from overspill.tiers import HostTier, node_of
from overspill.tiers.numa import prefer


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two nodes and a GPU on the second."""
    nodes, pci = tmp_path / "node", tmp_path / "pci"
    for name in ("node0", "node1", "possible"):
        (nodes / name).mkdir(parents=True)
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    (pci / "0000:1b:03.0").mkdir(parents=True)
    (pci / "0000:1b:03.0" / "numa_node").write_text("1\n")
    return nodes, pci


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
