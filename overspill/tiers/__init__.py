"""Tiers: the places where bytes live when the device does not hold them.

A tier hands out slots and moves raw bytes between a slot and a tensor; it knows
nothing of parameters, units or plans. Order and events are the caller's business.
May be imported here: layer 0, this folder, torch.

base.py       what every tier has in common
device.py     memory that compute works in; resident.py: the device as a home of weights
host.py       one arena of exact size; malloc.py: the C library's memory; numa.py: what is near a GPU
nvme.py       slots in files; spillfile.py: these files; growing.py: files of a size that is not known ahead
null.py       keeps nothing
driver.py     copies and events by CUDA's driver; streams.py: streams by their addresses
probe.py      how much is free where; rates.py: how fast the machine is; known.py: what was measured of it
threads.py    threads with small stacks

- slot: a fixed place in a tier, given out once and never given back, but to a growing tier.
- arena: one anonymous memory map of exact size, page-locked once if asked.
- staging: the small page-aligned arenas through which bytes pass on their way to and from a file.
"""

from overspill.tiers.base import Slot, Tier
from overspill.tiers.device import HeldBudget, current, keep_no_freed_memory, no_budgets, share_one_heap
from overspill.tiers.driver import Event, Together, in_one_go, recorded
from overspill.tiers.growing import GrowingTier
from overspill.tiers.host import HostTier
from overspill.tiers.malloc import freed_at_once
from overspill.tiers.null import NullTier
from overspill.tiers.numa import cores_near, node_of, stay_on
from overspill.tiers.nvme import NvmeTier, check_folder
from overspill.tiers.probe import device_available, disk_free, host_available
from overspill.tiers.resident import DeviceTier
from overspill.tiers.threads import workers

__all__ = [
    "DeviceTier",
    "Event",
    "GrowingTier",
    "HeldBudget",
    "HostTier",
    "NullTier",
    "NvmeTier",
    "Slot",
    "Tier",
    "Together",
    "check_folder",
    "cores_near",
    "current",
    "device_available",
    "disk_free",
    "freed_at_once",
    "host_available",
    "in_one_go",
    "keep_no_freed_memory",
    "no_budgets",
    "node_of",
    "recorded",
    "share_one_heap",
    "stay_on",
    "workers",
]
