"""What a calibration has learned of memory: what moved, and errors of runs it has not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from outlast.plan.calibration.memory_fit import (
    Learned,
    Resident,
    device_constants,
    fit_device_memory,
    fit_resident,
    resident_constants,
)
from outlast.plan.constants import MEMORY_NAMES, MEMORY_PRIORS

if TYPE_CHECKING:
    from outlast.plan.calibration.calibration_file import Constant
    from outlast.plan.calibration.memory_fit import MemoryFit
    from outlast.plan.calibration.rows import Row

MOVED = 0.05
"""Relative change of a constant from which on it is worth a word."""


@dataclass(frozen=True, slots=True)
class FittedMemory:
    """What rows say of memory.

    Attributes:
        learned: Of devices, by framework.
        before: What was known of them before; a framework that is not in it had the priors.
        resident: Of processes on processors; None without a row of one.
        machine: Name of the cluster of these processes.
    """

    learned: Mapping[str, Learned]
    before: Mapping[str, MemoryFit]
    resident: Resident | None
    machine: str = ""


def fitted_memory(rows: Sequence[Row], *, alone: bool) -> FittedMemory:
    """Fit the memory of devices and of processes to the rows that say something of them.

    Args:
        rows: Flagged ones included, which do not count.
        alone: Begin with the priors, not with what published runs have taught.
    """
    from outlast.plan.api import published_memory

    before = {} if alone else published_memory()
    processes = [row for row in rows if row.cluster.processor and row.fits_memory]
    processes = [row for row in processes if row.reserved_bytes is not None]
    return FittedMemory(
        learned=fit_device_memory(rows, before),
        before=before,
        resident=fit_resident(processes) if processes else None,
        machine=processes[0].cluster.name if processes else "",
    )


def stored_memory(found: FittedMemory) -> dict[str, Constant]:
    """What the calibration's file says of it."""
    stored = device_constants({name: item.fit for name, item in found.learned.items()})
    if found.resident is not None:
        stored |= resident_constants(found.resident, found.machine)
    return stored


def memory_document(found: FittedMemory) -> dict[str, Any]:
    """For --json, by framework: runs, constants before and after, errors of unseen runs."""
    return {
        framework: {
            "rows": item.fit.runs,
            "constants": _constants(item.fit, found.before.get(framework)),
            "unseen_error": _median(item.unseen),
            "error_before": _median(item.before),
            "log_deviation": item.fit.log_deviation,
        }
        for framework, item in found.learned.items()
    }


def memory_lines(found: FittedMemory) -> list[str]:
    """Sentences about what was learned."""
    lines = []
    for framework, item in found.learned.items():
        said = [f"memory of {framework}: {item.fit.runs} runs"]
        unseen, before = _median(item.unseen), _median(item.before)
        if unseen is not None:
            said.append(f"error of unseen ones {unseen:.1%} in the median")
        if before is not None:
            said.append(f"{before:.1%} before")
        said.append(f"90 % intervals of +{np.expm1(1.645 * item.fit.log_deviation):.0%}")
        moved = [
            f"{one['name']} {one['before']:.4g} -> {one['after']:.4g}"
            for one in _constants(item.fit, found.before.get(framework))
            if abs(one["after"] / one["before"] - 1.0) > MOVED
        ]
        lines.append("; ".join([", ".join(said), *moved]))
    if found.resident is not None:
        lines.append(
            f"memory of processes on {found.machine}: {found.resident.rows} runs, for the "
            "predictions of `outlast train`"
        )
    return lines


def _constants(after: MemoryFit, before: MemoryFit | None) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "unit": MEMORY_PRIORS[name].unit,
            "before": MEMORY_PRIORS[name].median if before is None else before.values[name],
            "after": after.values[name],
            "log_deviation": after.deviations[name],
        }
        for name in MEMORY_NAMES
    ]


def _median(log_errors: np.ndarray) -> float | None:
    """Of absolute relative errors; None of none."""
    return float(np.median(np.abs(np.expm1(log_errors)))) if log_errors.size else None
