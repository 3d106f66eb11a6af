"""Seconds of a step as a calibration predicts them: formulas, constants, correction, intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from outlast.plan.calibration.conformal import Conformal, conformal
from outlast.plan.calibration.fit import Belonging, Fit, believed, fit
from outlast.plan.calibration.groups import OTHERS, folds, interval_group, interval_groups
from outlast.plan.calibration.residual import Residual, fit_residual
from outlast.plan.calibration.rows import Row
from outlast.plan.calibration.support import Support, support_of
from outlast.plan.cases import Array, Cases, cases
from outlast.plan.terms.part import Part
from outlast.plan.terms.step import step_parts, step_seconds

RANGES = (
    "devices",
    "hidden",
    "layers",
    "sequence",
    "tensor",
    "pipeline",
    "context",
    "expert",
    "data",
    "micro_batch",
    "experts",
    "sharding",
    "recompute",
    "zero_bubble",
    "gpipe",
    "quantized",
    "half",
    "muon",
)
"""Features whose calibrated ranges are kept; the last ones are kinds, by the numbers of `Cases`."""
FARTHEST = 2.0
"""Distance from the calibrated ranges beyond which intervals grow no more: three times as wide."""


@dataclass(frozen=True)
class StepModel:
    """A calibration of the time model.

    Attributes:
        constants: Fitted constants.
        residual: What the formulas miss among the calibrated runs; None without any.
        widths: How wide intervals are.
        support: Calibrated ranges.
        rows: How many runs were fitted, for people.
    """

    constants: Fit
    residual: Residual | None
    widths: Conformal
    support: Support
    rows: int = 0

    def parts(self, cases: Cases, whose: Belonging) -> tuple[Part, ...]:
        """Terms of the step's time, the correction among them; it may be negative.

        Args:
            cases: (cases,).
            whose: Chip, cluster and framework of all of them.
        """
        parts = step_parts(cases, self.constants.constants([whose]))
        if self.residual is None or place_of(whose) not in self.residual.places:
            return parts
        total: Array = np.zeros(1)
        for part in parts:
            total = total + part.values
        mean, _ = self.residual.correction(cases, [place_of(whose)])
        correction = Part(
            "correction from similar runs",
            total * np.expm1(mean),
            "(exp(mean of a Gaussian process over calibrated runs) - 1) * all other terms",
            {"mean": mean},
            (),
            "Rasmussen and Williams 2006, equation 2.25",
        )
        return (*parts, correction)

    def half_widths(self, cases: Cases, whose: Belonging) -> Array:
        """(cases,): half of the interval of a step's time, in log space."""
        deviations = self.deviations(cases, [whose])
        features = {name: getattr(cases, name) for name in RANGES}
        away = np.minimum(self.support.distances(features), FARTHEST)
        distances = np.broadcast_to(away, (len(cases),))
        return self.widths.half_widths(deviations, _groups_of(cases, whose), distances)

    def outside(self, cases: Cases, whose: Belonging) -> tuple[str, ...]:
        """Why the first case is beyond what was calibrated, a phrase each."""
        features = {name: float(np.ravel(getattr(cases, name))[0]) for name in RANGES}
        phrases = self.support.outside(features)
        if not self.rows:
            return ("nothing was calibrated: priors alone", *phrases)
        group = _groups_of(cases, whose)[0]
        if group in self.widths.quantiles:
            return phrases
        if whose.framework == "any":
            return ("no framework is named: constants are those of all", *phrases)
        return (f"no run of {group} was calibrated", *phrases)

    def seconds(self, cases: Cases, whose: Sequence[Belonging]) -> Array:
        """(cases,) with the correction."""
        plain = step_seconds(cases, self.constants.constants(whose))
        if self.residual is None:
            return plain
        mean, _ = self.residual.correction(cases, [place_of(each) for each in whose])
        corrected: Array = plain * np.exp(mean)
        return corrected

    def deviations(self, cases: Cases, whose: Sequence[Belonging]) -> Array:
        """(cases,): log standard deviation from the constants and the correction."""
        variance = self.constants.log_deviation(cases, whose) ** 2
        if self.residual is not None:
            _, left = self.residual.correction(cases, [place_of(each) for each in whose])
            variance = variance + left
        deviation: Array = np.sqrt(variance)
        return deviation


def place_of(whose: Belonging) -> str:
    """Runs correct each other only within a framework on a cluster."""
    return f"{whose.framework} on {whose.cluster}"


def belonging(row: Row) -> Belonging:
    """Of a calibrated row: its source stands for its cluster."""
    return Belonging(row.chip, row.source, row.framework)


@dataclass(frozen=True)
class Validation:
    """Rows as they are predicted by fits that have not seen their configuration.

    Attributes:
        rows: (rows,).
        predicted_seconds: (rows,).
        deviations: (rows,) log standard deviation.
        distances: (rows,) from the other folds' ranges.
    """

    rows: tuple[Row, ...]
    predicted_seconds: Array
    deviations: Array
    distances: Array = field(repr=False)

    @property
    def log_errors(self) -> Array:
        """(rows,): log of measured over predicted."""
        errors: Array = np.log(_seconds(self.rows) / self.predicted_seconds)
        return errors


def utilisation(rows: Sequence[Row]) -> Array:
    """(rows,): model FLOPs per second and device over the device's peak (MFU)."""
    return np.array([row.model_flops_share for row in rows], dtype=np.float64)


