"""The exact Pareto front of many points, its thinning, and its knee; all objectives are minimised.

A point dominates another if it is nowhere worse and somewhere better. Equal points do not dominate
each other, so all of them stay: a tie is the reader's to break.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outlast.errors import PlanError

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]
Scale: TypeAlias = Literal["log", "linear"]
"""How differences along an axis count: by ratio, or by difference."""
BLOCK = 1 << 20
"""Points of one pass: three ranks and a side then fit in 63 bits."""
_STRONG = 32
"""Points that are compared with all others at first, which removes most of an easy space."""


def nondominated(values: Floats) -> Mask:
    """Indices of the points that no other point dominates, exactly.

    Divide and conquer over all objectives but two, which a sweep answers (Kung, Luccio and
    Preparata, J. ACM 22(4), 1975; Bentley, Comm. ACM 23(4), 1980), with all parts of one size
    treated in one pass: `O(n log^(d-1) n)` time, `O(n d)` memory.

    Args:
        values: (points, objectives), finite.

    Returns:
        (points,), true for the front; all of equal points share one answer.

    Raises:
        PlanError: A value is not finite, there is no objective, or the front is too large.
    """
    values = checked(values)
    order = np.lexsort(values.T[::-1])
    ordered = values[order]
    first = np.ones(len(ordered), dtype=bool)
    first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    points = ordered[first]
    kept = np.arange(len(points))
    if len(points) > BLOCK:
        starts = range(0, len(points), BLOCK)
        parts = [at + _front_of_distinct(points[at : at + BLOCK]) for at in starts]
        kept = np.concatenate(parts)
        if len(kept) > BLOCK:
            raise PlanError(
                f"the front may hold {len(kept):,} of {len(values):,} points, more than {BLOCK:,}: "
                "search fewer options at once"
            )
    on_front = np.zeros(len(points), dtype=bool)
    on_front[kept[_front_of_distinct(points[kept])]] = True
    result = np.empty(len(values), dtype=bool)
    result[order] = on_front[np.cumsum(first) - 1]
    return result


def thinned(values: Floats, scales: Sequence[Scale], epsilon: float = 0.02) -> Mask:
    """Fewer points, with one near each that is left out; the best along each axis stays.

    The epsilon-approximate front of Laumanns, Thiele, Deb and Zitzler (Evolutionary Computation
    10(3), 2002, section 4): boxes that grow by the factor `1 + epsilon` from the least value on,
    one point of each box that no other box dominates. Each point that is left out is no more than
    the factor `1 + epsilon` better, on any axis, than some point that stays. On a linear axis, and
    on a logarithmic one with values that are not above 0, the box is `epsilon` of the axis' range.

    Args:
        values: (points, objectives), of one front or of any points.
        scales: Of each objective.
        epsilon: Above 0.

    Returns:
        (points,), true for those that stay.

    Raises:
        PlanError: `epsilon` is not above 0, or the values are none.
    """
    if not epsilon > 0.0:
        raise PlanError(f"epsilon = {epsilon}: give more than 0, e.g. 0.02")
    values = checked(values)
    stays = np.zeros(len(values), dtype=bool)
    if not len(values):
        return stays
    place = np.column_stack(
        [_place(column, scale, epsilon) for column, scale in zip(values.T, scales, strict=True)]
    )
    box = np.floor(place)
    corner = np.linalg.norm(place - box, axis=1)
    order = np.lexsort([corner, *box.T[::-1]])
    first = np.ones(len(values), dtype=bool)
    first[1:] = (box[order][1:] != box[order][:-1]).any(axis=1)
    one_each = order[first]
    stays[one_each[nondominated(box[one_each])]] = True
    stays[extremes(values)] = True
    return stays


def _place(column: Floats, scale: Scale, epsilon: float) -> Floats:
    """Ranks of values, in boxes from the least on."""
    least = float(column.min())
    if scale == "log" and least > 0.0:
        return np.asarray(np.log(column / least) / np.log1p(epsilon))
    extent = float(column.max()) - least
    return (column - least) / (epsilon * extent) if extent else np.zeros(len(column))


def extremes(values: Floats) -> NDArray[np.intp]:
    """(objectives,) the point with the least of each objective, of equals the better elsewhere."""
    values = checked(values)
    normal = _normal(values, ["linear"] * values.shape[1]).sum(axis=1)
    return np.array([np.lexsort([normal, column])[0] for column in values.T], dtype=np.intp)


_EQUAL = 1e-9
"""Heights over the plane that differ by less, as a share of the axes' own, are equal."""


