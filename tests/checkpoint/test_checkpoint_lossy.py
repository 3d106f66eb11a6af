"""Rounding to a bound keeps the bound, whatever the bits, and frees the bits it may."""

import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.checkpoint.codec import LOSSY_DTYPES, Bound, Bytes, Rounding, round_to_bound
from outlast.errors import CheckpointError

MANTISSA_BITS = {
    "float64": 52,
    "float32": 23,
    "float16": 10,
    "bfloat16": 7,
    "float8_e4m3fn": 3,
    "float8_e5m2": 2,
}
DTYPES = list(MANTISSA_BITS)
SMALL = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
ROUNDINGS: list[Rounding] = ["nearest", "stochastic"]
RELATIVE = [0.9, 0.5, 0.3, 0.25, 0.125, 0.06, 0.01, 2.0**-8, 1e-9]
ABSOLUTE = [5e-324, 2.0**-133, 1e-30, 2.0**-10, 0.01, 0.5, 3.0, 70.0, 1e5, 1e30, 1e38, 1.7e308]


def torch_type(dtype: str) -> torch.dtype:
    found = getattr(torch, dtype)
    assert isinstance(found, torch.dtype)
    return found


def values(raw: Bytes, dtype: str) -> Any:
    """What torch reads, in float64."""
    tensor = torch.from_numpy(raw.copy()).view(torch_type(dtype))
    return tensor.to(torch.float64).numpy()


def encode(numbers: Any, dtype: str) -> Bytes:
    tensor = torch.tensor(numbers, dtype=torch.float64).to(torch_type(dtype))
    raw: Bytes = tensor.view(torch.uint8).numpy()
    return raw


def words(raw: Bytes, dtype: str) -> Any:
    return raw.view(f"u{torch_type(dtype).itemsize}")


def from_words(patterns: list[int], dtype: str) -> Bytes:
    return np.array(patterns, f"u{torch_type(dtype).itemsize}").view(np.uint8)


def all_patterns(dtype: str) -> Bytes:
    width = 8 * torch_type(dtype).itemsize
    return from_words(list(range(1 << width)), dtype)


def bounds(rounding: Rounding) -> list[Bound]:
    relative = [Bound(relative=limit, rounding=rounding) for limit in RELATIVE]
    return relative + [Bound(absolute=limit, rounding=rounding) for limit in ABSOLUTE]


def normal(x: Any, dtype: str) -> Any:
    return np.isfinite(x) & (np.abs(x) >= torch.finfo(torch_type(dtype)).smallest_normal)


@np.errstate(all="ignore")
def assert_kept(raw: Bytes, rounded: Bytes, dtype: str, bound: Bound, error: float) -> None:
    """What a user is promised; float64 quotients and differences round monotonically."""
    assert rounded.dtype == np.uint8
    assert rounded.shape == raw.shape
    x, y = values(raw, dtype), values(rounded, dtype)
    same = words(raw, dtype) == words(rounded, dtype)
    assert same[~np.isfinite(x)].all()
    assert same[x == 0].all()
    assert np.isfinite(y[np.isfinite(x)]).all()
    assert (np.signbit(x) == np.signbit(y)).all()
    made = np.abs(y[~same] - x[~same])
    if bound.relative is not None:
        assert same[~normal(x, dtype)].all()
        made = made / np.abs(x[~same])
    assert made.max(initial=0.0) <= error <= bound.limit
    assert error <= made.max(initial=0.0) * (1 + 2.0**-50)


def assert_kept_exactly(raw: Bytes, rounded: Bytes, dtype: str, bound: Bound, error: float) -> None:
    """The bound and the reported error, in rational numbers."""
    assert_kept(raw, rounded, dtype, bound, error)
    for x, y in zip(values(raw, dtype), values(rounded, dtype), strict=True):
        if not math.isfinite(x) or x == 0:
            continue
        made = abs(Fraction(float(y)) - Fraction(float(x)))
        if bound.relative is not None:
            made /= abs(Fraction(float(x)))
        assert made <= Fraction(error) <= Fraction(bound.limit)


