"""Triton kernels over the whole input space of every format: the bits of plain torch on the CPU.

Interpreted, this is as whole as on a GPU, but for codes and numbers that are each in a block of their own, and for
masters beside some last 8 bits: in every test of these, another case has all of them too, in less time.
"""

from typing import Any

import pytest

from overspill.kernels.elements import Elements
from overspill.kernels.reference import Rule
from tests import spaces
from tests.gpu.where import DEVICE, INTERPRETED, kernels, moved

pytestmark = pytest.mark.gpu


def _both(*values: Any) -> Any:
    return pytest.param(*values, marks=kernels)


SPACES = pytest.mark.parametrize("space", [_both(spaces.every_bf16), _both(spaces.every_code), spaces.every_code_alone])
LAYOUTS = pytest.mark.parametrize(
    ("format", "layout"), [*(_both(*each) for each in spaces.LAYOUTS), ("compact", spaces.alone)]
)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes nearly as long for a block of a few elements as for one of many."""
    if INTERPRETED:
        from overspill.kernels import gpu

        monkeypatch.setattr(gpu, "BLOCK", spaces.ALL)


def run(rule: Rule, on: Elements, hypers: dict[str, Any], step: int = 2) -> Elements:
    from overspill.kernels import gpu

    known, found = spaces.known(rule, on, hypers, step), moved(on, DEVICE)
    gpu.RULES[rule.name](found, hypers, step)
    assert spaces.unlike(rule, moved(found, "cpu"), known) == []
    return known


@kernels
def test_every_weight_beside_every_8_bit_remainder() -> None:
    spaces.weights_beside_8_bit_remainders(run, range(-128, 128))


@pytest.mark.parametrize("last", [_both(None), 0, 1, 0x7F, 0x80, 0xFF])
def test_all_upper_24_bits_become_weights_and_8_bit_remainders(last: int | None) -> None:
    spaces.upper_24_bits_become_8_bit_remainders(run, last)


@kernels
def test_every_weight_beside_16_bit_remainders() -> None:
    spaces.every_weight_beside(run, spaces.REST)


@kernels
@pytest.mark.parametrize("sign", [0, 0x8000], ids=["positive", "negative"])
def test_every_16_bit_remainder_beside_some_weights(sign: int) -> None:
    spaces.every_16_bit_remainder(run, [sign | bits for bits in spaces.WEIGHTS])


@kernels
def test_all_upper_halves_become_weights_and_16_bit_remainders() -> None:
    spaces.upper_halves_become_16_bit_remainders(run, spaces.LOWER)


@SPACES
def test_every_momentum_that_can_be_kept(space: spaces.Kept) -> None:
    spaces.every_momentum(run, space)


@SPACES
def test_every_sum_of_squares_that_can_be_kept(space: spaces.Kept) -> None:
    spaces.every_sum_of_squares(run, space)


@SPACES
@pytest.mark.parametrize("gradient", [0.0, 1e-3])
def test_all_moments_of_adam_that_can_be_kept(space: spaces.Kept, gradient: float) -> None:
    spaces.all_moments_of_adam(run, space, gradient)


@LAYOUTS
def test_all_upper_halves_become_momenta(format: str, layout: spaces.Layout) -> None:
    spaces.upper_halves_become_momenta(run, format, layout)


@LAYOUTS
def test_all_positive_upper_halves_become_sums_and_second_moments(format: str, layout: spaces.Layout) -> None:
    spaces.positive_upper_halves_become_sums_and_second_moments(run, format, layout)


@kernels
@pytest.mark.parametrize("bits", spaces.SELDOM, ids=hex)
def test_random_bits_that_are_seldom(bits: int) -> None:
    spaces.random_bits_that_are_seldom(run, bits)
