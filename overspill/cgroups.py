"""The cgroups that this process is in, and what they leave it of the machine: containers and job queues set them."""

import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
ROOT = Path("/sys/fs/cgroup")


def cores() -> int:
    """How many this process can keep busy: those that it may run on, or fewer, if a quota of their time would run out.

    The quota is for all processes of a group together; what is left of a core counts as one.
    """
    quotas = [_quota(version, folder) for version, folder in groups("cpu", PROC, ROOT)]
    return min([len(os.sched_getaffinity(0)), *(quota for quota in quotas if quota is not None)])


def groups(controller: str, proc: Path, root: Path) -> Iterator[tuple[int, Path]]:
    """(version, folder) of all that limit this process, its own first; not all folders are there."""
    for line in read(proc / "self/cgroup").splitlines():
        _number, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from ((2, folder) for folder in _lineage(root, path))
        elif controller in controllers.split(","):
            yield from ((1, folder) for folder in _lineage(root / controller, path))


def read(path: Path) -> str:
    """Nothing, where there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _lineage(root: Path, path: str) -> Iterator[Path]:
    # In a container the path may be the host's and not exist below our root; then its existing ancestors count.
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        yield root.joinpath(*parts[:depth])


def _quota(version: int, folder: Path) -> int | None:
    names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    told = " ".join(read(folder / name) for name in names).split()
    # Without a quota: max, or -1.
    if len(told) != 2 or not all(each.isdecimal() and int(each) > 0 for each in told):
        return None
    quota, period = map(int, told)
    return -(-quota // period)
