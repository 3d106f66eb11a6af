"""The fit of the memory model's constants to measured runs, failed ones included."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from outlast.errors import PlanError
from outlast.plan.cases import Array, Cases
from outlast.plan.memory.constants import (
    MEMORY_NAMES,
    MEMORY_PRIORS,
    MemoryConstants,
    memory_constants,
)
from outlast.plan.memory.demand import demand
from outlast.plan.memory.stages import stage

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

    def __post_init__(self) -> None:
        sizes = {
            len(self.cases),
            len(self.allocated_bytes),
            len(self.peak_bytes),
            len(self.reserved_bytes),
            len(self.out_of_memory),
            len(self.software),
        }
        if len(sizes) > 1 or not len(self.software):
            raise PlanError(f"runs of {sorted(sizes)} entries: give one entry for each run")
        known = np.concatenate([self.allocated_bytes, self.peak_bytes, self.reserved_bytes])
        if (known <= 0.0).any():
            raise PlanError("memory of a run must be above 0 bytes: leave it out or correct it")

    def taken(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> MemoryRuns:
        """Some of the runs, by indices or a mask."""
        places = np.arange(len(self.software))[rows]
        return MemoryRuns(
            cases=self.cases.taken(places),
            allocated_bytes=self.allocated_bytes[places],
            peak_bytes=self.peak_bytes[places],
            reserved_bytes=self.reserved_bytes[places],
            out_of_memory=self.out_of_memory[places],
            software=tuple(self.software[place] for place in places),
            first_stage=self.first_stage,
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

    def constants(
        self, software: Sequence[str], moment_bytes: float | Array = 8.0
    ) -> MemoryConstants:
        """Of some runs, by the program of each; an unknown program has the common values."""
        own: dict[str, float | Array] = dict(self.values)
        for name in {name for name, _ in self.differences}:
            prior = MEMORY_PRIORS[name]
            position = prior.unbounded(np.array(self.values[name]))
            offsets = [self.differences.get((name, program), 0.0) for program in software]
            own[name] = prior.bounded(position + np.array(offsets))
        return memory_constants(own, moment_bytes=moment_bytes)


def fit_memory(
    runs: MemoryRuns,
    *,
    moment_bytes: float | Array = 8.0,
    before: MemoryFit | None = None,
) -> MemoryFit:
    """Most probable constants (maximum a posteriori).

    Robust least squares (soft L1) on log bytes, normal priors on the scale of `unbounded`. A run
    out of memory says that what it needed exceeds the usable memory, one that fitted the opposite:
    both count by how far they are on the wrong side, as censored observations do.

    Args:
        runs: Measured.
        moment_bytes: Of the optimizer's state per parameter, of shape () or (runs,).
        before: What other runs have taught: its values and their deviations, widened by
            `RELEASE_DEVIATION`, take the place of the priors.
    """
    from scipy.optimize import least_squares

    problem = _Problem(runs, moment_bytes, before)
    found = least_squares(
        problem.residuals,
        np.zeros(len(problem.deviations)),
        x_scale=problem.deviations,
        max_nfev=60,
        ftol=1e-6,
    )
    covariance = np.linalg.inv(found.jac.T @ found.jac)
    return problem.fit(found.x, np.sqrt(np.diag(covariance)))


@dataclass(frozen=True)
class _Problem:
    """Residuals of the fit as a function of distances from what is believed before it."""

    runs: MemoryRuns
    moment_bytes: float | Array
    before: MemoryFit | None

    @cached_property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """Name and program of each fitted number; the common ones have no program."""
        programs = sorted(set(self.runs.software))
        own = [
            (name, program)
            for name in MEMORY_NAMES
            if MEMORY_PRIORS[name].spreads and len(programs) > 1
            for program in programs
        ]
        return (*((name, "") for name in MEMORY_NAMES), *own)

    @cached_property
    def deviations(self) -> Array:
        """(columns,) of the priors, on the scale of `unbounded`.

        Of one program alone, the common values are its own, and may be as far off.
        """
        found = []
        for name, program in self.columns:
            prior = MEMORY_PRIORS[name]
            if self.before is not None and not program:
                found.append(np.hypot(self.before.deviations[name], RELEASE_DEVIATION))
                continue
            wide = prior.spreads["framework"] if program else prior.log_deviation
            if len(set(self.runs.software)) == 1:
                wide = float(np.hypot(wide, prior.spreads.get("framework", 0.0)))
            found.append(wide / (1.0 - prior.median / prior.most))
        return np.array(found)

    def believed(self, name: str) -> Array:
        """The value of a constant before the fit, on the scale of `unbounded`."""
        prior = MEMORY_PRIORS[name]
        value = prior.median if self.before is None else self.before.values[name]
        return prior.unbounded(np.array(value))

    def fit(self, distances: Array, deviations: Array) -> MemoryFit:
        """What distances and their standard deviations mean."""
        values, differences, spreads = {}, {}, {}
        rows = zip(self.columns, distances, deviations, strict=True)
        for (name, program), distance, deviation in rows:
            prior = MEMORY_PRIORS[name]
            if program:
                differences[name, program] = float(distance)
            else:
                values[name] = float(prior.bounded(self.believed(name) + distance))
                spreads[name] = float(deviation)
        blank = MemoryFit(values, differences, spreads, 1.0, len(self.runs.software))
        _, peak, reserved, _ = self._errors(blank)
        error = reserved if reserved.size else peak
        # 1.4826 times the median of absolute errors is a normal's standard deviation.
        spread = 1.4826 * float(np.median(np.abs(error))) if error.size else RESERVED_NOISE
        return replace(blank, log_deviation=max(spread, LIMIT_NOISE))

    def residuals(self, distances: Array) -> Array:
        """(5 runs + columns,) or fewer, where figures are not known."""
        values: dict[str, float | Array] = {}
        positions = {name: np.zeros(1) for name in MEMORY_NAMES}
        for (name, program), distance in zip(self.columns, distances, strict=True):
            share = self._members[program] if program else 1.0
            positions[name] = positions[name] + distance * share
        for name in MEMORY_NAMES:
            values[name] = MEMORY_PRIORS[name].bounded(positions[name] + self.believed(name))
        constants = memory_constants(values, moment_bytes=self.moment_bytes)
        allocated, peak, reserved, beyond = self._compare(constants)
        wrong = np.where(self.runs.out_of_memory, -beyond, beyond)
        return np.concatenate(
            [
                _soft(allocated / ALLOCATED_NOISE),
                _soft(peak / PEAK_NOISE),
                _soft(reserved / RESERVED_NOISE),
                _soft(np.maximum(wrong, 0.0) / LIMIT_NOISE),
                # What a run has reserved could be had.
                _soft(np.maximum(self._over(constants), 0.0) / ALLOCATED_NOISE),
                distances / self.deviations,
            ]
        )

    def _over(self, constants: MemoryConstants) -> Array:
        """(runs whose reserved memory is known,) log of that over what the model says is usable."""
        known = np.isfinite(self.runs.reserved_bytes)
        usable = np.broadcast_to(constants.usable_share * self.runs.cases.memory_bytes, known.shape)
        found: Array = np.log(self.runs.reserved_bytes[known] / usable[known])
        return found

    @cached_property
    def _members(self) -> dict[str, Array]:
        programs = self.runs.software
        return {
            program: np.array([float(name == program) for name in programs])
            for program in set(programs)
        }

    def _errors(self, fit: MemoryFit) -> tuple[Array, Array, Array, Array]:
        return self._compare(fit.constants(self.runs.software, self.moment_bytes))

    def _compare(self, constants: MemoryConstants) -> tuple[Array, Array, Array, Array]:
        """Log errors of allocated, most allocated and reserved bytes; log of the limit's share."""
        runs = self.runs
        first = demand(runs.cases, constants, stage(runs.cases, "first"))
        last = demand(runs.cases, constants, stage(runs.cases, "last"))

        def largest(of: Callable[..., Array]) -> Array:
            return of(first) if runs.first_stage else np.maximum(of(first), of(last))

        errors = []
        for measured, modelled in (
            (runs.allocated_bytes, largest(lambda item: item.allocated)),
            (runs.peak_bytes, largest(lambda item: item.peak)),
            (runs.reserved_bytes, largest(lambda item: item.reserved)),
        ):
            known = np.isfinite(measured)
            errors.append(np.log(np.broadcast_to(modelled, known.shape)[known] / measured[known]))
        beyond = np.log(np.maximum(first.pressing, last.pressing) / first.usable)
        return errors[0], errors[1], errors[2], beyond


def _soft(error: Array) -> Array:
    """Signed root of the soft L1 loss `2 (sqrt(1 + e^2) - 1)`."""
    return np.sign(error) * np.sqrt(2.0 * (np.sqrt(1.0 + error**2) - 1.0))
