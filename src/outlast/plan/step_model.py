"""Seconds of a step as a calibration predicts them: formulas, constants, correction, intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import numpy as np

from outlast.plan.batch import Array, Cases, Part, texts, total_of
from outlast.plan.conformal import (
    OTHERS,
    Conformal,
    Place,
    Support,
    conformal,
    folds,
    support_of,
)
from outlast.plan.rows import Row, cases_of
from outlast.plan.step_fit import (
    Belonging,
    Fit,
    Residual,
    fit,
    fit_residual,
)
from outlast.plan.step_time import step_parts, step_seconds

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
FEWEST_SITES = 6
"""Of which whole ones are held out, one after the other, to see how far off others are."""
ELSEWHERE = 2.3, 0.07
"""Quantile of errors at published sites that no fit had seen, and the floor of its scale; the least
for a calibration that has too few sites to hold one out (`benchmarks/plan_time.py`)."""
UNSEEN = "\0"
"""A cluster or framework that no run is of."""


@dataclass(frozen=True)
class StepModel:
    """A calibration of the time model.

    Attributes:
        constants: Fitted constants.
        residual: What the formulas miss among the calibrated runs; None without any.
        widths: How wide intervals are.
        support: Calibrated ranges of all places.
        rows: How many runs were fitted, for people.
        places: What was measured of each interval group; those that `widths` has a quantile of are
            calibrated, others only tell what was seen elsewhere.
    """

    constants: Fit
    residual: Residual | None
    widths: Conformal
    support: Support
    rows: int = 0
    places: Mapping[str, Place] = field(default_factory=dict)

    def calibrated(self, whose: Belonging, *, mixture: bool) -> bool:
        """True if runs of this very framework, chip and cluster were measured."""
        return whose.group(mixture=mixture) in self.widths.quantiles

    def parts(self, cases: Cases, whose: Belonging) -> tuple[Part, ...]:
        """Terms of the step's time, the correction among them; it may be negative.

        Args:
            cases: (cases,).
            whose: Chip, cluster and framework of all of them.
        """
        parts = step_parts(cases, self.constants.constants([whose]))
        if self.residual is None or whose.place not in self.residual.places:
            return parts
        mean, _ = self.residual.correction(cases, [whose.place])
        name = "correction from similar runs"
        values = total_of(parts, 1) * np.expm1(mean)
        correction = texts("mechanisms")[name].part(name, values, {"mean": mean})
        return (*parts, correction)

    def half_widths(self, cases: Cases, whose: Belonging) -> Array:
        """(cases,): half of the interval of a step's time, in log space.

        On a cluster that was not measured, constants of the framework may be those of the site at
        which they were: its spread counts as if nothing of the framework were known.
        """
        mixtures = cases.experts > 1.0
        # One group where all cases are alike.
        different = mixtures if mixtures.any() and not mixtures.all() else mixtures[:1]
        groups = [whose.group(mixture=bool(item)) for item in different]
        unseen = [Belonging(whose.chip, UNSEEN, UNSEEN)]
        elsewhere = self.widths.half_widths(
            self.deviations(cases, unseen), [OTHERS], distances_from(self.support, cases)
        )
        known = np.array([group in self.widths.quantiles for group in groups])
        if not known.any():
            return elsewhere
        place = self.places.get(groups[int(np.argmax(known))])
        deviations = self.deviations(cases, [whose])
        near = self.widths.half_widths(deviations, groups, np.zeros(len(cases)))
        away = distances_from(place.ranges if place else self.support, cases)
        far = self.widths.half_widths(deviations, groups, away)
        # Away from what was measured here, no more is in doubt than where nothing was.
        own = np.maximum(near, np.minimum(far, elsewhere))
        return np.where(known, own, elsewhere)

    def outside(self, cases: Cases, whose: Belonging) -> tuple[str, ...]:
        """Why the first case is beyond what was calibrated, a phrase each."""
        features = _features(cases)
        first = {name: float(np.ravel(values)[0]) for name, values in features.items()}
        mixture = first["experts"] > 1.0
        if self.calibrated(whose, mixture=mixture):
            place = self.places.get(whose.group(mixture=mixture))
            spans = (place.ranges if place else self.support).outside(first)
            return tuple(f"outside measured range: {span}" for span in spans)
        reasons = [f"not calibrated on this cluster ({whose.cluster})"]
        if not self.rows:
            return ("nothing was calibrated: priors alone", *reasons)
        same = replace(whose, cluster="").group(mixture=mixture)
        chip = f" on {whose.chip} at "
        if whose.framework == "any":
            reasons.append("no framework is named: constants are those of all")
        elif not any(name.startswith(same) for name in self.places):
            reasons.append(f"no run of {same.removesuffix(' at ')} was calibrated")
        if not any(chip in name for name in self.places):
            reasons.append(f"no run on {whose.chip} was calibrated")
        for beginning in (same, chip):
            alike = [place.ranges for name, place in self.places.items() if beginning in name]
            if alike:
                break
        seen = reduce(Support.joined, alike) if alike else self.support
        return (*reasons, *(f"outside measured range: {span}" for span in seen.outside(first)))

    def seconds(self, cases: Cases, whose: Sequence[Belonging]) -> Array:
        """(cases,) with the correction."""
        plain = step_seconds(cases, self.constants.constants(whose))
        if self.residual is None:
            return plain
        mean, _ = self.residual.correction(cases, [item.place for item in whose])
        return np.asarray(plain * np.exp(mean))

    def deviations(self, cases: Cases, whose: Sequence[Belonging]) -> Array:
        """(cases,): log standard deviation from the constants and the correction."""
        variance = self.constants.log_deviation(cases, whose) ** 2
        if self.residual is not None:
            _, left = self.residual.correction(cases, [item.place for item in whose])
            variance = variance + left
        return np.asarray(np.sqrt(variance))


def belonging(row: Row) -> Belonging:
    """Of a measured row."""
    return Belonging(row.chip, row.cluster.name, row.framework)


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
        return np.asarray(np.log(_seconds(self.rows) / self.predicted_seconds))


def interval_groups(rows: Sequence[Row]) -> tuple[str, ...]:
    """`Belonging.group` of each row."""
    return tuple(belonging(row).group(mixture=row.model.experts > 1) for row in rows)


def utilisation(rows: Sequence[Row]) -> Array:
    """(rows,): model FLOPs per second and device over the device's peak (MFU)."""
    return np.array([row.model_flops_share for row in rows], dtype=np.float64)


