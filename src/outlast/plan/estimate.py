"""Contents of a prediction: figures with intervals, and the terms that they are sums of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from outlast.errors import PlanError

NORMAL_90 = 1.6448536269514722
"""Standard deviations on either side of a normal mean that hold 90 %."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A predicted figure.

    Attributes:
        low: Lower end.
        middle: Best guess (the median).
        high: Upper end.
        coverage: Share of cases in which the truth should lie inside.
        extrapolated: Why the figure is beyond what was calibrated, a phrase each; empty where it
            is not.
    """

    low: float
    middle: float
    high: float
    coverage: float = 0.9
    extrapolated: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (self.low <= self.middle <= self.high and math.isfinite(self.middle)):
            raise PlanError(
                f"an interval from {self.low:g} over {self.middle:g} to {self.high:g} is none"
            )

    def scaled(self, factor: float) -> Interval:
        """The figure in another unit, or of something proportional to it; `factor >= 0`."""
        ends = self.low * factor, self.middle * factor, self.high * factor
        return Interval(*ends, self.coverage, self.extrapolated)


@dataclass(frozen=True, slots=True)
class Source:
    """Source of a constant.

    Attributes:
        value: The constant.
        unit: Its unit.
        origin: "datasheet", "measured", "published", "unverified", "given", "prior" or
            "calibrated".
        text: Words that let a reader find it.
    """

    value: float
    unit: str
    origin: str
    text: str


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of a total.

    Attributes:
        name: Short, in the field's words, e.g. "matrix products".
        value: In the unit of the total.
        formula: As a reader would write it down.
        inputs: The values that went into the formula, by their names in it.
        constants: The constants of the formula, by their names in it.
        source: Paper and equation, or "own".
    """

    name: str
    value: float
    formula: str
    inputs: Mapping[str, float] = field(default_factory=dict)
    constants: Mapping[str, Source] = field(default_factory=dict)
    source: str = "own"


@dataclass(frozen=True, slots=True)
class Total:
    """A figure and the terms that it is the sum of.

    Attributes:
        unit: "s", "B", "J", ...
        figure: The sum, with its interval.
        terms: They add up to `figure.middle` to 1e-9 of it, as far as floats can tell where large
            terms cancel.
    """

    unit: str
    figure: Interval
    terms: tuple[Term, ...]

    def __post_init__(self) -> None:
        total = math.fsum(term.value for term in self.terms)
        rounding = 1e-14 * math.fsum(abs(term.value) for term in self.terms)
        most = max(1e-9 * abs(total), 1e-9 * abs(self.figure.middle), rounding)
        if abs(total - self.figure.middle) > most:
            raise PlanError(f"terms add up to {total:g} and not to {self.figure.middle:g}")
