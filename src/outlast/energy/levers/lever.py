"""Levers on energy, compared by joules per unit of progress.

A step that takes half the energy and makes half the progress saves nothing. So every lever says
what it does to time, energy and progress of a step, and levers are ranked by energy over progress.
Two levers whose intervals overlap are not told apart, and the table says so.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Sequence

LeverKind: TypeAlias = Literal[
    "measured", "modelled", "replayed", "simulated", "published", "unverified"
]
AS_IT_IS = "as it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """What a change of settings does to a step, relative to the baseline.

    Attributes:
        name: The setting, in words.
        seconds_factor: Time of a step.
        joules_factor: Energy of a step.
        progress_factor: Progress of a step, as tokens of equal effect on the loss.
        interval: 95 % interval of joules per progress, relative to the estimate: (0.97, 1.04).
        kind: How the factors were found.
        source: Where they come from, in words.
    """

    name: str
    seconds_factor: float
    joules_factor: float
    progress_factor: float = 1.0
    interval: tuple[float, float] = (1.0, 1.0)
    kind: LeverKind = "modelled"
    source: str = "device model"

    def __post_init__(self) -> None:
        for field in ("seconds_factor", "joules_factor", "progress_factor"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0.0):
                raise EnergyError(f"{field} = {value} of lever {self.name} is not above 0")
        low, high = self.interval
        if not 0.0 < low <= 1.0 <= high < math.inf:
            raise EnergyError(
                f"interval = {self.interval} of lever {self.name} does not contain 1: "
                "give it relative to the estimate"
            )
        if self.kind not in get_args(LeverKind):
            kinds = ", ".join(get_args(LeverKind))
            raise EnergyError(f"kind = {self.kind} of lever {self.name} is none of {kinds}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A step as it is.

    Attributes:
        seconds: Its time.
        joules: Its energy.
        progress: Its progress, in `unit`.
        unit: What progress is counted in.
        interval: 95 % interval of joules, relative to the estimate.
    """

    seconds: float
    joules: float
    progress: float
    unit: str = "token"
    interval: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        for field in ("seconds", "joules", "progress"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0.0):
                raise EnergyError(f"{field} = {value} of the baseline is not above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A lever in the table.

    Attributes:
        lever: The lever.
        seconds_per_progress: Time per unit of progress.
        joules_per_progress: Energy per unit of progress.
        low_joules: Lower end of its 95 % interval.
        high_joules: Upper end.
        saving: Share of the baseline's joules per progress that is saved; negative for a cost.
        told_apart: Whether its interval and the baseline's do not overlap.
    """

    lever: Lever
    seconds_per_progress: float
    joules_per_progress: float
    low_joules: float
    high_joules: float
    saving: float
    told_apart: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """Levers by ascending joules per unit of progress.

    Attributes:
        rows: The baseline is one of them, named "as it is".
        unit: Of progress.
    """

    rows: tuple[Row, ...]
    unit: str

    @property
    def ties(self) -> tuple[tuple[str, str], ...]:
        """Neighbours in the table whose intervals overlap."""
        pairs = itertools.pairwise(self.rows)
        return tuple(
            (first.lever.name, second.lever.name)
            for first, second in pairs
            if first.high_joules >= second.low_joules
        )

    @property
    def advice(self) -> str:
        """The cheapest way to save, in one sentence."""
        best = self.rows[0]
        if best.lever.name == AS_IT_IS:
            return "no lever saves energy per unit of progress"
        rivals = [
            row.lever.name
            for row in self.rows[1:]
            if row.low_joules <= best.high_joules and row.lever.name != AS_IT_IS
        ]
        sentence = (
            f"{best.lever.name} saves {best.saving:.1%} of the joules per {self.unit} "
            f"({best.lever.kind})"
        )
        if not best.told_apart:
            return sentence + "; not told apart from leaving it as it is"
        if rivals:
            sentence += f"; not told apart from {', '.join(rivals)}"
        return sentence

    def __str__(self) -> str:
        lines = [f"{'lever':<28} {'J/' + self.unit:>12} {'interval':>23} {'energy':>8} {'time':>8}"]
        base = next(row for row in self.rows if row.lever.name == AS_IT_IS)
        for row in self.rows:
            time = row.seconds_per_progress / base.seconds_per_progress - 1.0
            note = "" if row.told_apart or row is base else "  not told apart from as it is"
            lines.append(
                f"{row.lever.name:<28} {row.joules_per_progress:>12.4g} "
                f"{row.low_joules:>11.4g}-{row.high_joules:<11.4g} {0.0 - row.saving:>+8.1%} "
                f"{time:>+8.1%}  {row.lever.kind}{note}"
            )
        return "\n".join(lines)


def compare(levers: Sequence[Lever], baseline: Baseline) -> Comparison:
    """Ranks levers by joules per unit of progress.

    The order of the arguments does not matter: equal levers are ordered by name.

    Args:
        levers: Alternatives, each applied alone.
        baseline: A step as it is; it becomes a row too.

    Raises:
        EnergyError: For two levers of one name, or one named like the baseline.
    """
    names = [lever.name for lever in levers]
    doubled = sorted({name for name in names if names.count(name) > 1 or name == AS_IT_IS})
    if doubled:
        raise EnergyError(f"lever {doubled[0]} occurs twice: give every lever a name of its own")
    itself = Lever(
        name=AS_IT_IS,
        seconds_factor=1.0,
        joules_factor=1.0,
        interval=baseline.interval,
        kind="measured",
        source="baseline",
    )
    per_progress = baseline.joules / baseline.progress
    rows = []
    for lever in (itself, *levers):
        joules = per_progress * lever.joules_factor / lever.progress_factor
        low, high = joules * lever.interval[0], joules * lever.interval[1]
        overlaps = low <= per_progress * baseline.interval[1] and (
            high >= per_progress * baseline.interval[0]
        )
        rows.append(
            Row(
                lever=lever,
                seconds_per_progress=baseline.seconds
                / baseline.progress
                * lever.seconds_factor
                / lever.progress_factor,
                joules_per_progress=joules,
                low_joules=low,
                high_joules=high,
                saving=1.0 - joules / per_progress,
                told_apart=not overlaps,
            )
        )
    rows.sort(key=lambda row: (row.joules_per_progress, row.lever.name))
    return Comparison(tuple(rows), baseline.unit)
