"""Tiers: bytes come back as they went in, errors name their cure, and nothing is left on disk."""

import logging
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import Tensor

import overspill.tiers
from overspill.errors import BudgetError, OptionError, StateError, TierError
from overspill.tiers import HostTier, NullTier, NvmeTier, Slot, Tier, probe, spillfile
from overspill.tiers.nvme import spread

KIB, MIB = 1 << 10, 1 << 20
SIZES = [1, 199, 4095, 4096, 4097, MIB + 1]

MAKE = """
import sys, time
from pathlib import Path
from overspill.tiers import NvmeTier
tier = NvmeTier([(Path(sys.argv[1]), None)], 65536)
print("ready", flush=True)
"""


def start(script: str, path: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(Path(overspill.tiers.__file__).parents[2])}
    line, pipe = [sys.executable, "-c", script, str(path)], subprocess.PIPE
    return subprocess.Popen(line, env=environment, stdout=pipe, stderr=pipe, text=True)


def noise(nbytes: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def make_nvme(path: Path, capacity: int = 64 * KIB, limit: int | None = None) -> NvmeTier:
    return NvmeTier([(path, limit)], capacity)


@pytest.fixture(params=["host", "nvme"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    capacity = 8 * MIB
    # A staging of 64 KiB makes every larger transfer take many chunks.
    nvme = request.param == "nvme"
    made = NvmeTier([(tmp_path, None)], capacity, 64 * KIB) if nvme else HostTier(capacity)
    yield made
    made.close()


def read_back(tier: Tier, slot: Slot, nbytes: int | None = None) -> Tensor:
    out = torch.zeros(slot.nbytes if nbytes is None else nbytes, dtype=torch.uint8)
    tier.load(slot, out)
    return out


def keeps(tier: Tier, *slots: Slot) -> bool:
    """Whether all slots, once all are stored, give their own bytes back."""
    for seed, slot in enumerate(slots):
        tier.store(slot, noise(slot.nbytes, seed))
    return all(torch.equal(read_back(tier, slot), noise(slot.nbytes, seed)) for seed, slot in enumerate(slots))


@pytest.mark.parametrize("nbytes", [*SIZES, 64 * KIB, 3 * MIB + 199])
def test_round_trip(tier: Tier, nbytes: int) -> None:
    assert keeps(tier, tier.reserve(nbytes), tier.reserve(nbytes))


@pytest.mark.parametrize("nbytes", SIZES)
def test_fewer_bytes_than_the_slot_leave_the_rest(tier: Tier, nbytes: int) -> None:
    slot = tier.reserve(nbytes + 5000)
    expected = noise(slot.nbytes)
    tier.store(slot, expected)
    tier.store(slot, noise(nbytes, seed=1))
    expected[:nbytes] = noise(nbytes, seed=1)
    assert torch.equal(read_back(tier, slot), expected)
    assert torch.equal(read_back(tier, slot, nbytes), expected[:nbytes])


def test_slots_are_aligned_and_counted(tier: Tier) -> None:
    step = {"host": 512, "nvme": 4096}[tier.name]
    assert [tier.reserve(199).offset for _ in range(3)] == [0, step, 2 * step]
    assert 2 * step + 199 <= tier.used() <= 3 * step


def test_beyond_capacity_names_the_numbers(tier: Tier) -> None:
    tier.reserve(4 * MIB)
    with pytest.raises(TierError, match=rf"{8 * MIB} bytes.*{4 * MIB} are used.*{5 * MIB} more"):
        tier.reserve(5 * MIB)
    tier.reserve(4 * MIB)


def test_closed_twice_then_refused(tier: Tier) -> None:
    slot = tier.reserve(100)
    tier.close()
    tier.close()
    with pytest.raises(StateError, match="closed"):
        tier.load(slot, torch.zeros(100, dtype=torch.uint8))


def test_load_while_storing(tier: Tier) -> None:
    nbytes, rounds = 2 * MIB + 1, 6
    still, busy = tier.reserve(nbytes), tier.reserve(nbytes)
    tier.store(still, noise(nbytes))
    with ThreadPoolExecutor(1) as pool:
        writes = [pool.submit(tier.store, busy, noise(nbytes, seed)) for seed in range(rounds)]
        assert all(torch.equal(read_back(tier, still), noise(nbytes)) for _ in range(rounds))
    assert all(write.exception() is None for write in writes)
    assert torch.equal(read_back(tier, busy), noise(nbytes, rounds - 1))


def test_made_in_inference_mode_is_usable_outside(tmp_path: Path) -> None:
    with torch.inference_mode():
        tiers: list[Tier] = [HostTier(4096), make_nvme(tmp_path)]
    for tier in tiers:
        assert keeps(tier, tier.reserve(100))
        tier.close()


def test_host_without_capacity() -> None:
    tier = HostTier(0)
    assert tier.tensor(tier.reserve(0)).numel() == 0
    with pytest.raises(TierError):
        tier.reserve(1)
    tier.close()


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def test_host_is_resident_then_released() -> None:
    before = resident_bytes()
    tier = HostTier(256 * MIB)
    assert resident_bytes() - before > 250 * MIB
    tier.close()
    assert resident_bytes() - before < 16 * MIB


def test_host_takes_the_pages_of_what_moves_in_as_it_comes() -> None:
    before = resident_bytes()
    tier = HostTier(256 * MIB, moving_in=200 * MIB)
    assert resident_bytes() - before < 100 * MIB
    tier.store(tier.reserve(200 * MIB), torch.zeros(200 * MIB, dtype=torch.uint8))
    assert resident_bytes() - before > 250 * MIB
    tier.close()


def test_host_view_survives_close() -> None:
    tier = HostTier(MIB)
    view = tier.tensor(tier.reserve(MIB)).copy_(noise(MIB))
    tier.close()
    assert torch.equal(view, noise(MIB)), "and no crash"


def test_host_refuses_before_the_memory_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BudgetError, match=str(1 << 60)):
        HostTier(1 << 60)
    looks = iter([1 << 60, 0])
    monkeypatch.setattr("overspill.tiers.host.host_available", lambda: next(looks))
    with pytest.raises(BudgetError, match="found 0 available"):
        HostTier(MIB)


@pytest.mark.skipif(torch.cuda.is_available(), reason="pinning works here")
def test_host_goes_on_unpinned(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "overspill"):
        tier = HostTier(4096)
        tier.pin()
    assert not tier.pinned and len(caplog.records) == 1
    tier.close()


def test_host_memory_is_unlocked_behind_the_copies_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is the current one then: nothing may be on its way to or from memory that goes."""
    done: list[object] = []
    cudart = SimpleNamespace(
        cudaHostRegister=lambda *given: 0, cudaHostUnregister=lambda pointer: done.append("unlocked") or 0
    )
    monkeypatch.setattr("overspill.tiers.host._cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: done.append(device))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    tier = HostTier(4096)
    tier.pin()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    tier.close()
    assert done == [1, "unlocked"]


def test_spread(block: int = 4096) -> None:
    assert spread(4 * block, [100 * block, 100 * block]) == [2 * block, 2 * block]
    assert spread(5 * block, [block, 100 * block]) == [block, 4 * block]
    assert spread(3 * block, [100 * block, 100 * block]) == [2 * block, block]
    assert spread(5 * block, [block + 1, block]) == [block, block]
    assert spread(block, []) == []


def test_two_paths_with_limits(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    tier = NvmeTier([(paths[0], 64 * KIB), (paths[1], None)], 256 * KIB, staging_bytes=64 * KIB)
    slots = [tier.reserve(32 * KIB) for _ in range(8)]
    assert [sum(slot.file == file for slot in slots) for file in (0, 1)] == [2, 6]
    assert keeps(tier, *slots)
    assert 256 * KIB <= tier.disk_bytes() <= 256 * KIB + 32 * KIB
    assert tier.used() == 256 * KIB
    tier.close()
    assert not any(os.listdir(path) for path in paths)


def test_what_fits_in_total_fits(tmp_path: Path) -> None:
    tier = NvmeTier([(tmp_path, None), (tmp_path, None)], 5 * 64 * KIB)
    assert keeps(tier, *(tier.reserve(64 * KIB) for _ in range(5)))
    assert tier.disk_bytes() <= 5 * 64 * KIB + 32 * KIB
    tier.close()


def test_slot_larger_than_every_limit(tmp_path: Path) -> None:
    tier = NvmeTier([(tmp_path, 64 * KIB), (tmp_path, 64 * KIB)], 128 * KIB)
    with pytest.raises(TierError, match="in one piece"):
        tier.reserve(100 * KIB)
    tier.close()


@pytest.mark.parametrize(("limit", "found"), [(None, r"\d+: .* free"), (8 * KIB, "8192: .* a limit of 8192")])
def test_too_little_room(tmp_path: Path, limit: int | None, found: str) -> None:
    with pytest.raises(TierError, match=f"{1 << 60} bytes.*found {found}"):
        make_nvme(tmp_path, 1 << 60, limit)
    assert not os.listdir(tmp_path)


def test_bad_paths(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TierError, match="not a folder"):
        make_nvme(tmp_path / "file")
    with pytest.raises(TierError, match="nothing there"):
        make_nvme(tmp_path / "missing")
    with pytest.raises(TierError, match="found none"):
        NvmeTier([], 4096)
    # Nobody may make a folder here, root neither.
    with pytest.raises(TierError, match=r"may not|can be made"):
        make_nvme(Path("/proc/self"), capacity=0)


@pytest.mark.skipif(os.geteuid() == 0, reason="permission bits do not bind root")
def test_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(TierError, match="change its mode"):
        make_nvme(tmp_path)
    tmp_path.chmod(0o700)


def test_reservation_that_fails_leaves_nothing(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    _out, err = start(limit + MAKE, tmp_path).communicate()
    assert "TierError: expected room for a file of 65536 bytes" in err and "smaller nvme size" in err
    assert not os.listdir(tmp_path)


def test_modes_and_owner(tmp_path: Path) -> None:
    tier = make_nvme(tmp_path)
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith(f"overspill-{os.geteuid()}-{os.getpid()}-")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {"lock": 0o600, "data": 0o600}
    del tier
    assert not os.listdir(tmp_path), "collected, so removed"


def test_torn_file_is_an_error(tmp_path: Path) -> None:
    tier = make_nvme(tmp_path)
    slot = tier.reserve(32 * KIB)
    (data,) = tmp_path.glob("*/data")
    os.truncate(data, 8 * KIB)
    with pytest.raises(TierError, match=r"read 32768 bytes at offset 0 of .*data.*torn"):
        read_back(tier, slot)
    assert keeps(tier, slot)
    tier.close()


def test_disk_errors_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(5, "Input/output error")

    tier = make_nvme(tmp_path)
    slot = tier.reserve(100)
    monkeypatch.setattr(os, "pwritev", broken)
    with pytest.raises(TierError, match=r"write 4096 bytes at offset 0 of .*data.*Input/output error"):
        tier.store(slot, noise(100))
    tier.close()


def test_short_transfers_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = make_nvme(tmp_path)
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:8192]], offset))
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: pwritev(fd, [buffers[0][:4096]], offset))
    assert keeps(tier, tier.reserve(50_000))
    tier.close()


def test_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(folder: spillfile.SpillFolder, name: str, flags: int) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(spillfile.SpillFolder, "reopen", refuse)
    with caplog.at_level(logging.WARNING, "overspill"):
        tier = make_nvme(tmp_path, MIB + 4096)
    assert keeps(tier, tier.reserve(MIB + 1))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    tier.close()


FORK = "import os\nif os.fork() == 0: sys.exit()\nos.wait()\nassert os.listdir(sys.argv[1])\n"


@pytest.mark.parametrize(
    ("ending", "code"),
    [("", 0), ("raise RuntimeError", 1), ("sys.exit(3)", 3), (FORK, 0)],
    ids=["normal", "error", "exit", "fork"],
)
def test_nothing_left_after_exit(tmp_path: Path, ending: str, code: int) -> None:
    process = start(MAKE + ending, tmp_path)
    assert process.communicate()[0] == "ready\n" and process.returncode == code
    assert not os.listdir(tmp_path)


def test_killed_is_swept_and_alive_is_not(tmp_path: Path) -> None:
    process = start(MAKE + "time.sleep(60)", tmp_path)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        (folder,) = tmp_path.iterdir()
        make_nvme(tmp_path).close()
        assert (folder / "data").exists()
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert (folder / "data").exists()
    tier = make_nvme(tmp_path)
    assert not folder.exists()
    tier.close()
    assert not os.listdir(tmp_path)


def test_own_tiers_do_not_sweep_each_other(tmp_path: Path) -> None:
    first, second = make_nvme(tmp_path), make_nvme(tmp_path)
    assert start(MAKE, tmp_path).communicate()[0] == "ready\n"
    for tier in (first, second):
        assert keeps(tier, tier.reserve(100))
    assert len(os.listdir(tmp_path)) == 2
    first.close()
    second.close()


def leftover(parent: Path, name: str) -> Path:
    (parent / name).mkdir(0o700)
    (parent / name / "data").write_bytes(b"x")
    return parent / name


def test_sweep_takes_only_leftovers_of_this_user(tmp_path: Path) -> None:
    uid = os.geteuid()
    (tmp_path / "scratch").mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "data").write_bytes(b"mine")
    link = tmp_path / "scratch" / f"overspill-{uid}-1-aa"
    link.symlink_to(tmp_path / "target")
    stays = [
        leftover(tmp_path / "scratch", f"overspill-{uid + 1}-1-aa"),
        leftover(tmp_path / "scratch", f"overspill-{uid}-1-aa.old"),
        leftover(tmp_path / "scratch", f".overspill-new-{uid}-1-bb"),
    ]
    goes = [leftover(tmp_path / "scratch", name) for name in (f"overspill-{uid}-1-cc", f".overspill-new-{uid}-1-dd")]
    os.utime(goes[1], (time.time() - 61, time.time() - 61))
    if uid == 0:
        stays.append(leftover(tmp_path / "scratch", f"overspill-{uid}-1-ee"))
        os.chown(stays[-1], 12345, 12345)
    spillfile.sweep(tmp_path / "scratch")
    assert link.is_symlink() and (tmp_path / "target" / "data").read_bytes() == b"mine"
    assert all((folder / "data").exists() for folder in stays)
    assert not any(folder.exists() for folder in goes)


def test_null_counts_and_moves_nothing() -> None:
    tier: Tier = NullTier("host")
    slot = tier.reserve(1 << 60)
    tier.load(slot, out := noise(100))
    tier.store(slot, out[:10])
    assert torch.equal(out, noise(100))
    assert isinstance(tier, NullTier) and (tier.loaded, tier.stored) == (100, 10)
    assert slot.tier == "host" and tier.used() == 1 << 60
    tier.close()


def test_probe_of_this_machine(tmp_path: Path) -> None:
    assert 0 < probe.host_available() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert probe.disk_free(tmp_path) > 0
    assert probe.device_available(torch.device("cpu")) > 0
    with pytest.raises(OptionError, match="'meta'"):
        probe.device_available(torch.device("meta"))


@pytest.mark.parametrize("version", [1, 2])
def test_probe_of_cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"), 2: ("memory.max", "memory.current", "")}
    limit, usage, prefix = names[version]
    job = tmp_path / "cgroup" / ("memory/job" if version == 1 else "job")
    (job / "step").mkdir(parents=True)
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("4:memory:/job/step\n" if version == 1 else "0::/job/step\n")
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    (job / limit).write_text(f"{4 * MIB}\n")
    (job / usage).write_text(f"{3 * MIB}\n")
    (job / "memory.stat").write_text(f"anon 5\n{prefix}inactive_file 4096\n{prefix}active_file 8192\n")
    (job / "step" / limit).write_text("max\n" if version == 2 else f"{1 << 62}\n")
    monkeypatch.setattr(probe, "_PROC", tmp_path)
    monkeypatch.setattr(probe, "_CGROUPS", tmp_path / "cgroup")
    assert probe.host_available() == MIB + 12288
