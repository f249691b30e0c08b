"""Whether two trainings ended with the same bits, or over ranks with the same numbers.

Note [DistributedDataParallel]. Over ranks the plain training is torch's. Its sums run in another order than ours: those
of more than two ranks, of micro-batches that are reduced one by one (stages 2 and 3), and the norm of gradients that
are divided. So nobody asks for the same bits there; a step that is missed is a hundred times more than TOLERANCE.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

TOLERANCE = 1e-3
"""What is tolerated of the difference of all weights, or of one kind of states, to their norm; and of losses."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was compared and what differed."""

    tensors: int
    differing: tuple[str, ...]
    """Names of tensors."""
    steps: int
    strayed: tuple[int, ...]
    """Steps, counted from 1, whose losses differ."""
    apart: Mapping[str, float] = field(default_factory=dict)
    """Over ranks: how far, by kind, in relation to the norm. Bits are not judged then."""

    @property
    def equal(self) -> bool:
        if self.apart:
            return all(far <= TOLERANCE for far in self.apart.values())
        return not self.differing and not self.strayed

    def __str__(self) -> str:
        same, losses = self.tensors - len(self.differing), self.steps - len(self.strayed)
        text = (
            f"verify: {same} of {self.tensors} tensors equal, bit for bit (weights and optimizer states); "
            f"{losses} of {self.steps} losses equal"
        )
        if self.apart:
            far = ", ".join(f"{kind} {value:.1e}" for kind, value in self.apart.items())
            return (
                f"{text}\nverify: apart from DistributedDataParallel by, in relation to the norm: {far} "
                f"({'within' if self.equal else 'more than'} {TOLERANCE})"
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
    ours: Mapping[str, Tensor], plain: Mapping[str, Tensor], losses: Sequence[float], expected: Sequence[float]
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


def distances(
    ours: Mapping[str, Tensor], plain: Mapping[str, Tensor], losses: Sequence[float], expected: Sequence[float]
) -> dict[str, float]:
    """How far they are apart, by kind; infinitely, if they are not of the same things."""
    if ours.keys() != plain.keys() or len(losses) != len(expected):
        return {"all": float("inf")}
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, value in plain.items():
        kind = name.split(" (")[1].rstrip(")") if " (" in name else "weights"
        pairs.setdefault(kind, []).append((ours[name], value))
    pairs["losses"] = [(torch.tensor(losses, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64))]
    return {kind: _distance(found) for kind, found in pairs.items()}


def _distance(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    far = sum((a.double().cpu() - b.double().cpu()).square().sum().item() for a, b in pairs)
    norm = sum(b.double().square().sum().item() for _, b in pairs)
    return float((far / norm) ** 0.5) if norm else float(far > 0)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(t: Tensor) -> Tensor:
    return t.detach().cpu().contiguous().flatten().view(torch.uint8)
