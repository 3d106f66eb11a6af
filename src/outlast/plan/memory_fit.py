"""Fits of the memory models to measured runs, and their constants in a calibration.

    found = fit_device_memory(rows)                     # by framework
    found["torchtitan"].fit.constants(("torchtitan",))

Runs that failed for want of memory count beside those whose memory was measured. How far unseen
runs of a framework lie from the model says how wide its intervals are.

    memory = fit_resident(rows)
    memory.bytes(numbers)

What a process needs beside the model (Python, torch, its threads' buffers) is most of it for small
models, and the system gives freed pages back at its own pace, so the shares are fitted to probes of
the machine: least squares on relative errors with a normal prior on each coefficient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outlast.errors import PlanError
from outlast.plan.batch import Array, Cases, stage, stage_parameters
from outlast.plan.calibration import Calibration, Constant, step_model_of
from outlast.plan.conformal import folds, scale_of_few
from outlast.plan.constants import MEMORY_NAMES, MEMORY_PRIORS, MemoryConstants, memory_constants
from outlast.plan.facts import facts
from outlast.plan.memory import LOG_DEVIATION, demand
from outlast.plan.rows import Row, cases_of
from outlast.plan.step_fit import most_probable
from outlast.plan.step_model import StepModel

ALLOCATED_NOISE = 0.01
PEAK_NOISE = 0.03
RESERVED_NOISE = 0.05
LIMIT_NOISE = 0.03
"""Log standard deviations around a perfect model: of what tensors hold after a step, of the most
that they hold, of what is reserved, and of the place of the limit."""
RELEASE_DEVIATION = 0.1
"""Standard deviation, on the scale of `unbounded`, by which a constant of one release of a
framework may differ from that of another (own prior)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRuns:
    """Measured runs.

    Attributes:
        cases: (runs,).
        allocated_bytes: (runs,) after a step; NaN where not known.
        peak_bytes: (runs,) the most that tensors hold; NaN where not known.
        reserved_bytes: (runs,) the most during a step; NaN where not known.
        out_of_memory: (runs,) runs that did not fit.
        software: (runs,) of each: constants that differ between programs are fitted for each.
        first_stage: The figures are of rank 0, as many logs are; else of the rank with most.
    """

    cases: Cases
    allocated_bytes: Array
    peak_bytes: Array
    reserved_bytes: Array
    out_of_memory: NDArray[np.bool_]
    software: tuple[str, ...]
    first_stage: bool = True

    def taken(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> MemoryRuns:
        """Some of the runs, by indices or a mask."""
        places = np.arange(len(self.software))[rows]
        names = ("allocated_bytes", "peak_bytes", "reserved_bytes", "out_of_memory")
        return replace(
            self,
            cases=self.cases.taken(places),
            software=tuple(self.software[place] for place in places),
            **{name: getattr(self, name)[places] for name in names},
        )

    def log_errors(self, constants: MemoryConstants) -> tuple[Array, Array, Array, Array]:
        """Log of modelled over measured memory, each (runs,).

        Returns:
            Of allocated, most allocated and reserved bytes, NaN where they are not known; and log
            of the share of what the allocator can get that is pressing.
        """
        first = demand(self.cases, constants, stage(self.cases, "first"))
        last = demand(self.cases, constants, stage(self.cases, "last"))

        def error(measured: Array, one: Array, other: Array) -> Array:
            modelled = one if self.first_stage else np.maximum(one, other)
            return np.asarray(np.log(modelled / measured))

        beyond = np.log(np.maximum(first.pressing, last.pressing) / first.usable)
        return (
            error(self.allocated_bytes, first.allocated, last.allocated),
            error(self.peak_bytes, first.peak, last.peak),
            error(self.reserved_bytes, first.reserved, last.reserved),
            np.broadcast_to(beyond, self.out_of_memory.shape),
        )


@dataclass(frozen=True)
class MemoryFit:
    """Fitted constants.

    Attributes:
        values: By name, common to all programs.
        differences: By name and program, on the scale of `unbounded`.
        deviations: By name, standard deviation of the common value on the scale of `unbounded`.
        log_deviation: Of measured over predicted reserved bytes, where none are known peaks: the
            robust standard deviation among the runs that were fitted.
        runs: How many were fitted.
    """

    values: Mapping[str, float]
    differences: Mapping[tuple[str, str], float]
    deviations: Mapping[str, float]
    log_deviation: float
    runs: int

    def constants(self, software: Sequence[str]) -> MemoryConstants:
        """Of some runs, by the program of each; an unknown program has the common values."""
        own: dict[str, float | Array] = dict(self.values)
        for name in {name for name, _ in self.differences}:
            prior = MEMORY_PRIORS[name]
            position = prior.unbounded(np.array(self.values[name]))
            offsets = [self.differences.get((name, program), 0.0) for program in software]
            own[name] = prior.bounded(position + np.array(offsets))
        return memory_constants(own)


def fit_memory(runs: MemoryRuns, before: MemoryFit | None = None) -> MemoryFit:
    """Most probable constants (maximum a posteriori).

    Robust least squares (soft L1) on log bytes, normal priors on the scale of `unbounded`. A run
    out of memory says that what it needed exceeds the usable memory, one that fitted the opposite:
    both count by how far they are on the wrong side, as censored observations do.

    Args:
        runs: Measured.
        before: What other runs have taught: its values and their deviations, widened by
            `RELEASE_DEVIATION`, take the place of the priors.
    """
    programs = sorted(set(runs.software))
    # Name and program of each fitted number; the common ones have no program.
    columns = [(name, "") for name in MEMORY_NAMES]
    if len(programs) > 1:
        spread_ones = [name for name in MEMORY_NAMES if MEMORY_PRIORS[name].spreads]
        columns += [(name, program) for name in spread_ones for program in programs]
    deviations = np.array([_deviation(*column, len(programs), before) for column in columns])
    believed = {
        name: prior.unbounded(np.array(before.values[name] if before else prior.median))
        for name, prior in MEMORY_PRIORS.items()
    }
    members = {
        program: np.array([float(name == program) for name in runs.software])
        for program in programs
    }
    known = np.isfinite(runs.reserved_bytes)

    def residuals(distances: Array) -> Array:
        """(5 runs + columns,) or fewer, where figures are not known."""
        positions = {name: np.zeros(1) for name in MEMORY_NAMES}
        for (name, program), distance in zip(columns, distances, strict=True):
            share = members[program] if program else 1.0
            positions[name] = positions[name] + distance * share
        constants = memory_constants(
            {
                name: MEMORY_PRIORS[name].bounded(position + believed[name])
                for name, position in positions.items()
            }
        )
        allocated, peak, reserved, beyond = runs.log_errors(constants)
        wrong = np.where(runs.out_of_memory, -beyond, beyond)
        usable = np.broadcast_to(constants.usable_share * runs.cases.memory_bytes, known.shape)
        # What a run has reserved could be had.
        over = np.log(runs.reserved_bytes[known] / usable[known])
        return np.concatenate(
            [
                _soft(_known(allocated) / ALLOCATED_NOISE),
                _soft(_known(peak) / PEAK_NOISE),
                _soft(_known(reserved) / RESERVED_NOISE),
                _soft(np.maximum(wrong, 0.0) / LIMIT_NOISE),
                _soft(np.maximum(over, 0.0) / ALLOCATED_NOISE),
                distances / deviations,
            ]
        )

    begin = np.zeros(len(columns))
    distances, covariance = most_probable(residuals, begin, deviations, evaluations=60)
    values, differences, spreads = {}, {}, {}
    found = zip(columns, distances, np.sqrt(np.diag(covariance)), strict=True)
    for (name, program), distance, deviation in found:
        if program:
            differences[name, program] = float(distance)
        else:
            values[name] = float(MEMORY_PRIORS[name].bounded(believed[name] + distance))
            spreads[name] = float(deviation)
    fitted = MemoryFit(values, differences, spreads, 1.0, len(runs.software))
    _, peak, reserved, _ = map(_known, runs.log_errors(fitted.constants(runs.software)))
    error = reserved if reserved.size else peak
    # 1.4826 times the median of absolute errors is a normal's standard deviation.
    spread = 1.4826 * float(np.median(np.abs(error))) if error.size else RESERVED_NOISE
    return replace(fitted, log_deviation=max(spread, LIMIT_NOISE))


def _deviation(name: str, program: str, programs: int, before: MemoryFit | None) -> float:
    """Of the prior of a fitted number, on the scale of `unbounded`.

    Of one program alone, the common values are its own, and may be as far off.
    """
    prior = MEMORY_PRIORS[name]
    if before is not None and not program:
        return float(np.hypot(before.deviations[name], RELEASE_DEVIATION))
    wide = prior.spreads["framework"] if program else prior.log_deviation
    if programs == 1:
        wide = float(np.hypot(wide, prior.spreads.get("framework", 0.0)))
    return wide / (1.0 - prior.median / prior.most)


def _known(values: Array) -> Array:
    return values[np.isfinite(values)]


def _soft(error: Array) -> Array:
    """Signed root of the soft L1 loss `2 (sqrt(1 + e^2) - 1)`."""
    return np.sign(error) * np.sqrt(2.0 * (np.sqrt(1.0 + error**2) - 1.0))


OF_RANK_ZERO = ("nanotron",)
"""Frameworks whose logs have the memory of rank 0 alone; others give the largest of all ranks."""
_DEVICE_PREFIX, _SPREAD = "device memory of ", "spread"
_FOLDS = 10


@dataclass(frozen=True)
class Learned:
    """Memory fit of one framework's runs.

    Attributes:
        fit: Its constants; `log_deviation` is that of runs that a fit has not seen, and of the
            prior spread (`conformal.scale_of_few`).
        unseen: Log of predicted over measured memory, by fits that have not seen the
            configuration; empty where all runs are of one.
        before: The same by what was believed before: other runs, or the priors.
    """

    fit: MemoryFit
    unseen: Array
    before: Array


def software(row: Row) -> str:
    """The program of a run, as far as its memory differs.

    Before nanotron's pipeline was repaired, stages waited for each other in every pass, so that
    the host could not run ahead of the device.
    """
    waits = row.run.pipeline > 1 and row.version == "before its pipeline fix"
    return f"{row.framework}, waiting" if waits else row.framework


def usable(rows: Sequence[Row]) -> list[Row]:
    """Those on accelerators that say something of memory: how much of it, or that it ran out."""
    return [
        row
        for row in rows
        if not row.cluster.processor and (row.fits_memory or (row.out_of_memory and not row.flags))
    ]


def runs_of(rows: Sequence[Row]) -> MemoryRuns:
    """Rows of one framework as the fit reads them."""

    def figures(name: str) -> Array:
        return np.array(
            [np.nan if (value := getattr(row, name)) is None else value for row in rows]
        )

    return MemoryRuns(
        cases=cases_of(rows),
        allocated_bytes=figures("held_bytes"),
        peak_bytes=figures("allocated_bytes"),
        reserved_bytes=figures("reserved_bytes"),
        out_of_memory=np.array([row.out_of_memory for row in rows]),
        software=tuple(software(row) for row in rows),
        first_stage=rows[0].framework in OF_RANK_ZERO,
    )


def fit_device_memory(
    rows: Sequence[Row], before: Mapping[str, MemoryFit] | None = None
) -> dict[str, Learned]:
    """Constants of each framework that some row says something of.

    Args:
        rows: Of any kind; those that are not `usable` do not count.
        before: What other runs have taught of a framework; where nothing, the priors stand.

    Returns:
        By framework.
    """
    frameworks: dict[str, list[Row]] = {}
    for row in usable(rows):
        frameworks.setdefault(row.framework, []).append(row)
    found = {}
    for framework, own in sorted(frameworks.items()):
        start = (before or {}).get(framework)
        runs = runs_of(own)
        fitted = fit_memory(runs, start)
        alone = fitted.constants((framework,))
        values = {name: float(getattr(alone, name)[0]) for name in MEMORY_NAMES}
        errors = _unseen([row.key for row in own], runs, start)
        prior = LOG_DEVIATION if start is None else start.log_deviation
        spread = scale_of_few(prior, float((errors**2).sum()), errors.size)
        fitted = replace(fitted, values=values, differences={}, log_deviation=spread)
        found[framework] = Learned(fitted, errors, _errors(runs, start))
    return found


def _unseen(keys: Sequence[str], runs: MemoryRuns, before: MemoryFit | None) -> Array:
    """Errors of runs by fits that have not seen their configuration."""
    configurations = len(set(keys))
    if configurations < 2:
        return np.zeros(0)
    place = folds(keys, min(_FOLDS, configurations))
    return np.concatenate(
        [
            _errors(runs.taken(place == fold), fit_memory(runs.taken(place != fold), before))
            for fold in range(int(place.max()) + 1)
        ]
    )


def _errors(runs: MemoryRuns, fitted: MemoryFit | None) -> Array:
    """Of what is reserved; where that is not known, of the most that tensors hold."""
    constants = memory_constants() if fitted is None else fitted.constants(runs.software)
    _, peaks, reserved, _ = runs.log_errors(constants)
    return _known(np.where(np.isfinite(runs.reserved_bytes), reserved, peaks))


def device_constants(fits: Mapping[str, MemoryFit]) -> dict[str, Constant]:
    """Device memory fits as constants of a calibration file."""
    found = {}
    for framework, fitted in fits.items():
        spread = fitted.log_deviation, 0.0, "1"
        own = {
            name: (fitted.values[name], fitted.deviations[name], MEMORY_PRIORS[name].unit)
            for name in MEMORY_NAMES
        }
        for name, figures in (own | {_SPREAD: spread}).items():
            constant = Constant(*figures, "calibrated", framework)
            found[f"{_DEVICE_PREFIX}{framework}: {name}"] = constant
    return found


def device_memory_of(calibration: Calibration) -> dict[str, MemoryFit]:
    """The memory constants that a calibration knows, by framework.

    Raises:
        PlanError: Some of a framework are missing, or beyond their bounds.
    """
    tables: dict[str, dict[str, Constant]] = {}
    for name, constant in calibration.constants.items():
        if name.startswith(_DEVICE_PREFIX):
            framework, _, own = name.removeprefix(_DEVICE_PREFIX).rpartition(": ")
            tables.setdefault(framework, {})[own] = constant
    found = {}
    for framework, table in tables.items():
        where = f"{_DEVICE_PREFIX}{framework}"
        for name in (*MEMORY_NAMES, _SPREAD):
            if name not in table:
                raise PlanError(
                    f"the calibration lacks {where}: {name}; calibrate again with this version"
                )
            most = MEMORY_PRIORS[name].most if name in MEMORY_PRIORS else np.inf
            if not 0.0 < table[name].value < most:
                raise PlanError(
                    f"{where}: {name} = {table[name].value:g} of the calibration is not above 0 "
                    f"and below {most:g}: calibrate again"
                )
        found[framework] = MemoryFit(
            values={name: table[name].value for name in MEMORY_NAMES},
            differences={},
            deviations={name: table[name].log_deviation for name in MEMORY_NAMES},
            log_deviation=table[_SPREAD].value,
            runs=len(calibration.provenance.rows),
        )
    return found


_MIB = 2.0**20
_RESIDENT_PREFIX = "resident memory: "
RESIDENT_NOISE = 0.04
"""Relative standard deviation of a peak around a perfect model."""
_QUANTILE = 2.0
"""90 % of Student's distribution with six degrees of freedom or so, which a dozen probes leave."""

RESIDENT_PRIORS: Mapping[str, Mapping[str, Any]] = facts("priors")["resident"]
"""Mean, standard deviation and unit of each coefficient, and what it is."""


@dataclass(frozen=True)
class Resident:
    """Fitted coefficients.

    Attributes:
        values: By the names of `PRIORS`.
        covariance: (terms, terms) of the coefficients.
        log_deviation: Relative standard deviation of a probe around the model.
        rows: Probes that were fitted.
    """

    values: Mapping[str, float]
    covariance: Array
    log_deviation: float
    rows: int

    def bytes(self, cases: Cases) -> Array:
        """(cases,) the largest resident set of a rank."""
        values = np.array([self.values[name] for name in RESIDENT_PRIORS])
        return np.asarray(_design(cases) @ values)

    def half_widths(self, cases: Cases) -> Array:
        """(cases,) half of the interval in log space."""
        shares = _design(cases) / self.bytes(cases)[:, None]
        variance = np.einsum("ij,jk,ik->i", shares, self.covariance, shares)
        return np.asarray(_QUANTILE * np.sqrt(variance + self.log_deviation**2))


def fit_resident(rows: Sequence[Row]) -> Resident:
    """Most probable coefficients.

    Args:
        rows: Of one machine's processors, each with `reserved_bytes`: the resident peak.

    Raises:
        PlanError: No row has a memory figure.
    """
    known = [row for row in rows if row.fits_memory and row.reserved_bytes is not None]
    if not known:
        raise PlanError("no probe has a memory figure: train with this version of Outlast")
    numbers = cases_of(known)
    measured = np.array([row.reserved_bytes for row in known], dtype=np.float64)
    design = _design(numbers) / measured[:, None] / RESIDENT_NOISE
    priors = RESIDENT_PRIORS.values()
    means, spreads = (np.array([prior[key] for prior in priors]) for key in ("mean", "deviation"))
    weights = np.ones(len(known))
    for _ in range(8):
        # Huber's weights: a probe during which the machine ran short of memory counts less.
        root = np.sqrt(weights)[:, None]
        precision = (design * root).T @ (design * root) + np.diag(spreads**-2.0)
        right = (design * root).T @ (root[:, 0] / RESIDENT_NOISE) + means / spreads**2
        values = np.linalg.solve(precision, right)
        error = np.abs(design @ values - 1.0 / RESIDENT_NOISE)
        weights = 1.0 / np.maximum(error / 2.0, 1.0)
    relative = np.abs(design @ values * RESIDENT_NOISE - 1.0)
    # 1.4826 times the median of absolute errors is a normal's standard deviation.
    spread = max(1.4826 * float(np.median(relative)), RESIDENT_NOISE)
    found = dict(zip(RESIDENT_PRIORS, values.tolist(), strict=True))
    covariance = np.asarray(np.linalg.inv(precision), np.float64)
    return Resident(found, covariance, spread, len(known))


def resident_constants(memory: Resident, group: str) -> dict[str, Constant]:
    """Resident memory fit as constants of a calibration file; the errors' correlation is left out.

    Args:
        memory: Fitted.
        group: The machine, for people.
    """
    deviations = np.sqrt(np.diag(memory.covariance))
    found = {
        _RESIDENT_PREFIX + name: Constant(
            memory.values[name], float(deviation), prior["unit"], "calibrated", group
        )
        for (name, prior), deviation in zip(RESIDENT_PRIORS.items(), deviations, strict=True)
    }
    spread = Constant(memory.log_deviation, 0.0, "1", "calibrated", group)
    return {**found, _RESIDENT_PREFIX + _SPREAD: spread}


def resident_of(calibration: Calibration) -> Resident | None:
    """The memory of ranks on processors that a calibration knows; None where it knows none.

    Raises:
        PlanError: Some of its constants are missing.
    """
    names = {name: _RESIDENT_PREFIX + name for name in (*RESIDENT_PRIORS, _SPREAD)}
    missing = [name for name in names.values() if name not in calibration.constants]
    if len(missing) == len(names):
        return None
    if missing:
        raise PlanError(f"the calibration lacks {missing[0]}: calibrate again with this version")
    known = {name: calibration.constants[own] for name, own in names.items()}
    spread = known.pop(_SPREAD).value
    deviations = np.array([constant.log_deviation for constant in known.values()])
    values = {name: constant.value for name, constant in known.items()}
    rows = len(calibration.provenance.rows)
    return Resident(values, np.diag(deviations**2), spread, rows)


def _design(cases: Cases) -> Array:
    """(cases, terms): bytes by which each coefficient is multiplied."""
    count = len(cases)
    ends = np.where(cases.tied > 0.0, 1.0, 2.0)
    parameters = stage_parameters(cases, cases.layers / cases.pipeline, ends)
    shards = np.where(cases.sharding == 3.0, cases.sharding_ranks, 1.0)
    # Weights and gradients in fp32, and one or two moments.
    states = parameters / shards * np.where(cases.muon > 0.0, 12.0, 16.0)
    tokens = cases.rank_tokens
    wide = cases.intermediate + cases.experts_per_token * cases.expert_intermediate
    block = 4.0 * tokens * (10.0 * cases.hidden + 4.0 * (cases.query_width + wide) / cases.tensor)
    layers = cases.layers / cases.pipeline
    kept = np.where(
        cases.recompute == 2.0, layers * 4.0 * tokens * cases.hidden + block, layers * block
    )
    logits = 4.0 * tokens * cases.vocabulary / cases.tensor
    processes = np.full(1, _MIB), _MIB * (cases.devices > 1.0)
    columns = *processes, states, kept * (1.0 - cases.half), kept * cases.half, logits
    return np.stack([np.broadcast_to(column, (count,)) for column in columns], axis=1)


OUTLAST = "outlast"
COMPILED = "outlast compiled"
"""Names of our own runs, as calibrations count: compiled steps take less time and memory."""


@dataclass(frozen=True)
class Known:
    """A calibration as the model uses it.

    Attributes:
        step: Of the time.
        memory: Constants of the memory of devices, by framework.
    """

    step: StepModel
    memory: Mapping[str, MemoryFit] = field(default_factory=dict)

    def times(self, framework: str) -> bool:
        """True if runs of a framework have taught its time."""
        columns = self.step.constants.columns
        return any(column.level == "framework" and column.group == framework for column in columns)


def known_of(calibration: Calibration) -> Known:
    """Read all models of a calibration.

    Raises:
        PlanError: It has constants that this version does not know, or lacks some.
    """
    return Known(step_model_of(calibration), device_memory_of(calibration))
