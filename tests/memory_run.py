"""Trains in a process of its own and tells what the operating system saw: `python -m tests.memory_run JSON`.

The peak of resident memory (VmHWM, reset before prepare) counts everything: what overspill holds on `device` and
`host`, activations, and what torch's own libraries keep. Files are measured in blocks while they are there.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import overspill
from overspill import replanning
from overspill.plan.plan import LEFT
from overspill.runtime.measures import Measures

WIDTH = 512

Losses = Callable[[nn.Module], torch.Tensor]


class Tower(nn.Module):
    """Mostly weights: 12 blocks of 1 MiB and 4 MiB matrices, next to no activations."""

    def __init__(self, blocks: int = 12) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field} in /proc/self/status")


def disk_blocks(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512 if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def run_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, losses: Losses, steps: int = 2, passes: int = 2
) -> None:
    for _ in range(steps):
        for _ in range(passes):
            losses(model).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def chosen(name: str) -> tuple[Callable[[], nn.Module], Losses]:
    """What to build, and how to get a loss from it: the tower, or a stock model of the zoo."""
    if name == "tower":
        return Tower, lambda model: model(torch.ones(4, WIDTH)).square().mean()
    from tests.zoo import ZOO, loss_of

    batches = ZOO[name].batches()
    return ZOO[name].build, lambda model: loss_of(model, next(batches))


def see_activations(nbytes: int) -> None:
    """As if the device could tell what they take, as a GPU can: then another plan follows the first one."""
    Measures.sees_activations = True  # type: ignore[misc, assignment]
    Measures._peak = lambda self: self._planned.owned + nbytes  # type: ignore[method-assign]
    replanning.MARGIN = 0


def main() -> None:
    wanted = json.loads(sys.argv[1])
    folder = Path(wanted["nvme"])
    kind = getattr(torch.optim, wanted.get("optimizer", "AdamW"))
    build, losses = chosen(wanted.get("model", "tower"))
    warm = build()
    run_steps(warm, kind(warm.parameters(), lr=1e-3), losses)  # what torch keeps for itself is kept from now on
    del warm
    if "seen" in wanted:
        see_activations(wanted["seen"])
    torch.manual_seed(0)
    model = build()
    optimizer = kind(model.parameters(), lr=1e-3)
    own = sum(p.nbytes for p in model.parameters())
    base = resident("VmRSS") - own
    Path("/proc/self/clear_refs").write_text("5")
    model, optimizer = overspill.prepare(model, optimizer, **wanted["keywords"])
    setting_up = resident("VmHWM") - base
    Path("/proc/self/clear_refs").write_text("5")
    disk = [0]
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            disk[0] = max(disk[0], disk_blocks(folder))
            time.sleep(0.02)

    thread = threading.Thread(target=watch)
    thread.start()
    run_steps(model, optimizer, losses, 5, wanted.get("passes", 2))
    done.set()
    thread.join()
    plan = optimizer.report()["plan"]
    stepping = resident("VmHWM") - base
    print(
        json.dumps(
            {
                "setting_up": setting_up,
                "stepping": stepping,
                "model": own,
                "disk": disk[0],
                "planned": plan.peaks,
                "left": plan.bytes_of("host", LEFT),
                "activations": plan.bytes_of("device", "activations"),
                "budget": [plan.budget.device, plan.budget.host, plan.budget.nvme],
                "pid": os.getpid(),
            }
        )
    )


if __name__ == "__main__":
    main()
