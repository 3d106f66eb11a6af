"""Laws of thinning, smoothing and distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.report.overview import (
    downsample,
    histogram,
    histogram_edges,
    percentiles,
    smooth,
    smoothing_window,
    thin,
)

numbers = st.floats(-1e6, 1e6, allow_nan=False)
curves = st.lists(numbers | st.just(math.nan) | st.just(math.inf), min_size=1, max_size=400)


@given(curves, st.integers(4, 80))
def test_downsampling_keeps_ends_extremes_and_nan(values: list[float], limit: int) -> None:
    array = np.array(values)
    kept = downsample(array, limit)
    assert list(kept) == sorted(set(kept))
    assert kept[0] == 0
    assert kept[-1] == len(array) - 1
    assert len(kept) <= max(limit, 4) + 2
    finite = array[np.isfinite(array)]
    shown = array[kept][np.isfinite(array[kept])]
    if len(finite):
        assert (shown.min(), shown.max()) == (finite.min(), finite.max())
    assert np.isfinite(array).all() == np.isfinite(array[kept]).all()


def test_a_single_spike_in_a_million_survives() -> None:
    values = np.ones(1_000_000)
    values[123_457] = 50.0
    values[700_001] = math.nan
    kept = downsample(values)
    assert {123_457, 700_001} <= set(kept.tolist())
    assert len(kept) <= 4002


@given(st.lists(numbers, min_size=1, max_size=100), st.integers(0, 10))
def test_smoothing_stays_between_the_extremes(values: list[float], half: int) -> None:
    array = np.array(values)
    means = smooth(array, 2 * half + 1)
    assert means.shape == array.shape
    slack = 1e-6 * max(1.0, float(np.abs(array).max()))
    assert (means >= array.min() - slack).all()
    assert (means <= array.max() + slack).all()


@given(st.floats(-10, 10), st.floats(-10, 10), st.integers(1, 60), st.integers(0, 6))
def test_smoothing_does_not_move_a_straight_line(
    offset: float, slope: float, total: int, half: int
) -> None:
    line = offset + slope * np.arange(total)
    window = 2 * half + 1
    inner = slice(window // 8, total - window // 8)
    assert smooth(line, window)[inner] == pytest.approx(line[inner], abs=1e-8)


def test_smoothing_leaves_out_what_is_not_finite() -> None:
    means = smooth(np.array([1.0, math.nan, 3.0, math.inf, 5.0]), 3)
    assert means.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert math.isnan(smooth(np.array([math.nan]), 1)[0])


@given(st.integers(1, 100_000))
def test_the_smoothing_window_is_odd_and_short(total: int) -> None:
    window = smoothing_window(total)
    assert window % 2 == 1
    assert window <= max(0.02 * total + 1, 5)


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=300))
def test_the_histogram_loses_no_step(values: list[float]) -> None:
    array = np.array(values)
    found = histogram(array, histogram_edges(array))
    assert int(found.counts.sum()) + found.above == len(array)
    assert found.highest == array.max()


def test_percentiles_of_nothing_are_unknown() -> None:
    assert percentiles(np.array([math.nan])) is None
    found = percentiles(np.arange(101.0))
    assert found is not None
    assert (found.median, found.p90, found.p99) == (50, 90, 99)


@given(st.lists(st.integers(), max_size=50), st.integers(2, 20))
def test_thinning_keeps_the_ends(items: list[int], limit: int) -> None:
    found = thin(items, limit)
    assert len(found) == min(len(items), limit)
    if items:
        assert (found[0], found[-1]) == (items[0], items[-1])
