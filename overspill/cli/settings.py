"""What a training run is told, checked before anything happens."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overspill.errors import OptionError


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One run of `overspill train`; the names are those of the options."""

    layers: int = 8
    hidden: int = 320
    heads: int = 5
    seq: int = 128
    """Bytes of text in one sample."""
    batch: int = 4
    """Samples in one micro-batch."""
    steps: int = 60
    micro_batches: int = 1
    lr: float = 5e-4
    clip: float = 1.0
    """Norm to which gradients are clipped; 0 does not clip."""
    warmup: int = 5
    """Steps in which the learning rate rises; it falls along a cosine afterwards."""
    seed: int = 0
    gpu: str = "auto"
    host: str = "auto"
    nvme: tuple[Path, ...] = ()
    recompute: bool = True
    verify: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "seq", "batch", "steps", "micro_batches"):
            self._check(name, getattr(self, name) >= 1, "from 1")
        self._check("seq", self.seq >= 2, "from 2, because every byte is predicted from those before it")
        self._check("lr", 0 < self.lr < float("inf"), "greater than 0")
        self._check("clip", 0 <= self.clip < float("inf"), "from 0, which means not to clip")
        self._check("warmup", self.warmup >= 0, "from 0")
        self._check("seed", 0 <= self.seed < 2**63, "from 0 and below 2**63")
        self._check("heads", self.hidden % self.heads == 0, f"that divides --hidden {self.hidden}")

    def _check(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise OptionError(f"expected --{name.replace('_', '-')} {what}, found {getattr(self, name)!r}")

    @property
    def tokens(self) -> int:
        """Per step."""
        return self.batch * self.seq * self.micro_batches

    def to_dict(self) -> dict[str, Any]:
        """As JSON knows it."""
        found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self), default=str))
        return found


DEMO = {"gpu": "64MiB", "host": "96MiB", "verify": True}
"""What --demo sets, beside an nvme folder in the run's own: on 10 million parameters the device keeps next to nothing
of the weights, the host has room for them and the gradients, and most optimizer states go to disk."""


def resolve(given: dict[str, Any], demo: bool) -> Settings:
    """What the user said, then the demo's values, then the defaults."""
    said = {name: value for name, value in given.items() if value is not None}
    return Settings(**{**(DEMO if demo else {}), **said})


def budget(text: str) -> str | float:
    """A budget as `prepare` takes it: on a command line a fraction is text too."""
    plain = text.replace(".", "", 1)
    return float(text) if "." in text and plain.isdecimal() else text
