"""Every random generator that training may draw from, as numbers that a checkpoint can hold."""

import hashlib
import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

log = logging.getLogger("overspill")


def seed_all(seed: int, rank: int = 0) -> None:
    """Rank 0 draws what a single process would; every other rank draws its own."""
    if rank:
        digest = hashlib.sha256(f"{seed}, rank {rank}".encode()).digest()
        seed = int.from_bytes(digest[:8], "little") >> 1
    random.seed(seed)
    np.random.seed(seed % 2**32)  # it takes no more
    torch.manual_seed(seed)


def capture(device: torch.device) -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    state: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = state
    found: dict[str, Any] = {
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore(found: Mapping[str, Any], device: torch.device) -> None:
    version, numbers, gauss = found["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    kind, keys, position, has_gauss, cached = found["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(found["torch"].cpu())
    if device.type == "cuda" and "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"].cpu(), device)
    elif (device.type == "cuda") != ("cuda" in found):
        log.warning("the checkpoint was not made on %s: what is drawn there differs from now on", device.type)