def fitted(rows: Sequence[Row], prior: Fit | None = None) -> tuple[Fit, Residual]:
    """Constants and correction from rows whose time is known.

    Args:
        rows: All with `fits_time`.
        prior: What other runs have taught.
    """
    numbers, whose = _numbers(rows), [belonging(row) for row in rows]
    found = fit(numbers, _seconds(rows), whose, prior=prior)
    plain = step_seconds(numbers, found.constants(whose))
    places = [place_of(each) for each in whose]
    return found, fit_residual(numbers, np.log(_seconds(rows) / plain), places)


def validate(
    rows: Sequence[Row], count: int = 10, seed: int = 0, prior: Fit | None = None
) -> Validation:
    """Cross-validation that never splits a configuration.

    Args:
        rows: All with `fits_time`.
        count: Folds.
        seed: Of the folds.
        prior: What other runs have taught.
    """
    fold = folds([row.key for row in rows], count, seed)
    numbers = _numbers(rows)
    predicted, deviations, distances = (np.zeros(len(rows)) for _ in range(3))
    for number in range(count):
        kept = [row for row, own in zip(rows, fold, strict=True) if own != number]
        out = np.flatnonzero(fold == number)
        model = StepModel(*fitted(kept, prior), Conformal(quantiles={}, floor=0.0), _support(kept))
        asked = numbers.taken(out)
        whose = [belonging(rows[int(index)]) for index in out]
        predicted[out] = model.seconds(asked, whose)
        deviations[out] = model.deviations(asked, whose)
        features = {name: getattr(asked, name) for name in RANGES}
        distances[out] = np.minimum(model.support.distances(features), FARTHEST)
    return Validation(tuple(rows), predicted, deviations, distances)


def validate_elsewhere(rows: Sequence[Row]) -> Validation | None:
    """Each framework's runs by a fit of the others': how far off one is where nothing was measured.

    The framework and its clusters are unknown to that fit, so the deviations contain their spread.

    Args:
        rows: All with `fits_time`.

    Returns:
        None where there are fewer than three frameworks.
    """
    frameworks = [row.framework for row in rows]
    if len(set(frameworks)) < 3:
        return None
    predicted, deviations = np.zeros(len(rows)), np.zeros(len(rows))
    numbers = _numbers(rows)
    for name in sorted(set(frameworks)):
        out = np.flatnonzero([each == name for each in frameworks])
        found, _ = fitted([row for row in rows if row.framework != name])
        asked, whose = numbers.taken(out), [belonging(rows[int(index)]) for index in out]
        predicted[out] = step_seconds(asked, found.constants(whose))
        deviations[out] = found.log_deviation(asked, whose)
    return Validation(tuple(rows), predicted, deviations, np.zeros(len(rows)))


def step_model(
    rows: Sequence[Row],
    count: int = 10,
    *,
    held: Validation | None = None,
    prior: StepModel | None = None,
) -> StepModel:
    """A calibration from measured runs, with intervals from cross-validation.

    Args:
        rows: Runs; those whose time cannot be used are left out.
        count: Folds of the cross-validation; fewer where there are fewer configurations.
        held: What `validate` gave for the usable rows, where that is known already.
        prior: A calibration from other runs, e.g. published ones: its constants are where the fit
            begins, and its groups stay. None to begin from the priors.
    """
    usable = [row for row in rows if row.fits_time]
    before = None if prior is None else prior.constants
    found, residual = fitted(usable, before)
    configurations = len({row.key for row in usable})
    if held is None:
        held = validate(usable, min(count, configurations), prior=before)
    groups = interval_groups(usable)
    widths = conformal(held.log_errors, held.deviations, groups, held.distances)
    elsewhere = validate_elsewhere(usable)
    if elsewhere is not None:
        scores = np.abs(elsewhere.log_errors) / np.hypot(widths.floor, elsewhere.deviations)
        other = {OTHERS: float(np.quantile(scores, widths.coverage))}
        widths = replace(widths, quantiles={**widths.quantiles, **other})
    support = _support(usable)
    if prior is not None:
        own = {name: widths.quantiles[name] for name in groups}
        widths = replace(widths, quantiles={**prior.widths.quantiles, **own})
        support = _joined(support, prior.support)
    return StepModel(found, residual, widths, support, len(usable))


def _joined(one: Support, other: Support) -> Support:
    """The smallest ranges that hold both."""
    ranges = dict(one.ranges)
    for name, (low, high) in other.ranges.items():
        own = ranges.get(name, (low, high))
        ranges[name] = min(low, own[0]), max(high, own[1])
    return Support(ranges)


def uncalibrated() -> StepModel:
    """The priors: what is believed before any run was measured."""
    # 90 % of a normal error, on top of which the formulas themselves are off by about 10 %.
    return StepModel(believed(), None, Conformal(quantiles={OTHERS: 1.645}, floor=0.1), Support({}))


def _groups_of(cases: Cases, whose: Belonging) -> list[str]:
    """Interval groups, one for all cases where they are alike."""
    mixtures = cases.experts > 1.0
    different = mixtures if mixtures.any() and not mixtures.all() else mixtures[:1]
    return [interval_group(whose.framework, whose.chip, mixture=bool(each)) for each in different]


def _numbers(rows: Sequence[Row]) -> Cases:
    return cases([(row.model, row.run, row.cluster) for row in rows])


def _seconds(rows: Sequence[Row]) -> Array:
    return np.array([row.step_seconds or np.nan for row in rows])


def _support(rows: Sequence[Row]) -> Support:
    numbers = _numbers(rows)
    return support_of({name: getattr(numbers, name) for name in RANGES})
