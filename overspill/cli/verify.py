"""Whether two trainings ended with the same bits."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was compared and what differed."""

    tensors: int
    differing: tuple[str, ...]
    """Names of tensors."""
    steps: int
    strayed: tuple[int, ...]
    """Steps, counted from 1, whose losses differ."""

    @property
    def equal(self) -> bool:
        return not self.differing and not self.strayed

    def __str__(self) -> str:
        same, losses = self.tensors - len(self.differing), self.steps - len(self.strayed)
        text = (
            f"verify: {same} of {self.tensors} tensors equal, bit for bit (weights and optimizer states); "
            f"{losses} of {self.steps} losses equal"
        )
        if self.strayed:
            text += f", the first that differs at step {self.strayed[0]}"
        return "\n".join([text, *(f"  differs: {name}" for name in self.differing)])


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything that training changes, by name: parameters, buffers, and the tensors of the optimizer's state."""
    found = {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor):
                found[f"{name} ({key})"] = value
    return found


def compare(
    ours: Mapping[str, Tensor],
    plain: Mapping[str, Tensor],
    losses: Sequence[float],
    expected: Sequence[float],
    ranks: int = 1,
) -> Verdict:
    """Raw bits on both sides, so that NaN equals itself and 0 differs from -0."""
    names = list(dict.fromkeys((*plain, *ours)))
    differing = [n for n in names if n not in ours or n not in plain or not same_bits(ours[n], plain[n])]
    count = max(len(losses), len(expected))
    strayed = [
        i + 1
        for i in range(count)
        if [struct.pack("<d", x) for x in losses[i : i + 1]] != [struct.pack("<d", x) for x in expected[i : i + 1]]
    ]
    return Verdict(len(names), tuple(differing), count, tuple(strayed))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(t: Tensor) -> Tensor:
    return t.detach().cpu().contiguous().flatten().view(torch.uint8)
