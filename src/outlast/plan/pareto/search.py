"""Search of all candidates: the front as objects, JSON and CSV, and the best in a budget."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any, Literal, TypeAlias

import numpy as np

from outlast.errors import NothingAllowedError, PlanError
from outlast.hardware import Unavailable
from outlast.plan.pareto.budget import limits as limits_of
from outlast.plan.pareto.front import Integers, Mask, knee, nondominated, thinned, undecided
from outlast.plan.pareto.objectives import (
    AXES,
    FIGURES,
    Objectives,
    ends,
    joined,
    minimised,
    uncertain,
)
from outlast.plan.pareto.space import Block, Candidate, Space


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """Candidates that no other one dominates.

    Attributes:
        spaces: Where they come from.
        origin: (points,) index into `spaces`.
        rows: (points,) their rows there.
        objectives: (points,) their figures.
        axes: The figures that were weighed against each other.
        left_out: Axes that were asked for, and why they are not known.
        limits: What every point keeps to, by figure.
        searched: Candidates that were looked at.
        allowed: Those of them that fit, outside the memory cliff.
        within: Those of them that also keep to the limits.
    """

    spaces: tuple[Space, ...]
    origin: Integers
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
        """Of the prices; empty where clusters differ."""
        found = {space.cluster.prices.currency for space in self.spaces}
        return found.pop() if len(found) == 1 else ""

    def unit(self, name: str) -> str:
        """Of a figure."""
        return self.currency if name == "money" else FIGURES[name].unit

    def candidate(self, point: int) -> Candidate:
        """Configuration and settings of a point."""
        return self.spaces[int(self.origin[point])].candidate(int(self.rows[point]))

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Of all points."""
        return tuple(self.candidate(point) for point in range(len(self)))

    @property
    def knee(self) -> int:
        """The point where giving up more of one figure begins to buy little of the others.

        See `outlast.plan.pareto.front.knee`: time, energy and lost time count by ratio,
        probability and loss by difference.
        """
        return knee(minimised(self.objectives, self.axes), self._scales)

    @property
    def _scales(self) -> list[Any]:
        return [FIGURES[name].scale for name in self.axes]

    def taken(self, points: Mask | np.ndarray) -> Front:
        """Some of the points."""
        return replace(
            self,
            origin=self.origin[points],
            rows=self.rows[points],
            objectives=self.objectives.taken(points),
        )

    def thinned(self, epsilon: float = 0.02, keep: Sequence[int] = ()) -> Front:
        """Fewer points, near each of which that is left out one stays; see `front.thinned`.

        The knee stays, and so do the points to `keep`.
        """
        values = minimised(self.objectives, self.axes)
        stays = thinned(values, self._scales, epsilon)
        stays[[self.knee, *keep]] = True
        return self.taken(stays)

    def ordered(self, by: str = "hours") -> Front:
        """The points by one figure, the best first."""
        return self.taken(np.argsort(minimised(self.objectives, [by])[:, 0], kind="stable"))

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
            "coverage": self.objectives.coverage,
            "kind": "predicted",
            "searched": self.searched,
            "allowed": self.allowed,
            "within": self.within,
            "knee": self.knee if len(self) else None,
            "points": [self.record(point) for point in range(len(self))],
        }
        try:
            return json.dumps(content, allow_nan=False, indent=indent)
        except ValueError as error:
            raise PlanError(
                "a figure of the front is not finite: leave out what the model cannot say"
            ) from error

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
            line |= record["configuration"]
            chosen = self.candidate(point).settings
            words = {"tiers": "+".join(chosen.tiers), "recovery": str(chosen.recovery)}
            line |= record["settings"] | words
            if writer is None:
                writer = csv.DictWriter(out, list(line), lineterminator="\n")
                writer.writeheader()
            writer.writerow(line)
        return out.getvalue()


def union(fronts: Sequence[Front]) -> Front:
    """The front of several spaces together, e.g. of several types of device, exactly.

    A point leaves only if one of another front dominates it. Axes that one front lacks are left
    out, and so is money where currencies differ.

    Raises:
        PlanError: There is no front, they share no axis, or they were searched within different
            limits.
    """
    if not fronts:
        raise PlanError("there is no front to unite: give at least one")
    if any(dict(front.limits) != dict(fronts[0].limits) for front in fronts):
        raise PlanError("fronts within different limits cannot be united: search all within one")
    left_out = {name: why for front in fronts for name, why in front.left_out.items()}
    spaces = tuple(space for front in fronts for space in front.spaces)
    objectives = joined([front.objectives for front in fronts])
    currencies = {space.cluster.prices.currency for space in spaces}
    if len(currencies) > 1 and not isinstance(objectives.money, Unavailable):
        reason = f"prices are in {' and '.join(sorted(currencies))}"
        objectives = replace(objectives, money=Unavailable(reason, "give them in one currency"))
    wanted = dict.fromkeys(name for front in fronts for name in front.axes)
    axes = objectives.available([name for name in wanted if name not in left_out])
    if not axes:
        raise PlanError("the fronts have no axis in common: give all of them one figure")
    for name in wanted:
        found = objectives.column(name)
        if isinstance(found, Unavailable):
            left_out[name] = found
    starts = np.cumsum([0] + [len(front.spaces) for front in fronts[:-1]])
    both = Front(
        spaces=spaces,
        origin=np.concatenate(
            [front.origin + start for front, start in zip(fronts, starts, strict=True)]
        ),
        rows=np.concatenate([front.rows for front in fronts]),
        objectives=objectives,
        axes=axes,
        left_out=left_out,
        limits=fronts[0].limits,
        searched=sum(front.searched for front in fronts),
        allowed=sum(front.allowed for front in fronts),
        within=sum(front.within for front in fronts),
    )
    return both.taken(nondominated(minimised(objectives, axes)))