def knee(values: Floats, scales: Sequence[Scale]) -> int:
    """The point that lies furthest from the plane through the extremes, on the side of the ideal.

    Das, Structural Optimization 18, 1999; axes run from 0 at the least to 1 at the greatest value
    of the points given, by ratio on logarithmic and by difference on linear ones. Where the
    extremes span no plane (two of them are one point), the plane cuts all axes at the same height.

    Args:
        values: (points, objectives), of a front.
        scales: Of each objective; a logarithmic one with values that are not above 0 is taken as
            linear.

    Returns:
        Its index; of equals the first.

    Raises:
        PlanError: There is no point, or the values are none.
    """
    values = checked(values)
    if not len(values):
        raise PlanError("an empty front has no knee: give at least one point")
    normal = _normal(values, scales)
    normal = normal[:, np.ptp(normal, axis=0) > 0.0]
    if not normal.shape[1]:
        return 0
    corners = normal[extremes(normal)]
    weights: Floats = np.ones(normal.shape[1])
    if np.linalg.cond(corners) < 1e6:
        found = np.linalg.solve(corners, weights)
        if (found > 0.0).all():
            weights = np.asarray(found, dtype=float)
    heights = normal @ weights
    # Points that differ by rounding alone are equal, in whatever units the figures are.
    return int(np.argmax(heights <= heights.min() + _EQUAL * np.abs(weights).sum()))


def _normal(values: Floats, scales: Sequence[Scale]) -> Floats:
    """Each axis from 0 at its least to 1 at its greatest value."""
    columns = []
    for column, scale in zip(values.T, scales, strict=True):
        place: Floats = np.log(column) if scale == "log" and (column > 0.0).all() else column
        extent = float(np.ptp(place)) if len(place) else 0.0
        columns.append((place - place.min()) / extent if extent else np.zeros(len(place)))
    return np.column_stack(columns)


def checked(values: Floats) -> Floats:
    """`values` as (points, objectives) of finite floats.

    Raises:
        PlanError: They are not.
    """
    values = np.asarray(values, dtype=float)
    if values.ndim != 2 or not values.shape[1]:
        raise PlanError(
            f"objectives of shape {values.shape} span no front: give (points, objectives)"
        )
    if not np.isfinite(values).all():
        row, column = np.argwhere(~np.isfinite(values))[0]
        raise PlanError(
            f"objective {column} of point {row} is {values[row, column]}: leave out points without "
            "a finite value"
        )
    return values


def _front_of_distinct(points: Floats) -> NDArray[np.intp]:
    """Indices of the front of distinct points in lexicographic order: only earlier ones dominate.

    What a few strong points dominate goes first.
    """
    alive = np.arange(len(points))
    if len(points) >= 8 * _STRONG:
        total = np.zeros(len(points))
        for column in points.T:
            total[np.argsort(column, kind="stable")] += np.arange(len(points))
        for strong in np.argsort(total, kind="stable")[:_STRONG]:
            weak = (points[alive] >= points[strong]).all(axis=1) & (alive != strong)
            alive = alive[~weak]
    return alive[_front_of_ranks(points[alive])]


def _front_of_ranks(points: Floats) -> Mask:
    """Ranks in place of values: ties fall to the earlier point, so that no rank occurs twice."""
    count = len(points)
    ranks = []
    for column in points.T[1:]:
        rank = np.empty(count, dtype=np.int64)
        rank[np.argsort(column, kind="stable")] = np.arange(count)
        ranks.append(rank)
    if not ranks:
        return np.asarray(np.arange(count) == 0)
    by_last = np.zeros(count, dtype=bool)
    if len(ranks) == 1:
        return np.asarray(ranks[0] <= np.minimum.accumulate(ranks[0]))
    bits = max(1, (count - 1).bit_length())
    index = np.arange(count, dtype=np.int64)
    for level in range(bits):
        alive = index[~by_last[ranks[-1]]]
        low = (alive >> level) & 1 == 0
        _mark(alive >> (level + 1), [rank[alive] for rank in ranks], low, (by_last, bits))
    return ~by_last[ranks[-1]]


def _mark(group: Integers, ranks: list[Integers], low: Mask, found: tuple[Mask, int]) -> None:
    """Mark each upper point of a group that has a lower point before it in every rank.

    Args:
        group: (points,) the part that a point belongs to, below `2 ** bits`.
        ranks: At least two of (points,); no number occurs twice in one of them.
        low: (points,) true for those that may dominate, false for those that may be dominated.
        found: What is marked, by the last rank; and `bits`.
    """
    by_last, bits = found
    mask = (1 << bits) - 1
    if len(ranks) == 2:
        packed = (((group << bits | ranks[0]) << bits | ranks[1]) << 1) | ~low
        packed.sort()
        upper = (packed & 1).astype(bool)
        last = (packed >> 1) & mask
        # A later group's values lie below all earlier ones', so the minimum needs no restart.
        shifted = last - ((packed >> (2 * bits + 1)) << bits)
        least = np.minimum.accumulate(np.where(upper, np.iinfo(np.int64).max, shifted))
        by_last[last[upper & (least < shifted)]] = True
        return
    count = len(group)
    packed = (group << bits | ranks[0]) << bits | np.arange(count)
    packed.sort()
    order = packed & mask
    group, low, rest = group[order], low[order], [rank[order] for rank in ranks[1:]]
    begins = np.ones(count, dtype=bool)
    begins[1:] = group[1:] != group[:-1]
    start = np.maximum.accumulate(np.where(begins, np.arange(count), 0))
    within = np.arange(count) - start
    largest = int(within.max(initial=0))
    for level in range(largest.bit_length()):
        take = np.flatnonzero(((within >> level) & 1 == 0) == low)
        part = start[take] + (within[take] >> (level + 1) << (level + 1))
        _mark(part, [rank[take] for rank in rest], low[take], found)
