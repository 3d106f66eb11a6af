"""Search of all candidates: the exact Pareto front as objects, JSON, CSV and HTML, in a budget.

All objectives are minimised. A point dominates another if it is nowhere worse and somewhere better.
Equal points do not dominate each other, so all of them stay: a tie is the reader's to break.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from importlib import resources
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outlast.errors import NothingAllowedError, PlanError
from outlast.extras import require
from outlast.hardware import Unavailable
from outlast.plan.batch import Array, Integers, Mask
from outlast.plan.configuration import layout_words, settings_words
from outlast.plan.objectives import (
    AXES,
    COVERAGE,
    FIGURES,
    Objectives,
    Scale,
    ends,
    joined,
    limits,
    minimised,
)
from outlast.plan.space import Block, Candidate, Space

PASS = 1 << 20
"""Points of one pass: three ranks and a side then fit in 63 bits."""
_STRONG = 32
"""Points that are compared with all others at first, which removes most of an easy space."""


def nondominated(values: Array) -> Mask:
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
    if len(points) > PASS:
        starts = range(0, len(points), PASS)
        parts = [at + _front_of_distinct(points[at : at + PASS]) for at in starts]
        kept = np.concatenate(parts)
        if len(kept) > PASS:
            raise PlanError(
                f"the front may hold {len(kept):,} of {len(values):,} points, more than {PASS:,}: "
                "search fewer options at once"
            )
    on_front = np.zeros(len(points), dtype=bool)
    on_front[kept[_front_of_distinct(points[kept])]] = True
    result = np.empty(len(values), dtype=bool)
    result[order] = on_front[np.cumsum(first) - 1]
    return result


def thinned(values: Array, scales: Sequence[Scale], epsilon: float = 0.02) -> Mask:
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


def _place(column: Array, scale: Scale, epsilon: float) -> Array:
    """Ranks of values, in boxes from the least on."""
    least = float(column.min())
    if scale == "log" and least > 0.0:
        return np.asarray(np.log(column / least) / np.log1p(epsilon))
    extent = float(column.max()) - least
    return (column - least) / (epsilon * extent) if extent else np.zeros(len(column))


def extremes(values: Array) -> NDArray[np.intp]:
    """(objectives,) the point with the least of each objective, of equals the better elsewhere."""
    values = checked(values)
    normal = _normal(values, ["linear"] * values.shape[1]).sum(axis=1)
    return np.array([np.lexsort([normal, column])[0] for column in values.T], dtype=np.intp)


_EQUAL = 1e-9
"""Heights over the plane that differ by less, as a share of the axes' own, are equal."""


def knee(values: Array, scales: Sequence[Scale]) -> int:
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
    weights: Array = np.ones(normal.shape[1])
    if np.linalg.cond(corners) < 1e6:
        found = np.linalg.solve(corners, weights)
        if (found > 0.0).all():
            weights = np.asarray(found, dtype=float)
    heights = normal @ weights
    # Points that differ by rounding alone are equal, in whatever units the figures are.
    return int(np.argmax(heights <= heights.min() + _EQUAL * np.abs(weights).sum()))


def _normal(values: Array, scales: Sequence[Scale]) -> Array:
    """Each axis from 0 at its least to 1 at its greatest value."""
    columns = []
    for column, scale in zip(values.T, scales, strict=True):
        place: Array = np.log(column) if scale == "log" and (column > 0.0).all() else column
        extent = float(np.ptp(place)) if len(place) else 0.0
        columns.append((place - place.min()) / extent if extent else np.zeros(len(place)))
    return np.column_stack(columns)


def checked(values: Array) -> Array:
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


def _front_of_distinct(points: Array) -> NDArray[np.intp]:
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


