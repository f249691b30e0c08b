"""Host memory near a GPU, and cores near that memory: on machines with several NUMA nodes what is far is slower, for
everybody.
"""

import ctypes
import logging
import os
import platform
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("overspill")

_NODES, _PCI = Path("/sys/devices/system/node"), Path("/sys/bus/pci/devices")
_MBIND = {"x86_64": 237, "aarch64": 235}
"""The numbers of the system call mbind by machine; glibc has no function for it."""
_PREFERRED = 1
"""mbind's policy: a node's memory as long as it has some, then that of others."""


def node_of(device: torch.device, nodes: Path = _NODES, pci: Path = _PCI) -> int | None:
    """The node that a GPU hangs on; None where there is one node only, or nobody knows."""
    if device.type != "cuda" or len(list(nodes.glob("node[0-9]*"))) < 2:
        return None
    try:
        node = int((pci / _address(device) / "numa_node").read_text())
    except (AttributeError, OSError, ValueError) as error:
        log.info("host memory is taken from any NUMA node, nobody says which one is near the GPU: %s", error)
        return None
    return node if node >= 0 else None


def _address(device: torch.device) -> str:
    # As torch has it, but not in its own types.
    gpu: Any = torch.cuda.get_device_properties(device)
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def cores_near(device: torch.device, threads: int, nodes: Path = _NODES, pci: Path = _PCI) -> set[int] | None:
    """Cores of a GPU's node, if there are enough for so many threads of every rank that may have a GPU there; None:
    threads shall run anywhere. So there are no fewer threads than elsewhere, and no two of them have to share a core.
    """
    node = node_of(device, nodes, pci)
    if node is None:
        return None
    try:
        found = _listed((nodes / f"node{node}" / "cpulist").read_text()) & os.sched_getaffinity(0)
        ranks = min(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), _gpus_like(pci / _address(device)))
    except (OSError, ValueError) as error:
        log.info("updates run on cores of any NUMA node, nobody says which ones are near the GPU: %s", error)
        return None
    return found if ranks * threads <= len(found) else None


def stay_on(cores: set[int]) -> None:
    """Let this thread, and those that it starts, run on these cores alone, if the kernel lets us."""
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        log.info("updates run on cores of any NUMA node: %s", error)


def _listed(text: str) -> set[int]:
    """The numbers of a list such as 0-3,8."""
    ends = [part.split("-") for part in text.strip().split(",") if part]
    return {number for pair in ends for number in range(int(pair[0]), int(pair[-1]) + 1)}


def _gpus_like(gpu: Path) -> int:
    """How many of that maker hang on the node of this one, whoever may use them."""

    def told(folder: Path) -> tuple[str, ...]:
        kind = (folder / "class").read_text().strip()[: len("0x03")]  # display controllers of any kind
        return kind, *((folder / name).read_text().strip() for name in ("vendor", "numa_node"))

    own = told(gpu)
    return sum(told(other) == own for other in gpu.parent.iterdir())


def prefer(address: int, nbytes: int, node: int) -> bool:
    """Take pages of this range from a node, those that nobody has touched yet. Whether the kernel will."""
    number = _MBIND.get(platform.machine())
    if number is None:
        log.info("host memory is taken from any NUMA node: not known how to ask for one on %s", platform.machine())
        return False
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    # The kernel looks at one bit less than it is told.
    arguments = (address, nbytes, _PREFERRED, ctypes.addressof(mask), len(mask) * bits + 1, 0)
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    if call(ctypes.c_long(number), *map(ctypes.c_ulong, arguments)) == 0:
        return True
    log.info("host memory is taken from any NUMA node: %s", os.strerror(ctypes.get_errno()))
    return False