def patterns(dtype: str) -> st.SearchStrategy[list[int]]:
    width = 8 * torch_type(dtype).itemsize
    info = torch.finfo(torch_type(dtype))
    edges = [int(words(encode([v], dtype), dtype)[0]) for v in (info.max, info.smallest_normal)]
    sign = st.sampled_from([0, 1 << (width - 1)])
    near_edge = st.builds(
        lambda edge, step, sign: (edge + step) % (1 << (width - 1)) + sign,
        st.sampled_from([*edges, 0]),
        st.integers(-(1 << (MANTISSA_BITS[dtype] // 2)), 1 << (MANTISSA_BITS[dtype] // 2)),
        sign,
    )
    return st.lists(st.integers(0, (1 << width) - 1) | near_edge, min_size=1, max_size=12)


any_bound = st.builds(
    lambda limit, rounding: Bound(**limit, rounding=rounding),
    st.fixed_dictionaries({"relative": st.floats(2.0**-54, 1, exclude_max=True)})
    | st.fixed_dictionaries({"absolute": st.floats(0, exclude_min=True, allow_infinity=False)}),
    st.sampled_from(ROUNDINGS),
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_pattern_stays_within_the_bound(dtype: str) -> None:
    @settings(max_examples=60, deadline=None)
    @given(patterns(dtype), any_bound, st.integers(0, 2**128 - 1))
    def check(elements: list[int], bound: Bound, seed: int) -> None:
        raw = from_words(elements, dtype)
        rounded, error = round_to_bound(raw, dtype, bound, seed=seed)
        assert_kept_exactly(raw, rounded, dtype, bound, error)

    check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_limits_of_the_size_of_the_values_are_kept(dtype: str) -> None:
    """Where the element, the quantum and the limit are close together."""
    info = torch.finfo(torch_type(dtype))
    smallest, largest = math.log2(info.tiny * info.eps), math.log2(info.max / 2)

    @settings(max_examples=40, deadline=None)
    @given(patterns(dtype), st.floats(smallest, largest), st.sampled_from(ROUNDINGS))
    def check(elements: list[int], exponent: float, rounding: Rounding) -> None:
        limit = 2.0**exponent
        near = encode([limit * part for part in (0.25, 0.49, 0.5, 0.51, 0.99, 1, 1.01)], dtype)
        raw = np.concatenate([from_words(elements, dtype), near])
        bound = Bound(absolute=limit, rounding=rounding)
        rounded, error = round_to_bound(raw, dtype, bound, seed=1)
        assert_kept_exactly(raw, rounded, dtype, bound, error)

    check()


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", SMALL)
def test_all_patterns_of_a_small_type_stay_within_the_bound(dtype: str, rounding: Rounding) -> None:
    raw = all_patterns(dtype)
    for bound in bounds(rounding):
        rounded, error = round_to_bound(raw, dtype, bound, seed=7)
        assert_kept(raw, rounded, dtype, bound, error)


@pytest.mark.parametrize("limit", RELATIVE)
@pytest.mark.parametrize("dtype", SMALL)
def test_a_relative_bound_rounds_to_the_nearest_of_few_bits(dtype: str, limit: float) -> None:
    raw = all_patterns(dtype)
    kept_bits = max(0, math.ceil(-math.log2(limit)) - 1)
    rounded, _ = round_to_bound(raw, dtype, Bound(relative=limit), seed=0)
    x, y = values(raw, dtype), values(rounded, dtype)
    ordinary = normal(x, dtype)
    x, y = x[ordinary], y[ordinary]
    spacing = np.ldexp(1.0, np.frexp(x)[1] - 1 - min(kept_bits, MANTISSA_BITS[dtype]))
    # numpy rounds half to even as IEEE 754 does; a power of two scales without error.
    expected = np.rint(x / spacing) * spacing
    overflows = np.abs(expected) > torch.finfo(torch_type(dtype)).max
    towards_zero = np.trunc(x / spacing) * spacing
    expected = np.where(overflows, towards_zero, expected)
    # With no bit left to be even, a tie goes to the even exponent.
    decided = (kept_bits > 0) | (np.abs(x / spacing) != 1.5)
    np.testing.assert_array_equal(y[decided], expected[decided])


@pytest.mark.parametrize("exponent", [-30, -14, -9, -3, 0, 5, 8, 15, 16, 40, 128])
@pytest.mark.parametrize("dtype", SMALL)
def test_an_absolute_bound_rounds_to_the_nearest_multiple(dtype: str, exponent: int) -> None:
    raw = all_patterns(dtype)
    for limit in (2.0 ** (exponent - 1), 1.9 * 2.0 ** (exponent - 1)):
        rounded, _ = round_to_bound(raw, dtype, Bound(absolute=limit), seed=0)
        x, y = values(raw, dtype), values(rounded, dtype)
        x, y = x[np.isfinite(x)], y[np.isfinite(x)]
        nearest = np.rint(x / 2.0**exponent) * 2.0**exponent
        overflows = np.abs(nearest) > torch.finfo(torch_type(dtype)).max
        below = np.trunc(x / 2.0**exponent) * 2.0**exponent
        last = np.where(np.abs(x - below) <= limit, below, x)
        np.testing.assert_array_equal(y, np.where(overflows, last, nearest))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("kept_bits", [3, 7])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_relative_bound_keeps_no_more_bits_than_it_needs(
    dtype: str, kept_bits: int, rounding: Rounding
) -> None:
    raw = encode(np.random.default_rng(0).standard_normal(40_000), dtype)
    error_bits = kept_bits + (rounding == "nearest")
    for limit in (2.0**-error_bits, 1.99 * 2.0**-error_bits):
        bound = Bound(relative=limit, rounding=rounding)
        rounded, error = round_to_bound(raw, dtype, bound, seed=3)
        assert_kept(raw, rounded, dtype, bound, error)
        used = int(np.bitwise_or.reduce(words(rounded, dtype)))
        assert (used & -used).bit_length() - 1 == MANTISSA_BITS[dtype] - kept_bits


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_rounded_already_is_left_alone(dtype: str, rounding: Rounding) -> None:
    raw = np.random.default_rng(1).integers(0, 256, 1 << 14, np.uint8)
    for bound in bounds(rounding):
        once, _ = round_to_bound(raw, dtype, bound, seed=1)
        twice, error = round_to_bound(once, dtype, bound, seed=2)
        assert error == 0.0
        np.testing.assert_array_equal(once, twice)


@pytest.mark.parametrize("dtype", SMALL)
def test_rounding_to_nearest_keeps_the_order(dtype: str) -> None:
    raw = all_patterns(dtype)
    for bound in bounds("nearest"):
        rounded, _ = round_to_bound(raw, dtype, bound, seed=0)
        x, y = values(raw, dtype), values(rounded, dtype)
        finite = np.isfinite(x)
        order = np.argsort(x[finite], kind="stable")
        assert (np.diff(y[finite][order]) >= 0).all()


@pytest.mark.parametrize(
    ("dtype", "bound", "number"),
    [
        ("float64", Bound(relative=2.0**-3, rounding="stochastic"), 1.7),
        ("float32", Bound(relative=2.0**-3, rounding="stochastic"), -1.01),
        ("bfloat16", Bound(relative=0.5, rounding="stochastic"), 1.9),
        ("float8_e4m3fn", Bound(relative=0.5, rounding="stochastic"), 1.125),
        ("float64", Bound(absolute=1.0, rounding="stochastic"), 1e-3),
        ("float32", Bound(absolute=1.0, rounding="stochastic"), 0.3),
        ("float32", Bound(absolute=1.0, rounding="stochastic"), -(2.0**-9)),
        ("float16", Bound(absolute=1.5, rounding="stochastic"), 100.25),
        ("float16", Bound(absolute=2.0**-20, rounding="stochastic"), 2.0**-24),
        ("bfloat16", Bound(absolute=2.0**-130, rounding="stochastic"), 2.0**-133),
        ("float8_e5m2", Bound(absolute=1.0, rounding="stochastic"), 0.3125),
        ("float32", Bound(relative=0.5, rounding="stochastic"), 3.4e38),
        ("float16", Bound(absolute=1000.0, rounding="stochastic"), 65504.0),
    ],
)
def test_stochastic_rounding_is_unbiased(dtype: str, bound: Bound, number: float) -> None:
    raw = np.tile(encode([number], dtype), 40_000)
    x = float(values(raw, dtype)[0])
    y = values(round_to_bound(raw, dtype, bound, seed=11)[0], dtype)
    low, high = float(y.min()), float(y.max())
    assert low <= x <= high
    # Two neighbours with the variance (x - low)(high - x) have the mean x.
    assert set(np.unique(y)) == {low, high}
    deviation = math.sqrt((x - low) * (high - x) / y.size)
    assert abs(float((y - x).mean())) <= 4 * deviation


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_what_is_far_below_the_quantum_goes_to_zero_by_all_odds(dtype: str) -> None:
    raw = encode(np.full(40_000, -1.3e-30), dtype)
    bound = Bound(absolute=1.0, rounding="stochastic")
    y = values(round_to_bound(raw, dtype, bound, seed=1)[0], dtype)
    assert (y == 0).all()
    assert np.signbit(y).all()


@pytest.mark.parametrize("limit", ["relative", "absolute"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float8_e5m2"])
def test_stochastic_rounding_repeats_with_its_seed(dtype: str, limit: str) -> None:
    raw = encode(np.random.default_rng(2).uniform(1, 2, 40_001), dtype)
    bound = Bound(**{limit: 0.5}, rounding="stochastic")
    first, _ = round_to_bound(raw, dtype, bound, seed=5)
    again, _ = round_to_bound(raw.copy(), dtype, bound, seed=5)
    other, _ = round_to_bound(raw, dtype, bound, seed=6)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_the_error_is_the_one_made_not_the_one_allowed() -> None:
    raw = encode([1.0, 1.5, -3.0, 0.0], "float32")
    rounded, error = round_to_bound(raw, "float32", Bound(relative=0.125), seed=0)
    np.testing.assert_array_equal(rounded, raw)
    assert error == 0.0
    raw = encode([0.5, 1.5, 2.25], "float32")
    rounded, error = round_to_bound(raw, "float32", Bound(absolute=0.9), seed=0)
    assert values(rounded, "float32").tolist() == [0.0, 2.0, 2.0]
    assert error == 0.5


def test_an_error_that_float64_cannot_hold_is_reported_above() -> None:
    bound = Bound(absolute=1.0, rounding="stochastic")
    too_small = 0
    for number in np.random.default_rng(6).uniform(0.1, 0.4, 50):
        raw = np.tile(encode([number], "float64"), 64)
        rounded, error = round_to_bound(raw, "float64", bound, seed=0)
        assert values(rounded, "float64").max() == 1.0
        made = 1 - Fraction(float(number))
        too_small += Fraction(1 - float(number)) < made
        assert Fraction(math.nextafter(error, 0)) < made <= Fraction(error)
    assert too_small > 0


def test_the_input_stays_as_it_is() -> None:
    raw = encode(np.random.default_rng(4).standard_normal(1000), "bfloat16")
    before = raw.copy()
    raw.flags.writeable = False
    for bound in (Bound(relative=0.1), Bound(relative=1e-9), Bound(absolute=0.1)):
        rounded, _ = round_to_bound(raw, "bfloat16", bound, seed=0)
        rounded[:] = 0
        np.testing.assert_array_equal(raw, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_tensor_stays_empty(dtype: str) -> None:
    for bound in (Bound(relative=0.9), Bound(absolute=1, rounding="stochastic")):
        rounded, error = round_to_bound(np.zeros(0, np.uint8), dtype, bound, seed=0)
        assert (rounded.size, rounded.dtype.name, error) == (0, "uint8", 0.0)


def test_elements_need_no_alignment() -> None:
    raw = encode(np.random.default_rng(5).standard_normal(1000), "float32")
    shifted = np.concatenate([np.zeros(1, np.uint8), raw])[1:]
    for bound in (Bound(relative=0.1), Bound(absolute=0.1)):
        expected = round_to_bound(raw, "float32", bound, seed=0)
        found = round_to_bound(shifted, "float32", bound, seed=0)
        np.testing.assert_array_equal(found[0], expected[0])
        assert found[1] == expected[1]


def test_every_type_that_is_offered_is_tested() -> None:
    assert set(DTYPES) == LOSSY_DTYPES


@pytest.mark.parametrize(
    ("settings_", "named"),
    [
        ({}, "exactly one"),
        ({"relative": 0.1, "absolute": 0.1}, "exactly one"),
        ({"relative": 1.0}, r"bound\.relative = 1\.0 .*below 1"),
        ({"relative": 0}, r"bound\.relative = 0 "),
        ({"relative": True}, r"bound\.relative = True"),
        ({"absolute": -2.0}, r"bound\.absolute = -2\.0 .*above 0"),
        ({"absolute": math.inf}, r"bound\.absolute = inf"),
        ({"absolute": math.nan}, r"bound\.absolute = nan"),
        ({"absolute": 10**400}, r"bound\.absolute = 1000"),
        ({"absolute": "0.1"}, r"bound\.absolute = '0\.1'"),
        ({"relative": 0.1, "rounding": "up"}, r"bound\.rounding = 'up'.*'stochastic'"),
    ],
)
def test_what_bounds_nothing_is_refused(settings_: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        Bound(**settings_)


@pytest.mark.parametrize(
    ("raw", "dtype", "seed", "named"),
    [
        (np.zeros(8, np.uint8), "int32", 0, "dtype = int32"),
        (np.zeros(8, np.uint8), "complex64", 0, "dtype = complex64"),
        (np.zeros(8, np.float32), "float32", 0, "raw is float32"),
        (np.zeros((2, 4), np.uint8), "float32", 0, r"shape \(2, 4\)"),
        (np.zeros(8, np.uint8)[::2], "float32", 0, "contiguous"),
        (np.zeros(7, np.uint8), "float32", 0, "7 bytes"),
        (np.zeros(8, np.uint8), "float32", -1, "seed = -1"),
    ],
)
def test_what_cannot_be_rounded_is_refused(raw: Any, dtype: str, seed: int, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        round_to_bound(raw, dtype, Bound(relative=0.1), seed=seed)


@settings(deadline=None)
@given(any_bound)
def test_a_bound_survives_json(bound: Bound) -> None:
    assert Bound(**json.loads(json.dumps(bound.to_dict()))) == bound