def _front_of_ranks(points: Array) -> Mask:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """Candidates that no other one dominates.

    Attributes:
        space: Where they come from.
        rows: (points,) their rows there.
        objectives: (points,) their figures.
        axes: The figures that were weighed against each other.
        left_out: Axes that were asked for, and why they are not known.
        limits: What every point keeps to, by figure.
        searched: Candidates that were looked at.
        allowed: Those of them that fit, outside the memory cliff.
        within: Those of them that also keep to the limits.
    """

    space: Space
    rows: Integers
    objectives: Objectives
    axes: tuple[str, ...]
    left_out: Mapping[str, Unavailable] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    searched: int = 0
    allowed: int = 0
    within: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def currency(self) -> str:
        """Of the prices."""
        return self.space.cluster.prices.currency

    def unit(self, name: str) -> str:
        """Of a figure."""
        return self.currency if name == "money" else FIGURES[name].unit

    def candidate(self, point: int) -> Candidate:
        """Configuration and settings of a point."""
        return self.space.candidate(int(self.rows[point]))

    @property
    def knee(self) -> int:
        """The point where giving up more of one figure begins to buy little of the others.

        See `outlast.plan.pareto.knee`: time, energy and lost time count by ratio,
        probability and loss by difference.
        """
        return knee(minimised(self.objectives, self.axes), self._scales)

    @property
    def _scales(self) -> list[Scale]:
        return [FIGURES[name].scale for name in self.axes]

    def taken(self, points: Mask | np.ndarray) -> Front:
        """Some of the points."""
        return replace(self, rows=self.rows[points], objectives=self.objectives.taken(points))

    def thinned(self, epsilon: float, keep: Sequence[int] = ()) -> Front:
        """Fewer points, near each of which that is left out one stays; see `nondominated.thinned`.

        The knee stays, and so do the points to `keep`.
        """
        values = minimised(self.objectives, self.axes)
        stays = thinned(values, self._scales, epsilon)
        stays[[self.knee, *keep]] = True
        return self.taken(stays)

    def ordered(self, by: str = "hours") -> Front:
        """The points by one figure, the best first."""
        return self.taken(np.argsort(minimised(self.objectives, [by])[:, 0], kind="stable"))

    def best(self, figure: str, among: Mask) -> int:
        """The best point in one figure; of equal points the better in the front's axes.

        Args:
            figure: Known to all points.
            among: (points,), true for at least one of them.
        """
        names = [figure, *(name for name in self.axes if name != figure)]
        values = minimised(self.objectives, names)[among]
        return int(np.flatnonzero(among)[np.lexsort(values.T[::-1])[0]])

    def record(self, point: int) -> dict[str, Any]:
        """A point as plain data: what JSON holds.

        `extrapolated` has a phrase for each reason why the figures are beyond what was calibrated;
        it is empty within, and null where the evaluation does not say.
        """
        candidate = self.candidate(point)
        phrases = self.objectives.extrapolated(point)
        figures: dict[str, Any] = {}
        for name in FIGURES:
            figure = self.objectives.interval(name, point)
            if isinstance(figure, Unavailable):
                figures[name] = {"unavailable": figure.reason}
            else:
                ends = {"low": figure.low, "middle": figure.middle, "high": figure.high}
                figures[name] = {**ends, "unit": self.unit(name)}
        return {
            "cluster": candidate.cluster,
            "configuration": asdict(candidate.configuration),
            "settings": asdict(candidate.settings),
            "figures": figures,
            "extrapolated": None if phrases is None else list(phrases),
        }

    def to_json(self, indent: int | None = None) -> str:
        """The front as JSON (no NaN, no infinity).

        Raises:
            PlanError: A figure is not finite.
        """
        content = {
            "axes": list(self.axes),
            "left_out": {name: why.reason for name, why in self.left_out.items()},
            "limits": dict(self.limits),
            "coverage": COVERAGE,
            "kind": "predicted",
            "searched": self.searched,
            "allowed": self.allowed,
            "within": self.within,
            "knee": self.knee if len(self) else None,
            "points": [self.record(point) for point in range(len(self))],
        }
        return finite_json(content, indent=indent)

    def to_csv(self) -> str:
        """One line per point: figures (with ends), configuration, settings; unknown is empty.

        `extrapolated` has the reasons, with semicolons between them, or "no".
        """
        out = io.StringIO()
        writer: csv.DictWriter[str] | None = None
        for point in range(len(self)):
            record = self.record(point)
            line: dict[str, Any] = {"cluster": record["cluster"]}
            for name, figure in record["figures"].items():
                for end in ("low", "middle", "high"):
                    suffix = "" if end == "middle" else f"_{end}"
                    line[f"{name}{suffix}"] = figure.get(end, "")
            phrases = record["extrapolated"]
            line["extrapolated"] = "" if phrases is None else "; ".join(phrases) or "no"
            chosen = self.candidate(point).settings
            words = {"tiers": "+".join(chosen.tiers), "recovery": str(chosen.recovery)}
            line |= record["configuration"] | record["settings"] | words
            if writer is None:
                writer = csv.DictWriter(out, list(line), lineterminator="\n")
                writer.writeheader()
            writer.writerow(line)
        return out.getvalue()


def finite_json(value: object, **options: Any) -> str:
    """`value` as JSON.

    Args:
        value: Plain data.
        options: Of `json.dumps`.

    Raises:
        PlanError: A number is not finite.
    """
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError as error:
        raise PlanError(
            "a figure of the front is not finite: leave out what the model cannot say"
        ) from error


