"""Fused products have one rounding, everywhere: also where a sum in fp64 falls into the middle of two floats."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from overspill.kernels import cpu, reference
from overspill.kernels.elements import Elements

COUNT = 4000


def rounded(x: Fraction) -> float:
    """The nearest float, the even one of two."""
    if x == 0:
        return 0.0
    size = abs(x)
    exponent = max(math.frexp(float(size))[1] - 1, -126)
    unit = Fraction(2) ** (exponent - 23)
    found = round(size / unit) * unit
    return math.copysign(float(found), x)


def near_the_middle(seed: int) -> tuple[Tensor, Tensor, float]:
    """a, b, c: b * c is half of a's last place, give or take what fp64 cannot see; some results are denormal."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-148, 100, (COUNT,), generator=generator)
    mantissa = torch.randint(1 << 23, 1 << 24, (COUNT,), generator=generator).double()
    a = torch.ldexp(mantissa, exponent - 23).float()
    c = float(torch.tensor(1.0 + 2.0 ** -torch.randint(1, 24, (1,), generator=generator).item()))
    part = 1.0 + torch.randint(-2, 3, (COUNT,), generator=generator).double() * 2.0**-23
    b = (torch.ldexp(part, exponent - 24) / c).float()
    sign = torch.randint(0, 2, (COUNT,), generator=generator) * 2 - 1
    return a, b * sign, c


def exact(a: Tensor, b: Tensor, c: float) -> Tensor:
    pairs = zip(a.tolist(), b.tolist(), strict=True)
    return torch.tensor(
        [rounded(Fraction(x) + Fraction(y) * Fraction(c)) for x, y in pairs], dtype=torch.float64
    ).float()


@pytest.mark.parametrize("seed", range(6))
def test_once(seed: int) -> None:
    a, b, c = near_the_middle(seed)
    expected = exact(a, b, c)
    assert torch.equal(reference._fused_(a.clone(), b, c), expected)
    hypers = {"lr": -c, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}
    for instructions in cpu.sets():
        found = a.clone()
        cpu.RULES["sgd"](Elements(found, None, b.clone(), (), []), hypers, 1, cpu.How(instructions, 1))
        assert torch.equal(found, expected), instructions


def test_twice_would_be_seen() -> None:
    """The cases are such that rounding to fp64 first errs."""
    wrong = 0
    for seed in range(6):
        a, b, c = near_the_middle(seed)
        twice = (b.double() * c + a.double()).float()
        wrong += int((twice != exact(a, b, c)).sum())
    assert wrong > 10


@pytest.mark.parametrize(
    "values", [(math.inf, 1.0), (1.0, math.inf), (math.nan, 0.0), (-math.inf, math.inf), (0.0, 0.0)]
)
def test_what_is_not_finite(values: tuple[float, float]) -> None:
    a, b = (torch.tensor([x]) for x in values)
    expected = a + b * 0.5
    assert torch.equal(reference._fused_(a.clone(), b, 0.5).nan_to_num(7.0), expected.nan_to_num(7.0))
