"""Host memory near a GPU: on machines with several NUMA nodes a copy from a far one is slower for everybody."""

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
"""Numbers of the system call; glibc has no function for it."""
_PREFERRED = 1
"""That node's memory as long as it has some, then that of others."""


def node_of(device: torch.device, nodes: Path = _NODES, pci: Path = _PCI) -> int | None:
    """The node that a GPU hangs on; None where there is one node only, or nobody knows."""
    if device.type != "cuda" or len(list(nodes.glob("node[0-9]*"))) < 2:
        return None
    # As torch has it, but not in its own types.
    gpu: Any = torch.cuda.get_device_properties(device)
    try:
        where = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        node = int((pci / where / "numa_node").read_text())
    except (AttributeError, OSError, ValueError) as error:
        log.info("host memory is taken from any NUMA node, nobody says which one is near the GPU: %s", error)
        return None
    return node if node >= 0 else None


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
