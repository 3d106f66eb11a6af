"""The ranges that were calibrated, and how far a run lies outside of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from outlast.errors import PlanError
from outlast.plan.cases import Array

_SLACK = 1.0 + 1e-9
KINDS: Mapping[str, tuple[str, ...]] = {
    "sharding": (
        "without sharding",
        "that shards the optimizer",
        "that shards gradients",
        "that shards parameters",
    ),
    "recompute": (
        "without recomputation",
        "that recomputes attention",
        "that recomputes whole blocks",
    ),
    "zero_bubble": ("of another schedule than zero_bubble", "of the zero_bubble schedule"),
    "gpipe": ("of another schedule than gpipe", "of the gpipe schedule"),
    "quantized": ("in another precision than fp8", "in fp8"),
    "half": ("in fp32", "in 16 bits"),
    "muon": ("with another optimizer than Muon", "with Muon"),
    "unfused": ("with fused attention", "with unfused attention"),
}
"""Features that tell kinds of runs, and in words a run of each kind."""


@dataclass(frozen=True, slots=True)
class Support:
    """Smallest and largest value of each feature among the calibrated rows.

    Attributes:
        ranges: By feature, e.g. "devices"; not negative, since distances are in log space.
    """

    ranges: Mapping[str, tuple[float, float]]

    def __post_init__(self) -> None:
        for name, (low, high) in self.ranges.items():
            if not 0.0 <= low <= high < float("inf"):
                raise PlanError(f"support of {name} from {low:g} to {high:g} is no range from 0 on")

    def distances(self, features: Mapping[str, Array]) -> Array:
        """How far runs lie outside, 0 inside: the sum over features of the log of the excess.

        A run with twice the most devices and all else inside is log 2 = 0.69 away.

        Args:
            features: By name, (n,) or (1,) each; a feature without a range is left out.

        Returns:
            (n,).
        """
        total = np.zeros(1)
        for name, (low, high) in self.ranges.items():
            if name in features:
                total = total + _excess(np.asarray(features[name], np.float64), low, high)
        return total

    def outside(self, features: Mapping[str, float]) -> tuple[str, ...]:
        """Which features of one run are outside, and by how much: a phrase each."""
        phrases = []
        for name, (low, high) in self.ranges.items():
            if name not in features:
                continue
            value = float(features[name])
            above = value > high * _SLACK
            if not above and value * _SLACK >= low:
                continue
            if name in KINDS:
                phrases.append(f"no run {KINDS[name][int(value)]} was measured")
                continue
            by = "outside"
            if above and high:
                by = f"{value / high:.3g} times above"
            elif not above and value:
                by = f"{low / value:.3g} times below"
            phrases.append(f"{name} = {value:.6g} is {by} the calibrated {_range(low, high)}")
        return tuple(phrases)

    def joined(self, other: Support) -> Support:
        """The smallest ranges that hold both."""
        ranges = dict(self.ranges)
        for name, (low, high) in other.ranges.items():
            own = ranges.get(name, (low, high))
            ranges[name] = min(low, own[0]), max(high, own[1])
        return Support(ranges)


@dataclass(frozen=True, slots=True)
class Place:
    """What was measured of one interval group.

    Attributes:
        ranges: Of the features of its runs.
        utilisation: Largest share of the peak (MFU) among its runs, by precision.
    """

    ranges: Support
    utilisation: Mapping[str, float]

    def __post_init__(self) -> None:
        for precision, share in self.utilisation.items():
            if not 0.0 < share < float("inf"):
                raise PlanError(
                    f"utilisation = {share:g} in {precision} of a calibrated place: calibrate again"
                )


def support_of(features: Mapping[str, Array]) -> Support:
    """The ranges of calibrated rows.

    Args:
        features: By name, (n,) each, not negative and finite.

    Raises:
        PlanError: A feature without values, or with one that is negative or not finite.
    """
    ranges = {}
    for name, values in features.items():
        array = np.asarray(values, np.float64)
        if not array.size or not np.all(np.isfinite(array)) or array.min() < 0:
            raise PlanError(f"feature {name} has no values, or some below 0: give one per row")
        ranges[name] = (float(array.min()), float(array.max()))
    return Support(ranges)


def _excess(values: Array, low: float, high: float) -> Array:
    """Log of the factor outside of the range; 1 where a range or a value of 0 has no factor."""
    above = values > high * _SLACK
    below = values * _SLACK < low
    with np.errstate(divide="ignore", invalid="ignore"):
        over = np.log(values / high) if high else np.ones_like(values)
        under = np.where(values > 0, np.log(low / values), 1.0) if low else np.zeros_like(values)
    found: Array = np.where(above, over, np.where(below, under, 0.0))
    return found


def _range(low: float, high: float) -> str:
    return f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"
