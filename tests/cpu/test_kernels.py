"""The arithmetic of updates: masters are exact over their whole input space; our rules follow torch's optimizers."""

import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from overspill.kernels import executors, masters, reference
from overspill.kernels.elements import Elements
from overspill.kernels.reference import rule_of
from overspill.plan.memory import KERNEL_WORKSPACE
from overspill.specs import KERNEL_PIECE
from tests.reference import half_up, same_bits

UPPER = torch.arange(-(2**15), 2**15, dtype=torch.int32)
"""All sixteen upper bits of an fp32 number: every sign, exponent and bf16 mantissa."""
LOWER = [0, 1, 2, 0x1234, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xABCD, 0xFFFE, 0xFFFF]


def split_and_join(master: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.empty(master.shape, dtype=dtype)
    kept = torch.empty(master.shape, dtype=masters.KEPT[dtype])
    masters.split(master, weight, kept)
    return weight, masters.join(weight, kept)


def numbers() -> torch.Tensor:
    every = [(UPPER << 16) | low for low in LOWER]
    some = [
        (torch.tensor(upper, dtype=torch.int32) << 16) | torch.arange(2**16, dtype=torch.int32) for upper in SPECIAL
    ]
    return torch.cat([*every, *some]).view(torch.float32)


SPECIAL = [0, 1, 0x7F, 0x80, 0x3F80, 0x3FFF, 0x7F7F, 0x7F80, -1, -128, -(2**15), -(2**15) + 1, -16512]
"""Zero, denormals, one, the largest finite numbers, infinity, NaN: with these, all lower bits."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_master_is_held_exactly(dtype: torch.dtype) -> None:
    master = numbers()
    weight, joined = split_and_join(master, dtype)
    nan = master.isnan()
    assert same_bits(joined[~nan], master[~nan])
    assert bool(joined[nan].isnan().all()) and bool(weight[nan].isnan().all())
    assert not bool(weight[~nan].isnan().any())


def test_a_weight_is_its_master_rounded_half_up() -> None:
    master = numbers()
    weight, _ = split_and_join(master, torch.bfloat16)
    expected = half_up(master, torch.bfloat16)
    finite = ~master.isnan()
    assert same_bits(weight[finite], expected[finite])
    nearest = (weight.double() - master.double()).abs() <= (master.bfloat16().double() - master.double()).abs()
    assert bool(nearest[master.isfinite() & weight.isfinite()].all()), "no other bf16 number is nearer"


def test_a_fingerprint_sees_every_change() -> None:
    weight = torch.randn(3001).bfloat16()
    before = masters.fingerprint(weight)
    for i in (0, 1, 1500, 3000):
        changed = weight.clone()
        changed[i] += 1
        assert not torch.equal(masters.fingerprint(changed), before)
    swapped = weight.clone()
    swapped[[3, 2000]] = weight[[2000, 3]]
    assert not torch.equal(masters.fingerprint(swapped), before)
    assert torch.equal(masters.fingerprint(weight.clone()), before)


ADAM = [
    dict(zip(("weight_decay", "amsgrad", "maximize", "betas"), each, strict=True))
    for each in itertools.product([0.0, 0.1], [False, True], [False, True], [(0.9, 0.999), (0.3, 0.9)])
]
SGD = [
    {"momentum": m, "nesterov": n, "weight_decay": d, "dampening": p, "maximize": x}
    for m, n, d, p, x in [
        (0.0, False, 0.0, 0.0, False),
        (0.9, False, 0.1, 0.5, False),
        (0.9, True, 0.1, 0.0, True),
        (0.9, False, 0.0, 0.0, True),
    ]
]
ADAGRAD = [{"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.2}, {"maximize": True}]
OPTIMIZERS = [
    *((torch.optim.AdamW, options) for options in ADAM),
    *((torch.optim.Adam, options) for options in ADAM),
    *((torch.optim.SGD, options) for options in SGD),
    *((torch.optim.Adagrad, options) for options in ADAGRAD),
]


def ulp(x: torch.Tensor) -> torch.Tensor:
    """The distance from |x| to the next larger fp32 number."""
    magnitude = x.abs().float()
    return torch.nextafter(magnitude, torch.tensor(torch.inf)).double() - magnitude.double()


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=str)
def test_a_step_is_within_two_ulp_of_torch(kind: type[torch.optim.Optimizer], options: dict) -> None:
    generator = torch.Generator().manual_seed(0)
    size = 20_001
    plain = nn.Parameter(torch.randn(size, generator=generator) * torch.rand(size, generator=generator) ** 4)
    optimizer = kind([plain], lr=1e-2, **options)
    rule = rule_of(optimizer)
    assert rule is not None
    for step in range(1, 8):
        before = plain.detach().clone()
        ours, state = before.clone(), optimizer.state.get(plain, {})
        fields = [
            state[f].clone() if state.get(f) is not None else torch.full((size,), rule.initial) for f in rule.fields
        ]
        gradient = torch.randn(size, generator=generator) * 10.0 ** torch.randint(-6, 2, (size,), generator=generator)
        gradient[::17] = 0.0
        plain.grad = gradient.clone()
        optimizer.step()
        rule.apply(ours, gradient.clone(), fields, optimizer.param_groups[0], step)
        update = (plain.detach().double() - before.double()).abs()
        bound = 2 * ulp(torch.maximum(before.double().abs(), update))
        excess = (ours.double() - plain.detach().double()).abs() - bound
        assert excess.max() <= 0, f"step {step}: {int((excess > 0).sum())} elements differ by more"
        for name, field in zip(rule.fields, fields, strict=True):
            kept = optimizer.state[plain][name]
            assert torch.allclose(field, kept, rtol=1e-6, atol=1e-12), name


def test_only_known_optimizers_have_a_rule() -> None:
    p = nn.Parameter(torch.zeros(3))

    class Own(torch.optim.AdamW):
        pass

    assert rule_of(Own([p])) is None
    assert rule_of(torch.optim.RMSprop([p])) is None
    assert rule_of(torch.optim.SGD([p], lr=0.1)).fields == ()


class Counting(TorchDispatchMode):
    """Bytes of the tensors that are made while it is on, at their most."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in (t for t in tree_leaves(found) if isinstance(t, torch.Tensor)):
            storage = t.untyped_storage()
            if storage._cdata not in given | self._known:
                self._known.add(storage._cdata)
                self._now += storage.nbytes()
                self.most = max(self.most, self._now)
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        return found

    def _forget(self, which: int, nbytes: int) -> None:
        self._known.discard(which)
        self._now -= nbytes


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.AdamW, {}), (torch.optim.AdamW, {"betas": (0.4, 0.9)}), (torch.optim.SGD, {"momentum": 0.9})],
)
def test_an_update_takes_no_more_than_is_planned(
    kind: Any, options: dict, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a CPU, and as on a GPU without Triton."""
    monkeypatch.setitem(reference.AT_A_TIME, "cpu", reference.AT_A_TIME[device])
    optimizer = kind([nn.Parameter(torch.zeros(1))], lr=1e-3, **options)
    rule, count = rule_of(optimizer), KERNEL_PIECE
    arrays = [torch.rand(count) for _ in rule.fields]
    on = Elements(torch.randn(count).bfloat16(), torch.zeros(count, dtype=torch.int16), torch.randn(count), (), arrays)
    with Counting() as counted:
        executors.in_torch(rule, reference.torch_root, on, optimizer.param_groups[0], 2)
    with_gradient = counted.most / (4 * count) + 1
    assert 3 <= with_gradient <= (6 if device == "cpu" else KERNEL_WORKSPACE), with_gradient
