"""Curves as arrays: smoothing, thinning and distributions, without any drawing."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

T = TypeVar("T")

MAX_POINTS = 4000
"""Longer curves are thinned to about this many points before they go into the page."""

_SMOOTHED_SHARE = 0.02
_TALLEST_BINS = 60


def downsample(values: Floats, limit: int = MAX_POINTS) -> Integers:
    """Indices, ascending, of at most about `limit` values that show the same curve.

    The values are cut into ``limit // 4`` buckets of equal length. Each bucket keeps its first
    value, its smallest, its largest and its first non-finite one, so no spike or NaN disappears.
    The first and the last value always stay.

    Args:
        values: (n,), may hold NaN and infinities.
        limit: At least 4; a curve that is not longer is kept whole.
    """
    total = len(values)
    if total <= limit:
        return np.arange(total)
    edges = np.linspace(0, total, limit // 4 + 1).astype(np.int64)
    finite = np.isfinite(values)
    kept = {0, total - 1}
    for start, end in itertools.pairwise(edges):
        good = start + np.flatnonzero(finite[start:end])
        kept.add(int(start))
        if len(good):
            kept.update((int(good[values[good].argmin()]), int(good[values[good].argmax()])))
        if len(good) < end - start:
            kept.add(int(start + (~finite[start:end]).argmax()))
    return np.array(sorted(kept), dtype=np.int64)


def smoothing_window(total: int) -> int:
    """Odd number of neighbouring records over which a curve of `total` records is averaged.

    It is 2 % of them; a short curve takes up to five, one below twenty records none but its own.
    """
    return 2 * int(max(total * _SMOOTHED_SHARE / 2, min(total / 20, 2))) + 1


def smooth(values: Floats, window: int) -> Floats:
    """Centred moving mean over `window` values (odd); NaN and infinities are left out.

    Near the ends the window shrinks on both sides alike, so the curve neither lags nor bends; only
    the last eighth of a window at each end is averaged over what there is, or noise would show
    there. A window without a finite value gives NaN.
    """
    total = len(values)
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(total)
    half = np.minimum(np.minimum(index, total - 1 - index), window // 2)
    half = np.maximum(half, window // 8)
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, total)
    number = counts[high] - counts[low]
    mean = (sums[high] - sums[low]) / np.maximum(number, 1)
    return np.where(number > 0, mean, np.nan)


@dataclass(frozen=True)
class Percentiles:
    """Median, 90th and 99th percentile (linear interpolation), in the unit of the values."""

    median: float
    p90: float
    p99: float


def percentiles(values: Floats) -> Percentiles | None:
    """Percentiles of the finite values; None when there is none."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    return Percentiles(*(float(item) for item in np.percentile(finite, (50, 90, 99))))


@dataclass(frozen=True)
class Histogram:
    """How often values fall between neighbouring edges.

    Attributes:
        edges: (bins + 1,), ascending.
        counts: (bins,).
        above: Values beyond the last edge, which would flatten the picture.
        highest: The largest value.
    """

    edges: Floats
    counts: Integers
    above: int
    highest: float


def histogram_edges(values: Floats) -> Floats:
    """Edges for `values`, up to 1.25 times their 99th percentile; the largest values may exceed."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return np.array([0.0, 1.0])
    low, high = float(finite.min()), float(finite.max())
    high = min(high, 1.25 * float(np.percentile(finite, 99)))
    if high <= low:
        low, high = low * 0.95, low * 1.05 or 1.0
    bins = int(min(max(np.sqrt(len(finite)) * 1.5, 8), _TALLEST_BINS))
    return np.linspace(low, high, bins + 1)


def histogram(values: Floats, edges: Floats) -> Histogram:
    """Counts of the finite `values` between `edges`."""
    finite = values[np.isfinite(values)]
    counts, _ = np.histogram(finite, edges)
    above = int((finite > edges[-1]).sum())
    highest = float(finite.max()) if len(finite) else float("nan")
    return Histogram(edges, counts.astype(np.int64), above, highest)


def thin(items: Sequence[T], limit: int) -> list[T]:
    """At most `limit` of `items`, evenly spread, first and last included."""
    if len(items) <= limit:
        return list(items)
    return [items[int(index)] for index in np.linspace(0, len(items) - 1, limit).round()]
