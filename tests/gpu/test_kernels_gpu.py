"""The rules in one kernel give the bits of the reference on the same device, for every setting and kind of number."""

import pytest
import torch
from torch import Tensor, nn

from overspill.kernels import masters
from overspill.kernels.elements import Elements
from overspill.kernels.reference import ieee_root, rule_of
from tests.cpu.test_kernels import ADAM, SGD
from tests.gpu.where import DEVICE, fewer, kernels
from tests.reference import same_bits

pytestmark = pytest.mark.gpu

COUNTS = (100_003, 100_000, 100_003)
"""By the number of factors. A multiple of 16 goes another way to its kernel."""
SETTINGS = [(torch.optim.AdamW, each) for each in ADAM] + [(torch.optim.Adam, each) for each in ADAM]
SETTINGS += [(torch.optim.SGD, each) for each in SGD]
SETTINGS += [(torch.optim.Adagrad, {"weight_decay": d, "lr_decay": r}) for d in (0.0, 0.1) for r in (0.0, 0.01)]


def numbers(seed: int, dtype: torch.dtype, count: int = COUNTS[0]) -> Tensor:
    """Of all sizes; some are zero, denormal, infinite or NaN."""
    made = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=made) * 10.0 ** torch.randint(-12, 3, (count,), generator=made)
    values[::997], values[1::9973], values[2::9973], values[3::9973] = 0.0, float("inf"), float("nan"), 1e-42
    return values.to(dtype).to(DEVICE)


def pair(master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    if dtype == torch.float32:
        return master.clone(), None
    weight = torch.empty_like(master, dtype=dtype)
    kept = torch.empty_like(master, dtype=masters.KEPT[dtype])
    masters.split(master, weight, kept)
    return weight, kept


@kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("factors", [0, 1, 2])
def test_the_bits_of_the_reference(dtype: torch.dtype, factors: int) -> None:
    from overspill.kernels import gpu

    count = fewer(COUNTS[factors])
    for kind, settings in SETTINGS:
        optimizer = kind([nn.Parameter(torch.zeros(1))], lr=3e-3, **settings)
        rule, hypers = rule_of(optimizer), optimizer.param_groups[0]
        assert rule is not None
        weight, kept = pair(numbers(0, torch.float32, count), dtype)
        ours, own_kept = weight.clone(), None if kept is None else kept.clone()
        fields = [torch.full((count,), float(rule.initial), device=DEVICE) for _ in rule.fields]
        own_fields = [f.clone() for f in fields]
        for step in range(1, 4):
            gradient = numbers(step, dtype if step < 3 else torch.float32, count)
            by = [torch.tensor(x, device=DEVICE) for x in (2.0**-4, 0.3)[:factors]]
            wide = gradient.float() if gradient.dtype != torch.float32 else gradient.clone()
            for factor in by:
                wide.mul_(factor)
            master = weight if kept is None else masters.join(weight, kept)
            rule.apply(master, wide, fields, hypers, step, ieee_root)
            if kept is not None:
                masters.split(master, weight, kept)
            gpu.RULES[rule.name](Elements(ours, own_kept, gradient, by, own_fields), hypers, step)
            told = f"{kind.__name__} {settings} step {step}"
            assert same(ours, weight), f"{told}: weights: {difference(ours, weight, gradient)}"
            assert kept is None or own_kept is None or same(own_kept, kept), f"{told}: masters"
            for name, a, b in zip(rule.fields, own_fields, fields, strict=True):
                assert same(a, b), f"{told}: {name}: {difference(a, b, gradient)}"


def difference(a: Tensor, b: Tensor, gradient: Tensor) -> str:
    where = torch.nonzero((a != b) & ~(a.isnan() & b.isnan())).flatten()[:4]
    return f"{a[where].tolist()} instead of {b[where].tolist()}, gradients {gradient[where].tolist()}"


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit; any NaN is as good as another."""
    if a.is_floating_point():
        nan = a.isnan() & b.isnan()
        a, b = a.masked_fill(nan, 0), b.masked_fill(nan, 0)
    return same_bits(a, b)
