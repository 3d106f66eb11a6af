"""What a search finds: the front, its candidates and figures, as objects, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from outlast.errors import PlanError
from outlast.hardware import Unavailable
from outlast.plan.pareto.front import Integers, Mask, knee, nondominated, thinned
from outlast.plan.pareto.objectives import FIGURES, Objectives, joined, minimised
from outlast.plan.pareto.space import Candidate, Space


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