def rounded(value: float, digits: int = 4) -> str:
    """A number for people."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    magnitude = math.floor(math.log10(abs(value)))
    if not -4 <= magnitude <= 12:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(digits - 1 - magnitude, 0)}f}"


def kept(objectives: Objectives, bounds: Mapping[str, float]) -> Mask:
    """(candidates,) which may be recommended and keep to all limits.

    Raises:
        PlanError: A limited figure is unavailable.
    """
    inside = objectives.allowed.copy()
    for name, bound in bounds.items():
        values = objectives.known(name)
        inside &= values >= bound if FIGURES[name].more else values <= bound
    return inside


def why_none(objectives: Objectives, bounds: Mapping[str, float], currency: str = "") -> str:
    """A sentence on why no candidate keeps to the limits: what the least is.

    Args:
        objectives: Of all candidates.
        bounds: By figure.
        currency: Of money.
    """
    if not objectives.allowed.any():
        return _too_large(objectives)

    def least(name: str, among: Mask) -> str:
        values = objectives.known(name)[among]
        best = values.max() if FIGURES[name].more else values.min()
        return _amount(name, float(best), currency)

    for name, bound in bounds.items():
        if not kept(objectives, {name: bound}).any():
            extreme = "most" if FIGURES[name].more else "least"
            return (
                f"nothing keeps to {_said(name, bound, currency)}: the {extreme} is "
                f"{least(name, objectives.allowed)}"
            )
    parts = []
    for name in bounds:
        rest = kept(objectives, {other: bounds[other] for other in bounds if other != name})
        if rest.any():
            parts.append(
                f"{'the most' if FIGURES[name].more else 'the least'} {FIGURES[name].words} with "
                f"the others kept is {least(name, rest)}"
            )
    said = " and ".join(_said(name, bound, currency) for name, bound in bounds.items())
    return (
        f"each limit can be kept alone, but not {said} together: "
        f"{'; '.join(parts) or 'leave one out'}"
    )


def _too_large(objectives: Objectives) -> str:
    if not len(objectives):
        return "there is no candidate: give more choices to search"
    needed = np.broadcast_to(objectives.memory_bytes, (len(objectives),))
    least = int(np.argmin(np.where(np.isfinite(needed), needed, np.inf)))
    capacity = float(np.broadcast_to(objectives.capacity_bytes, needed.shape)[least])
    where = "in the memory cliff" if objectives.fits.any() else "out of memory"
    return (
        f"nothing fits: the least memory is {needed[least] / 2**30:,.1f} GiB of "
        f"{capacity / 2**30:,.1f} GiB per device, {where}; take more devices, or recompute, shard "
        "or divide more"
    )


def _said(name: str, bound: float, currency: str) -> str:
    most = "at least" if FIGURES[name].more else "at most"
    return f"{FIGURES[name].words} of {most} {_amount(name, bound, currency)}"


def _amount(name: str, value: float, currency: str) -> str:
    if name == "headroom_bytes":
        return f"{value / 2**30:,.2f} GiB"
    if name == "miss_probability":
        return f"{100 * value:.3g} %"
    unit = currency if name == "money" else FIGURES[name].unit
    return f"{rounded(value)} {unit}".strip()


Evaluate: TypeAlias = Callable[[Block], Objectives]
BLOCK = 16_384
"""Candidates that are judged at once: their intermediate arrays stay within megabytes."""


def search(
    space: Space,
    evaluate: Evaluate,
    budget: Iterable[str] | str = (),
    *,
    start: datetime | None = None,
) -> Front:
    """The exact Pareto front of a space, within a budget.

    Candidates that do not fit, are in the memory cliff or exceed the budget are left out before
    the front is drawn, so that it is exact for every kind of limit. Axes that `evaluate` does not
    know are left out and named in the result.

    Args:
        space: The candidates.
        evaluate: Judges a block, a row for each candidate; no row depends on others.
        budget: Limits such as "40 h", "3 MWh"; see `objectives.parse`.
        start: When the run starts, for deadlines.

    Raises:
        NothingAllowedError: Nothing is allowed within the budget: the text says what the least is.
        PlanError: A limited figure is not known, or figures are not finite.
    """
    currency = space.cluster.prices.currency
    bounds = limits(budget, start=start, currency=currency)
    parts, rows, begin, lowest = [], [], 0, []
    for block in space.blocks(BLOCK):
        judged = evaluate(block)
        allowed = np.flatnonzero(judged.allowed)
        if not len(allowed):
            # The candidate that comes nearest to fitting, to say how far off it is: one in the
            # cliff is nearer than any that does not run.
            nearest = np.lexsort([judged.memory_bytes, ~judged.fits])[0]
            lowest.append(judged.taken(np.array([nearest])))
        parts.append(judged.taken(allowed))
        rows.append(allowed + begin)
        begin += len(block)
    found = joined(parts)
    if not len(found):
        found = joined(lowest)
    for name in bounds:
        column = found.column(name)
        if isinstance(column, Unavailable):
            raise PlanError(
                f"a limit of {FIGURES[name].words} cannot be kept, since it is not known: "
                f"{column.reason}"
            )
    inside = kept(found, bounds)
    if not inside.any():
        raise NothingAllowedError(why_none(found, bounds, currency))
    known = found.available(AXES)
    within = found.taken(inside)
    stays = nondominated(minimised(within, known))
    reasons = {name: found.column(name) for name in AXES}
    return Front(
        space=space,
        rows=np.concatenate(rows)[inside][stays],
        objectives=within.taken(stays),
        axes=known,
        left_out={name: why for name, why in reasons.items() if isinstance(why, Unavailable)},
        limits=bounds,
        searched=len(space),
        allowed=len(found),
        within=len(within),
    )


SHOWN = 500
"""Most points of a page: a picture with more tells no more."""

_LADDERS: dict[str, tuple[tuple[float, str, float], ...]] = {
    "hours": ((96.0, "days", 1 / 24), (0.5, "h", 1.0), (0.0, "min", 60.0)),
    "lost_hours": ((96.0, "days", 1 / 24), (0.5, "h", 1.0), (0.0, "min", 60.0)),
    "kwh": ((2e6, "GWh", 1e-6), (2e3, "MWh", 1e-3), (0.0, "kWh", 1.0)),
    "device_hours": ((2e6, "million GPU h", 1e-6), (2e4, "kGPU h", 1e-3), (0.0, "GPU h", 1.0)),
    "money": ((2e6, "M", 1e-6), (2e4, "k", 1e-3), (0.0, "", 1.0)),
    "grams_co2": ((2e6, "tCO2", 1e-6), (2e3, "kgCO2", 1e-3), (0.0, "gCO2", 1.0)),
    "headroom_bytes": ((-np.inf, "GiB", 2.0**-30),),
    "miss_probability": ((-np.inf, "%", 100.0),),
}
"""By figure: least median, unit in which it reads well, and factor to it, the largest first."""


def page(
    front: Front,
    *,
    title: str = "Pareto front",
    within: Iterable[str] | str = (),
    minimise: str = "hours",
    start: datetime | None = None,
) -> str:
    """The front as one interactive HTML page that loads nothing from anywhere.

    Time against energy, coloured by reliability, larger where the loss is less; with the knee, the
    best choice within limits that the reader can move, all figures' intervals, and a table.

    Args:
        front: At least one point; where there are more than `SHOWN`, a thinned front is drawn, and
            the page says so.
        title: For people.
        within: First limits, such as "40 h".
        minimise: What the choice minimises at first.
        start: When the run starts, for deadlines.

    Raises:
        PlanError: The front is empty, or what `objectives.limits` raises.
    """
    require("plan", "the page of a front", "jinja2")
    require("report", "the page of a front", "plotly")
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    if not len(front):
        raise PlanError("an empty front makes no page: search with a looser budget")
    if minimise not in FIGURES:
        raise PlanError(f"minimise = {minimise!r} is none of {', '.join(FIGURES)}")
    bounds = limits(within, start=start, currency=front.currency)
    front = front.ordered()
    objectives = front.objectives
    known = {name: bounds[name] for name in objectives.available(bounds)}
    inside = kept(objectives, known)
    chosen = []
    if inside.any() and minimise in objectives.available([minimise]):
        chosen = [front.best(minimise, inside)]
    shown, epsilon = front, 0.0
    while len(shown) > SHOWN and epsilon < 1.0:
        epsilon = 2.0 * epsilon or 0.0025
        shown = front.thinned(epsilon, chosen)
    names = shown.objectives.available(FIGURES)
    figures = [_figure(shown, name) for name in names]
    columns = [ends(shown.objectives, name) for name in names]
    points = [_point(shown, point, columns) for point in range(len(shown))]
    content = {
        "figures": figures,
        "axes": list(shown.axes),
        "points": points,
        "knee": shown.knee,
        "limits": known,
        "minimise": minimise if minimise in names else names[0],
        "coverage": round(100 * COVERAGE),
    }
    environment = Environment(
        loader=PackageLoader("outlast.plan", "assets"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=True,
    )
    folder = resources.files("outlast.plan") / "assets"
    # No content can break out of a script element.
    embedded = finite_json(content, separators=(",", ":")).replace("<", "\\u003c")
    return environment.get_template("pareto.html.j2").render(
        title=title,
        facts=_facts(front, len(shown), epsilon),
        refused=[*_refused(shown, bounds), *_beyond(points)],
        content=content,
        rows=[_row(point, figures) for point in points],
        embedded=Markup(embedded),
        plotly=Markup(get_plotlyjs()),
        asset=lambda name: Markup((folder / name).read_text(encoding="utf-8")),
    )


def _figure(front: Front, name: str) -> dict[str, Any]:
    """A figure of the page, in the unit in which its median reads well."""
    figure, values = FIGURES[name], np.asarray(front.objectives.known(name))
    unit, factor, middle = front.unit(name), 1.0, float(np.median(values))
    for least, word, share in reversed(_LADDERS.get(name, ())):
        if middle >= least:
            unit, factor = f"{word}{front.currency}" if name == "money" else word, share
    return {
        "name": name,
        "words": figure.words,
        "unit": unit,
        "factor": factor,
        "log": figure.scale == "log" and bool((values > 0).all()),
        "more": figure.more,
    }


def _point(
    front: Front, point: int, columns: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]
) -> dict[str, Any]:
    candidate = front.candidate(point)
    run, settings = candidate.configuration, candidate.settings
    return {
        "figures": [[float(end[point]) for end in ends_of] for ends_of in columns],
        "cluster": candidate.cluster,
        "precision": run.precision,
        "layout": layout_words(run),
        "mechanisms": settings_words(settings),
        "configuration": asdict(run),
        # How a run continues without a checkpoint is shown as its user gives it.
        "settings": {**asdict(settings), "recovery": str(settings.recovery)},
        "extrapolated": list(front.objectives.extrapolated(point) or ()),
    }


def _row(point: Mapping[str, Any], figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A row of the table: of each figure its middle, and its ends where they differ."""
    cells = []
    for values, figure in zip(point["figures"], figures, strict=True):
        digits = 3 if FIGURES[figure["name"]].scale == "log" else 2
        low, middle, high = (value * figure["factor"] for value in values)
        between = "" if low == high else f"{rounded(low, digits)} to {rounded(high, digits)}"
        cells.append((rounded(middle, digits + 1), between))
    return {**point, "figures": cells, "extrapolated": "; ".join(point["extrapolated"])}


