"""What faults do to stored numbers."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import GuardError
from outlast.guard.inject.fault import (
    Pattern,
    before_cast,
    carry,
    columns,
    flip,
    integers,
    memory_of,
    relative_change,
    settled,
    width,
)

TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
some_type = st.sampled_from(TYPES)
seeds = st.integers(0, 2**32)


def _bit_patterns(dtype: torch.dtype, seed: int, count: int = 16) -> torch.Tensor:
    """Numbers of all kinds: normal, subnormal, infinite, NaN."""
    generator = torch.Generator().manual_seed(seed)
    size = width(dtype) // 8
    raw = torch.randint(0, 256, (count * size,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


@given(some_type, seeds, st.sets(st.integers(0, 63), min_size=1, max_size=4))
def test_flipping_twice_is_the_identity_and_once_is_not(dtype, seed, bits):
    bits = tuple(bit % width(dtype) for bit in bits)
    numbers = _bit_patterns(dtype, seed)
    before = integers(numbers).clone()
    flip(numbers, bits)
    different = (integers(numbers) ^ before).tolist()
    assert all(bin(each % (1 << width(dtype))).count("1") == len(set(bits)) for each in different)
    flip(numbers, bits)
    assert torch.equal(integers(numbers), before)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_highest_bit_is_the_sign(dtype):
    numbers = torch.tensor([1.5, -0.25], dtype=dtype)
    flip(numbers, (width(dtype) - 1,))
    assert numbers.tolist() == [-1.5, 0.25]


@given(some_type, seeds, st.integers(0, 62), st.sampled_from([1, -1]))
def test_a_carry_changes_the_magnitude_by_the_stated_power(dtype, seed, bit, sign):
    bit %= width(dtype) - 1
    largest = 2 ** (width(dtype) - 1) - 1
    numbers = _bit_patterns(dtype, seed)
    before = [each % (largest + 1) for each in integers(numbers).tolist()]
    signs = torch.signbit(numbers)
    carry(numbers, bit, sign)
    after = [each % (largest + 1) for each in integers(numbers).tolist()]
    expected = [min(max(each + sign * 2**bit, 0), largest) for each in before]
    assert after == expected
    assert torch.equal(torch.signbit(numbers), signs)


@given(st.sampled_from([torch.float16, torch.bfloat16]), seeds, st.integers(0, 1000))
def test_a_value_before_its_cast_rounds_to_what_is_stored(dtype, seed, draw):
    """What is drawn for the removed digits never changes the stored number by itself."""
    numbers = _bit_patterns(dtype, seed)
    numbers = numbers[torch.isfinite(numbers)]
    before = integers(numbers).clone()
    nothing = Pattern("flip", bits=(), before_cast=True)
    before_cast(numbers, nothing, random.Random(draw))
    assert torch.equal(integers(numbers), before)


def test_low_bits_before_the_cast_are_mostly_rounded_away_and_high_ones_are_not():
    changed = {}
    for bit in (4, 15, 30):
        numbers = torch.linspace(0.5, 1.9, 500, dtype=torch.bfloat16)
        before = numbers.clone()
        before_cast(numbers, Pattern(bits=(bit,), before_cast=True), random.Random(0))
        changed[bit] = int((numbers != before).sum())
    assert changed[4] < 10
    # The highest removed bit is half a unit: it always crosses the border.
    assert changed[15] > 400
    assert changed[30] == 500


def test_before_cast_refuses_numbers_that_are_not_rounded():
    with pytest.raises(GuardError, match="bfloat16 or float16"):
        before_cast(torch.ones(2), Pattern(bits=(3,), before_cast=True), random.Random(0))


@given(
    st.sampled_from(["element", "segment", "stride"]),
    st.integers(1, 40),
    st.integers(1, 200),
    st.data(),
)
def test_columns_are_in_the_row_and_hold_the_position(extent, length, row_length, data):
    column = data.draw(st.integers(0, row_length - 1))
    pattern = Pattern(bits=(0,), extent=extent, length=length)
    struck = range(row_length)[columns(pattern, column, row_length)]
    assert column in struck
    if extent == "element":
        assert len(struck) == 1
    elif extent == "segment":
        assert len(struck) <= length
        assert struck[0] % length == 0
    else:
        assert {each % length for each in struck} == {column % length}
        assert len(struck) >= row_length // length


def test_bits_are_drawn_where_they_are_open_and_refused_where_there_are_none():
    drawn = {settled(Pattern(), torch.bfloat16, random.Random(n)).bits[0] for n in range(400)}
    assert drawn == set(range(16))
    carries = {
        settled(Pattern("carry"), torch.float16, random.Random(n)).bits[0] for n in range(400)
    }
    assert carries == set(range(15))
    with pytest.raises(GuardError, match=r"bit = 20 cannot flip in bfloat16: bits 0 to 15"):
        settled(Pattern(bits=(20,)), torch.bfloat16, random.Random(0))
    with pytest.raises(GuardError, match="bits 0 to 30"):
        settled(Pattern("carry", bits=(31,)), torch.float32, random.Random(0))
    assert settled(Pattern(bits=(20,), before_cast=True), torch.bfloat16, random.Random(0))


def test_autograd_does_not_notice_a_fault():
    weight = torch.nn.Parameter(torch.ones(3))
    version = weight._version
    flip(weight, (31,))
    assert weight.tolist() == [-1, -1, -1]
    assert weight._version == version


def test_an_expanded_tensor_is_struck_in_its_one_memory():
    expanded = torch.ones(4).unsqueeze(0).expand(5, 4)
    assert memory_of(expanded).shape == (1, 4)


def test_integers_and_complex_numbers_are_refused():
    for numbers in (torch.ones(2, dtype=torch.int32), torch.ones(2, dtype=torch.complex64)):
        with pytest.raises(GuardError, match="floating-point"):
            integers(numbers)


def test_relative_change_is_of_the_row():
    row = torch.tensor([3.0, 4.0])
    assert relative_change(row, torch.tensor([3.0, 5.0])) == pytest.approx(0.2)
    assert relative_change(row, row) == 0.0
    assert relative_change(torch.zeros(2), row) == math.inf
    assert relative_change(row, torch.tensor([math.nan, 4.0])) == math.inf
