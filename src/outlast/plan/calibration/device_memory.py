"""Memory constants of each framework from measured runs on accelerators, and back from a file.

    found = fit_device_memory(rows)                     # by framework
    found["torchtitan"].fit.constants(("torchtitan",))

Runs that failed for want of memory count beside those whose memory was measured. How far unseen
runs of a framework lie from the model says how wide its intervals are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from outlast.errors import PlanError
from outlast.plan.calibration.calibrated import Calibration, Constant
from outlast.plan.calibration.conformal import scale_of_few
from outlast.plan.calibration.groups import folds
from outlast.plan.calibration.rows import Row
from outlast.plan.cases import Array, cases
from outlast.plan.memory.constants import MEMORY_NAMES, MEMORY_PRIORS, memory_constants
from outlast.plan.memory.demand import Demand, demand
from outlast.plan.memory.fit import MemoryFit, MemoryRuns, fit_memory
from outlast.plan.memory.limits import LOG_DEVIATION
from outlast.plan.memory.stages import stage

OF_RANK_ZERO = ("nanotron",)
"""Frameworks whose logs have the memory of rank 0 alone; others give the largest of all ranks."""
_PREFIX, _SPREAD = "device memory of ", "spread"
_FOLDS = 10


@dataclass(frozen=True)
class Learned:
    """What runs of one framework have taught.

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
    return MemoryRuns(
        cases=cases([(row.model, row.run, row.cluster) for row in rows]),
        allocated_bytes=_figures([row.held_bytes for row in rows]),
        peak_bytes=_figures([row.allocated_bytes for row in rows]),
        reserved_bytes=_figures([row.reserved_bytes for row in rows]),
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
    known = before or {}
    found = {}
    for framework, own in _by_framework(rows).items():
        start = known.get(framework)
        fitted = fit_memory(runs_of(own), before=start)
        alone = fitted.constants((framework,))
        values = {name: float(getattr(alone, name)[0]) for name in MEMORY_NAMES}
        errors = _unseen(own, start)
        prior = LOG_DEVIATION if start is None else start.log_deviation
        spread = scale_of_few(prior, float((errors**2).sum()), errors.size)
        fitted = replace(fitted, values=values, differences={}, log_deviation=spread)
        found[framework] = Learned(fitted, errors, _errors(runs_of(own), start))
    return found


def _unseen(rows: Sequence[Row], before: MemoryFit | None) -> Array:
    keys = [row.key for row in rows]
    configurations = len(set(keys))
    if configurations < 2:
        return np.zeros(0)
    place = folds(keys, min(_FOLDS, configurations))
    runs = runs_of(rows)
    found = []
    for fold in range(int(place.max()) + 1):
        seen = place != fold
        fitted = fit_memory(runs.taken(seen), before=before)
        found.append(_errors(runs.taken(~seen), fitted))
    return np.concatenate(found)


def constants_of(fits: Mapping[str, MemoryFit]) -> dict[str, Constant]:
    """What a calibration file says of them."""
    found = {}
    for framework, fitted in fits.items():
        start = f"{_PREFIX}{framework}: "
        for name in MEMORY_NAMES:
            unit, deviation = MEMORY_PRIORS[name].unit, fitted.deviations[name]
            value = fitted.values[name]
            found[start + name] = Constant(value, deviation, unit, "calibrated", framework)
        spread = fitted.log_deviation
        found[start + _SPREAD] = Constant(spread, 0.0, "1", "calibrated", framework)
    return found


def device_memory_of(calibration: Calibration) -> dict[str, MemoryFit]:
    """The memory constants that a calibration knows, by framework.

    Raises:
        PlanError: Some of a framework are missing, or beyond their bounds.
    """
    tables: dict[str, dict[str, Constant]] = {}
    for name, constant in calibration.constants.items():
        if name.startswith(_PREFIX):
            framework, _, own = name.removeprefix(_PREFIX).rpartition(": ")
            tables.setdefault(framework, {})[own] = constant
    rows = len(calibration.provenance.rows)
    return {framework: _fit(framework, table, rows) for framework, table in tables.items()}


def _fit(framework: str, table: Mapping[str, Constant], rows: int) -> MemoryFit:
    where = f"{_PREFIX}{framework}"
    for name in (*MEMORY_NAMES, _SPREAD):
        if name not in table:
            raise PlanError(
                f"the calibration lacks {where}: {name}; calibrate again with this version"
            )
        most = MEMORY_PRIORS[name].most if name in MEMORY_PRIORS else np.inf
        if not 0.0 < table[name].value < most:
            raise PlanError(
                f"{where}: {name} = {table[name].value:g} of the calibration is not above 0 and "
                f"below {most:g}: calibrate again"
            )
    return MemoryFit(
        values={name: table[name].value for name in MEMORY_NAMES},
        differences={},
        deviations={name: table[name].log_deviation for name in MEMORY_NAMES},
        log_deviation=table[_SPREAD].value,
        runs=rows,
    )


def _by_framework(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in usable(rows):
        found.setdefault(row.framework, []).append(row)
    return dict(sorted(found.items()))


def _figures(values: Sequence[float | None]) -> Array:
    return np.array([np.nan if value is None else value for value in values])


def _errors(runs: MemoryRuns, fitted: MemoryFit | None) -> Array:
    """Of what is reserved; where that is not known, of the most that tensors hold."""
    constants = memory_constants() if fitted is None else fitted.constants(runs.software)
    first = demand(runs.cases, constants, stage(runs.cases, "first"))
    last = demand(runs.cases, constants, stage(runs.cases, "last"))
    errors = np.log(_largest("reserved", runs, first, last) / runs.reserved_bytes)
    peaks = np.log(_largest("peak", runs, first, last) / runs.peak_bytes)
    found = np.where(np.isfinite(runs.reserved_bytes), errors, peaks)
    chosen: Array = found[np.isfinite(found)]
    return chosen


def _largest(name: str, runs: MemoryRuns, first: Demand, last: Demand) -> Array:
    one: Array = getattr(first, name)
    return one if runs.first_stage else np.maximum(one, getattr(last, name))