def rounded(value: float, digits: int = 4) -> str:
    """A number for people."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    magnitude = math.floor(math.log10(abs(value)))
    if not -4 <= magnitude <= 12:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(digits - 1 - magnitude, 0)}f}"


Wanted: TypeAlias = Mapping[str, float | str] | Iterable[str] | str


@dataclass(frozen=True, slots=True)
class Choice:
    """A point of a front.

    Attributes:
        point: Its index there.
        candidate: What it is.
    """

    point: int
    candidate: Candidate


def best(
    front: Front,
    *,
    minimise: str = "hours",
    within: Wanted = (),
    start: datetime | None = None,
    surely: bool = False,
) -> Choice:
    """The best point within limits.

    Exact for limits of the front's own axes, and for what rises with one of them; for others
    (free memory, device hours, money where devices are rented) a candidate behind the front may
    do better: give such limits to `search`.

    Args:
        front: What to choose from.
        minimise: A figure; of equal points the better in the front's axes, then the first. Free
            memory is maximised.
        within: Texts ("40 h", "3 MWh"), or by figure a number or a text: the most of each figure;
            of free memory the least.
        start: When the run starts, for deadlines.
        surely: The limits hold at the unfavourable end of the intervals, not only at the middle.

    Raises:
        NothingAllowedError: Nothing keeps to the limits: the text says what the least is.
        PlanError: A figure is unknown.
    """
    bounds = limits_of(within, start=start, currency=front.currency)
    inside = kept(front.objectives, bounds, surely=surely)
    if not inside.any():
        raise NothingAllowedError(
            why_none(front.objectives, bounds, surely=surely, currency=front.currency)
        )
    names = [minimise, *(name for name in front.axes if name != minimise)]
    keys = [_signed(front.objectives, name, "middle")[inside] for name in names]
    point = int(np.flatnonzero(inside)[np.lexsort(keys[::-1])[0]])
    return Choice(point, front.candidate(point))


def kept(objectives: Objectives, bounds: Mapping[str, float], *, surely: bool = False) -> Mask:
    """(candidates,) which may be recommended and keep to all limits.

    Raises:
        PlanError: A limited figure is unavailable.
    """
    inside = objectives.allowed.copy()
    for name, bound in bounds.items():
        inside &= _within(objectives, name, bound, surely)
    return inside


def _within(objectives: Objectives, name: str, bound: float, surely: bool) -> Mask:
    signed = _signed(objectives, name, "worst" if surely else "middle")
    return np.asarray(signed <= (-bound if FIGURES[name].more else bound))


def _signed(objectives: Objectives, name: str, end: Literal["middle", "worst"]) -> np.ndarray:
    """(candidates,) less of which is better."""
    low, middle, high = ends(objectives, name)
    if FIGURES[name].more:
        return -middle if end == "middle" else -low
    return middle if end == "middle" else high


def why_none(
    objectives: Objectives, bounds: Mapping[str, float], *, surely: bool = False, currency: str = ""
) -> str:
    """A sentence on why no candidate keeps to the limits: what the least is.

    Args:
        objectives: Of all candidates.
        bounds: By figure.
        surely: As `best` was asked.
        currency: Of money.
    """
    allowed = objectives.allowed
    if not allowed.any():
        return _too_large(objectives)
    end: Literal["middle", "worst"] = "worst" if surely else "middle"
    at_end = " at the unfavourable end of the interval" if surely else ""
    alone = {}
    for name, bound in bounds.items():
        values = _signed(objectives, name, end)
        alone[name] = float(values[allowed].min())
        if not (allowed & _within(objectives, name, bound, surely)).any():
            figure = FIGURES[name]
            return (
                f"nothing keeps to {_said(name, bound, currency)}: the "
                f"{'most' if figure.more else 'least'} is "
                f"{_amount(name, abs(alone[name]) if figure.more else alone[name], currency)}"
                f"{at_end}"
            )
    parts = []
    for name in bounds:
        others = {other: bound for other, bound in bounds.items() if other != name}
        rest = kept(objectives, others, surely=surely)
        if rest.any():
            least = float(_signed(objectives, name, end)[rest].min())
            more = FIGURES[name].more
            parts.append(
                f"{'the most' if more else 'the least'} {FIGURES[name].words} with the others kept "
                f"is {_amount(name, -least if more else least, currency)}"
            )
    said = " and ".join(_said(name, bound, currency) for name, bound in bounds.items())
    return (
        f"each limit can be kept alone{at_end}, but not {said} together: "
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


def limited(objectives: Objectives, bounds: Mapping[str, float], currency: str = "") -> Mask:
    """(candidates,) within all limits.

    Raises:
        NothingAllowedError: None is; the text says what the least is.
        PlanError: A limited figure is unavailable.
    """
    for name in bounds:
        column = objectives.column(name)
        if isinstance(column, Unavailable):
            raise PlanError(
                f"a limit of {FIGURES[name].words} cannot be kept, since it is not known: "
                f"{column.reason}"
            )
    inside = kept(objectives, bounds)
    if not inside.any():
        raise NothingAllowedError(why_none(objectives, bounds, currency=currency))
    return inside


Evaluate: TypeAlias = Callable[[Block], Objectives]
BLOCK = 16_384
"""Candidates that are judged at once: their intermediate arrays stay within megabytes."""


def search(
    space: Space,
    evaluate: Evaluate,
    budget: Wanted = (),
    *,
    start: datetime | None = None,
    axes: Sequence[str] = AXES,
    certainty: float | None = None,
    block: int = BLOCK,
) -> Front:
    """The exact Pareto front of a space, within a budget.

    Candidates that do not fit, are in the memory cliff or exceed the budget are left out before
    the front is drawn, so that it is exact for every kind of limit.

    Args:
        space: The candidates.
        evaluate: Judges a block; figures of one row never depend on other rows.
        budget: Limits as for `best`.
        start: When the run starts, for deadlines.
        axes: The figures to weigh against each other; those that `evaluate` does not know are left
            out and named in the result.
        certainty: None for the front of the middles; else points stay as well that no point of that
            front dominates with this probability (above 0.5).
        block: Candidates per call of `evaluate`.

    Raises:
        PlanError: Nothing is allowed within the budget: the text says what the least is; no axis
            is known; `evaluate` returns the wrong number of rows, or figures that are not finite.
    """
    currency = space.cluster.prices.currency
    bounds = limits_of(budget, start=start, currency=currency)
    parts, rows, begin, lowest = [], [], 0, []
    for some in space.blocks(block):
        judged = _judged(some, evaluate)
        allowed = np.flatnonzero(judged.allowed)
        if not len(allowed):
            # The candidate that comes nearest to fitting, to say how far off it is.
            runs = np.broadcast_to(judged.fits, (len(judged),))
            needed = np.broadcast_to(judged.memory_bytes, (len(judged),))
            # A candidate in the cliff is nearer than any that does not run.
            lowest.append(judged.taken(np.array([np.lexsort([needed, ~runs])[0]])))
        parts.append(judged.taken(allowed))
        rows.append(allowed + begin)
        begin += len(some)
    found = joined(parts)
    if not len(found):
        found = joined(lowest)
    inside = limited(found, bounds, currency)
    known = found.available(axes)
    if not known:
        raise PlanError(f"none of {', '.join(axes)} is known: give at least one of them")
    within = found.taken(inside)
    values = minimised(within, known)
    stays = (
        nondominated(values)
        if certainty is None
        else undecided(uncertain(within, known), certainty)
    )
    reasons = {name: found.column(name) for name in axes if name not in known}
    return Front(
        spaces=(space,),
        origin=np.zeros(int(stays.sum()), dtype=np.int64),
        rows=np.concatenate(rows)[inside][stays],
        objectives=within.taken(stays),
        axes=known,
        left_out={name: why for name, why in reasons.items() if isinstance(why, Unavailable)},
        limits=bounds,
        searched=len(space),
        allowed=len(found),
        within=len(within),
    )


def _judged(block: Block, evaluate: Evaluate) -> Objectives:
    """Objectives from `evaluate`, with device hours, and one row for each candidate."""
    judged = evaluate(block)
    if len(judged) not in (1, len(block)):
        raise PlanError(
            f"{len(block):,} candidates were judged by {len(judged):,} rows: give one for each"
        )
    if isinstance(judged.device_hours, Unavailable):
        devices = np.broadcast_to(block.layouts.devices, (len(block.layouts),))[block.layout]
        half = dict(judged.half_widths)
        if "hours" in half:
            half["device_hours"] = half["hours"]
        judged = replace(judged, device_hours=judged.hours * devices, half_widths=half)
    if len(judged) != len(block):
        # Figures that all candidates share say nothing of where each of them lies.
        same = judged.taken(np.zeros(len(block), dtype=np.intp))
        judged = replace(same, flags=judged.flags)
    return judged