def _facts(front: Front, shown: int, epsilon: float) -> str:
    axes = " \N{MULTIPLICATION SIGN} ".join(FIGURES[name].words for name in front.axes)
    parts = [
        f"{front.searched:,} candidates searched",
        f"{front.allowed:,} fit in memory with headroom",
    ]
    if front.limits:
        parts.append(f"{front.within:,} of them keep to the budget")
    framework = front.space.framework
    parts.append("no framework named" if framework == "any" else f"layouts of {framework}")
    parts.append(f"{len(front):,} on the exact front over {axes}")
    words = "; ".join(parts) + "."
    if shown < len(front):
        words += (
            f" Shown are {shown:,}: each point that is left out is at most {100 * epsilon:.3g} % "
            "better, on any axis, than one that is shown."
        )
    words += f" All figures are predicted; intervals cover {100 * COVERAGE:.0f} %."
    for name, why in front.left_out.items():
        words += f" No {FIGURES[name].words}: {why.reason}."
    return words


def _refused(front: Front, bounds: Mapping[str, float]) -> list[str]:
    """Sentences on limits of what is not known, and on those that nothing keeps to."""
    lacking = [
        f"{FIGURES[name].words} is not known ({column.reason}), so that its limit is not applied"
        for name in bounds
        if isinstance(column := front.objectives.column(name), Unavailable)
    ]
    known = {name: bounds[name] for name in front.objectives.available(bounds)}
    if not kept(front.objectives, known).any():
        lacking.append(why_none(front.objectives, known, front.currency))
    return lacking


def _beyond(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Number of extrapolated points, and the reason, where all have the same."""
    phrases = [point["extrapolated"] for point in points]
    count = sum(map(bool, phrases))
    if not count:
        return []
    which = "All points" if count == len(points) else f"{count:,} of {len(points):,} points"
    shared = [phrase for phrase in phrases[0] if all(phrase in other for other in phrases)]
    reasons = f": {'; '.join(shared)}" if shared else "; each of them says why"
    untested = "How often intervals hold beyond what was calibrated is not tested"
    return [f"{which} are extrapolated{reasons}. {untested}"]
