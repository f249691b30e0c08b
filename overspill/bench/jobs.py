"""What a worker is asked to do. It goes from process to process as JSON, and into the results as it is."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overspill.cli.sizes import Sizes
from overspill.config import Size

BUILDS = ("device", "host", "meta")
"""Where a model for ours is built: in bf16 on the device, in fp32 in host memory, or without values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What is trained, and how much of it in a step: the same for all engines of a run."""

    sizes: Sizes | None = None
    """Sizes of a decoder like Llama; None where a folder says it."""
    folder: str | None = None
    """The folder of a Transformers model; its config is enough."""
    seq: int = 2048
    micro_batch: int = 4
    """Sequences in a micro-batch."""
    micro_batches: int = 1
    """Backward passes in a step."""
    clip: float = 1.0
    """Norm to which gradients are clipped; 0 does not clip."""
    warmup: int = 3
    """Steps before the clock starts."""
    steps: int = 6
    recompute: bool = True
    """Whether activations are recomputed in backward, by Transformers' own means."""
    seed: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.seq * self.micro_batch * self.micro_batches


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One thing that a worker does; which fields count depends on `kind`."""

    kind: str
    """A key of worker.KINDS."""
    label: str = ""
    engine: str = "ours"
    """A key of engines.ENGINES."""
    training: Training = field(default_factory=Training)
    keywords: Mapping[str, Any] = field(default_factory=dict)
    """What `overspill.prepare` is told."""
    build: str = "device"
    cap: Size | None = None
    """What torch may reserve of the GPU, for engines that have no budget of their own."""
    trace: str | None = None
    """File for a trace of one step by `overspill.trace`."""
    profile: str | None = None
    """File for one step as torch.profiler sees it."""
    search: Mapping[str, float] = field(default_factory=dict)
    """`least`: parameters of the first size; `ratio`: of one size to the one before it."""
    nvme: str | None = None
    """Folder whose disk is measured."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a learning.Lesson, or of an updating.Case."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_dict()))


def read_job(path: Path) -> Job:
    found = json.loads(path.read_text())
    training = found.pop("training")
    sizes = training.pop("sizes")
    return Job(training=Training(sizes=Sizes(**sizes) if sizes else None, **training), **found)