def fitted(rows: Sequence[Row], prior: Fit | None = None) -> tuple[Fit, Residual]:
    """Constants and correction from rows whose time is known.

    Args:
        rows: All with `fits_time`.
        prior: What other runs have taught.
    """
    numbers, whose = cases_of(rows), [belonging(row) for row in rows]
    found = fit(numbers, _seconds(rows), whose, prior=prior)
    plain = step_seconds(numbers, found.constants(whose))
    places = [item.place for item in whose]
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
    numbers = cases_of(rows)
    predicted, deviations, distances = (np.zeros(len(rows)) for _ in range(3))
    for number in range(count):
        kept = [row for row, own in zip(rows, fold, strict=True) if own != number]
        out = np.flatnonzero(fold == number)
        model = StepModel(*fitted(kept, prior), Conformal(quantiles={}, floor=0.0), ranges_of(kept))
        asked = numbers.taken(out)
        whose = [belonging(rows[int(index)]) for index in out]
        predicted[out] = model.seconds(asked, whose)
        deviations[out] = model.deviations(asked, whose)
        distances[out] = distances_from(model.support, asked)
    return Validation(tuple(rows), predicted, deviations, distances)


def validate_elsewhere(rows: Sequence[Row]) -> Validation | None:
    """Each cluster's runs by a fit of the others': how far off one is where nothing was measured.

    Whole sites are held out, since runs of one site err alike; a site is a cluster's name, so those
    of one publication with two names predict each other. Distances from the ranges of the
    others are not counted, so that intervals are wide enough also where nothing is out of range.

    Args:
        rows: All with `fits_time`.

    Returns:
        None where there are fewer than `FEWEST_SITES` clusters.
    """
    sites = np.array([row.cluster.name for row in rows])
    names = sorted(set(sites))
    if len(names) < FEWEST_SITES:
        return None
    predicted, deviations = np.zeros(len(rows)), np.zeros(len(rows))
    numbers = cases_of(rows)
    for name in names:
        out, others = sites == name, [row for row in rows if row.cluster.name != name]
        found = fit(numbers.taken(~out), _seconds(others), [belonging(row) for row in others])
        asked = numbers.taken(out)
        whose = [belonging(row) for row in rows if row.cluster.name == name]
        predicted[out] = step_seconds(asked, found.constants(whose))
        unseen = [Belonging(item.chip, UNSEEN, UNSEEN) for item in whose]
        deviations[out] = found.log_deviation(asked, unseen)
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
    earlier, floor = ({OTHERS: ELSEWHERE[0]}, ELSEWHERE[1])
    if prior is not None:
        earlier, floor = dict(prior.widths.quantiles), prior.widths.floor
    # A smaller floor of these runs says nothing of others: their intervals stay as wide.
    earlier = {group: value * max(floor / widths.floor, 1.0) for group, value in earlier.items()}
    others = earlier[OTHERS]
    if (elsewhere := validate_elsewhere(usable)) is not None:
        scores = np.abs(elsewhere.log_errors) / np.hypot(widths.floor, elsewhere.deviations)
        others = float(np.quantile(scores, widths.coverage))
    elif prior is None:
        others = max(others, widths.quantiles[OTHERS])
    own = {**widths.quantiles, OTHERS: others}
    support, places = ranges_of(usable), _places(usable, groups)
    if prior is not None:
        own = {**earlier, **own}
        support = support.joined(prior.support)
        places = {**prior.places, **places}
    widths = replace(widths, quantiles=own)
    return StepModel(found, residual, widths, support, len(usable), places)


def _places(rows: Sequence[Row], groups: Sequence[str]) -> dict[str, Place]:
    """Calibrated ranges of each interval group."""
    members: dict[str, list[Row]] = {}
    for row, group in zip(rows, groups, strict=True):
        members.setdefault(group, []).append(row)
    places = {}
    for group, some in members.items():
        reached: dict[str, float] = {}
        for row, share in zip(some, utilisation(some), strict=True):
            reached[row.run.precision] = max(float(share), reached.get(row.run.precision, 0.0))
        places[group] = Place(ranges_of(some), reached)
    return places


def _features(cases: Cases) -> dict[str, Array]:
    found = {name: getattr(cases, name) for name in RANGES}
    return {**found, "unfused": 1.0 - cases.fused_attention}


def distances_from(support: Support, cases: Cases) -> Array:
    """(cases,) from calibrated ranges, at most `FARTHEST`."""
    away = np.minimum(support.distances(_features(cases)), FARTHEST)
    return np.broadcast_to(away, (len(cases),))


def _seconds(rows: Sequence[Row]) -> Array:
    return np.array([row.step_seconds or np.nan for row in rows])


def ranges_of(rows: Sequence[Row]) -> Support:
    """Of the features of some runs."""
    return support_of(_features(cases_of(rows)))
