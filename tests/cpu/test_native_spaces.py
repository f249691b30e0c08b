"""Native kernels over the whole input space of every format: the bits of plain torch, on every instruction set."""

from typing import Any

import pytest

from overspill.kernels import cpu
from overspill.kernels.cpu import How
from overspill.kernels.elements import Elements
from overspill.kernels.reference import Rule
from tests import spaces
from tests.cpu.test_native import NATIVE, part

pytestmark = NATIVE


def _full(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.full)


SPACES = pytest.mark.parametrize("space", [spaces.every_bf16, spaces.every_code, _full(spaces.every_code_alone)])
LAYOUTS = pytest.mark.parametrize(("format", "layout"), [*spaces.LAYOUTS, _full("compact", spaces.alone)])


def run(rule: Rule, on: Elements, hypers: dict[str, Any], step: int = 2) -> Elements:
    known = spaces.known(rule, on, hypers, step)
    for instructions in cpu.sets():
        found = part(on, 0, on.weight.numel())
        cpu.RULES[rule.name](found, hypers, step, How(instructions, 1))
        assert spaces.unlike(rule, found, known) == [], instructions
    return known


def test_every_weight_beside_every_8_bit_remainder() -> None:
    spaces.weights_beside_8_bit_remainders(run, range(-128, 128))


@pytest.mark.parametrize("last", [None, *map(_full, (0, 1, 0x7F, 0x80, 0xFF))])
def test_all_upper_24_bits_become_weights_and_8_bit_remainders(last: int | None) -> None:
    spaces.upper_24_bits_become_8_bit_remainders(run, last)


def test_every_weight_beside_16_bit_remainders() -> None:
    spaces.every_weight_beside(run, spaces.REST)


@pytest.mark.parametrize("sign", [0, 0x8000], ids=["positive", "negative"])
def test_every_16_bit_remainder_beside_some_weights(sign: int) -> None:
    spaces.every_16_bit_remainder(run, [sign | bits for bits in spaces.WEIGHTS])


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


@pytest.mark.parametrize("bits", spaces.SELDOM, ids=hex)
def test_random_bits_that_are_seldom(bits: int) -> None:
    spaces.random_bits_that_are_seldom(run, bits)
