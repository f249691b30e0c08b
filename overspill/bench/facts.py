"""Where and with what something was measured: machine, versions, sources."""

import datetime
import hashlib
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import overspill
from overspill import cgroups
from overspill.specs import KiB

PACKAGES = ("torch", "triton", "transformers", "numpy", "safetensors", "deepspeed", "torchao", "flashoptim")
VARIABLES = ("PYTORCH_", "TORCH_", "CUDA_", "NCCL_", "OMP_", "MKL_", "ONEDNN_", "DS_")
"""Beginnings of the environment variables that change how fast things are."""
PACKAGE = Path(overspill.__file__).parent
_GIT_SECONDS = 30.0


def of_this_process() -> dict[str, Any]:
    """The machine, as a worker sees it, which may touch the GPU."""
    found: dict[str, Any] = {
        "host": platform.node(),
        "cpu": _cpu(),
        "cores": cgroups.cores(),
        "threads": torch.get_num_threads(),
        "host_memory": _host_memory(),
        "system": platform.platform(),
        "gpu": None,
    }
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {"gpu": device.name, "gpu_memory": device.total_memory, "gpus": torch.cuda.device_count()}
    return found


def versions() -> dict[str, str | None]:
    """None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return {**found, "torch": torch.__version__, "overspill": overspill.__version__}


def environment() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}


def sources() -> dict[str, Any]:
    """Which overspill this is: the commit and whether files differ from it, where git knows; and a digest of the
    package's own files, which finds the commit again where git does not."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes())
    ours = _git("rev-parse", "--show-toplevel") == str(PACKAGE.parent)  # and not the repository of who installed it
    commit = _git("rev-parse", "HEAD") if ours else None
    # Results that are not added yet do not count: they change nothing that is measured.
    changed = (_git("status", "--porcelain", "--untracked-files=no"), _git("status", "--porcelain", "--", "."))
    return {"commit": commit, "dirty": any(changed) if commit else None, "sha256": digest.hexdigest()}


def command() -> str:
    """As it was typed, but for the name of the program."""
    return shlex.join(["overspill", *sys.argv[1:]])


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def slug(machine: dict[str, Any]) -> str:
    """A machine as file names call it."""
    return re.sub(r"[^a-z0-9]+", "-", (machine.get("gpu") or "cpu").lower()).strip("-")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(PACKAGE), *arguments], capture_output=True, text=True, timeout=_GIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _host_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * KiB
    return 0
