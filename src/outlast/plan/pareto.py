"""Search of all candidates: the exact Pareto front as objects, JSON and CSV, within a budget."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any, TypeAlias

import numpy as np

from outlast.errors import NothingAllowedError, PlanError
from outlast.hardware import Unavailable
from outlast.plan.nondominated import Integers, Mask, Scale, knee, nondominated, thinned
from outlast.plan.objectives import (
    AXES,
    COVERAGE,
    FIGURES,
    Objectives,
    joined,
    limits,
    minimised,
)
from outlast.plan.space import Block, Candidate, Space


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
    def candidates(self) -> tuple[Candidate, ...]:
        """Of all points."""
        return tuple(self.candidate(point) for point in range(len(self)))

    @property
    def knee(self) -> int:
        """The point where giving up more of one figure begins to buy little of the others.

        See `outlast.plan.nondominated.knee`: time, energy and lost time count by ratio,
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
