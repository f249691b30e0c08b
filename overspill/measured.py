"""What was measured of this machine, or said of another one, as a plan asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from overspill import cgroups
from overspill.kernels.cpu import How
from overspill.plan.hands import UNKNOWN, Speeds, rate_of_cores
from overspill.runtime import parts
from overspill.slots import cores_used
from overspill.specs import ModelSpec
from overspill.times import ONE_WAY, Pace


class Measured(NamedTuple):
    kind: str
    """The kind of the device: cuda or cpu."""
    machine: Mapping[str, int] | None
    """Another machine, of which nothing was measured here."""
    local_ranks: int
    """Ranks that share host memory, cores and disks."""
    folders: tuple[str, ...] = ()
    """Folders on disks, for what is to live there."""

    def speeds(self, model: ModelSpec) -> Speeds | None:
        """What decides who updates states in host memory; None: the GPU alone could. The native library has no fp16,
        and fp32 is the optimizer's own."""
        ours = model.format.fields is not None and model.format.master == torch.int16
        trained = any(unit.pages for unit in model.units)
        # Looked for last: where the library is not needed, nobody shall be told that there is none.
        if self.kind not in parts.CORES or not ours or not trained or (how := How.best()) is None:
            return None
        from overspill.tiers.known import by_format, known_rates

        known = known_rates() if self.machine is None else None
        cores = rate_of_cores(model, by_format(known)) if known is not None else None
        if known is None or known.both is None or known.dram is None or cores is None:
            return UNKNOWN
        # Measured with all cores and memory of the machine, of which every rank has a share; see runtime/cores.py.
        share = cores_used(how.threads) / cgroups.cores()
        return Speeds(known.both, known.dram / self.local_ranks, cores * share)

    @property
    def unknown(self) -> str:
        """What would tell how fast bytes pass."""
        if self.machine is None:
            each = [f"overspill probe --nvme {folder}" for folder in self.folders] or ["overspill probe"]
            return f"{' and '.join(each)} {'measure' if len(each) > 1 else 'measures'} how fast bytes pass"
        if "link" not in self.machine:
            return 'say how fast bytes pass, with machine["link"] (and machine["disk"])'
        return 'say how fast its disk is, with machine["disk"]'

    def pace(self) -> Pace | None:
        """How fast bytes pass; None: there is no link."""
        if self.machine is not None:
            link, disk = (self.machine.get(name) for name in ("link", "disk"))
            alone = link and ONE_WAY * link
            pace = Pace(alone, alone, link, disk, disk)
        elif self.kind not in parts.PAGED:
            return None
        else:
            from overspill.tiers.known import known_rates

            known = known_rates(self.folders)
            pace = (
                Pace() if known is None else Pace(known.up, known.down, known.both, known.disk_read, known.disk_write)
            )
        return pace._replace(
            read=pace.read and pace.read / self.local_ranks, write=pace.write and pace.write / self.local_ranks
        )
