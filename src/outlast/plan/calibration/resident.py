"""Peak memory of a rank on processors: its largest resident set, as a sum of named terms.

    memory = fit_resident(rows)
    memory.bytes(numbers)

What a process needs beside the model (Python, torch, its threads' buffers) is most of it for small
models, and the system gives freed pages back at its own pace, so the shares are fitted to probes of
the machine: least squares on relative errors with a normal prior on each coefficient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from outlast.errors import PlanError
from outlast.plan.calibration.calibrated import Calibration, Constant
from outlast.plan.calibration.rows import Row
from outlast.plan.cases import Array, Cases, cases
from outlast.plan.terms.held import stage_parameters

_MIB = 2.0**20
_PREFIX, _SPREAD = "resident memory: ", "spread"
NOISE = 0.04
"""Relative standard deviation of a peak around a perfect model."""

PRIORS: dict[str, tuple[float, float, str]] = {
    "process": (600.0, 100.0, "MiB of a process that has imported torch and computed once"),
    "started rank": (-100.0, 60.0, "MiB by which a rank that a launcher started has less"),
    "states": (1.4, 0.4, "of the bytes of weights, gradients and moments"),
    "activations": (1.2, 0.3, "of the bytes that fp32 blocks keep for the backward pass"),
    "activations, bf16": (0.85, 0.3, "of the bytes that fp32 blocks would keep, with autocast"),
    "logits": (3.0, 1.0, "fp32 copies of a micro-batch's logits"),
}
"""Mean and standard deviation of each coefficient, and what it is."""


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

    def parts(self, cases: Cases) -> dict[str, Array]:
        """(cases,) bytes of each term; they add up to `bytes`."""
        design = _design(cases)
        return {name: design[:, place] * self.values[name] for place, name in enumerate(PRIORS)}

    def bytes(self, cases: Cases) -> Array:
        """(cases,) the largest resident set of a rank."""
        total: Array = _design(cases) @ np.array([self.values[name] for name in PRIORS])
        return total

    def half_widths(self, cases: Cases, quantile: float = 2.0) -> Array:
        """(cases,) half of the interval in log space.

        Args:
            cases: (cases,).
            quantile: 90 % of Student's distribution with half a dozen degrees of freedom, which a
                dozen probes leave.
        """
        shares = _design(cases) / self.bytes(cases)[:, None]
        variance = np.einsum("ij,jk,ik->i", shares, self.covariance, shares)
        widths: Array = quantile * np.sqrt(variance + self.log_deviation**2)
        return widths


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
    numbers = cases([(row.model, row.run, row.cluster) for row in known])
    measured = np.array([row.reserved_bytes for row in known], dtype=np.float64)
    design = _design(numbers) / measured[:, None] / NOISE
    means = np.array([mean for mean, _, _ in PRIORS.values()])
    spreads = np.array([spread for _, spread, _ in PRIORS.values()])
    weights = np.ones(len(known))
    for _ in range(8):
        # Huber's weights: a probe during which the machine ran short of memory counts less.
        root = np.sqrt(weights)[:, None]
        precision = (design * root).T @ (design * root) + np.diag(spreads**-2.0)
        right = (design * root).T @ (root[:, 0] / NOISE) + means / spreads**2
        values = np.linalg.solve(precision, right)
        error = np.abs(design @ values - 1.0 / NOISE)
        weights = 1.0 / np.maximum(error / 2.0, 1.0)
    relative = np.abs(design @ values * NOISE - 1.0)
    # 1.4826 times the median of absolute errors is a normal's standard deviation.
    spread = max(1.4826 * float(np.median(relative)), NOISE)
    found = dict(zip(PRIORS, values.tolist(), strict=True))
    covariance = np.asarray(np.linalg.inv(precision), np.float64)
    return Resident(found, covariance, spread, len(known))


def constants_of(memory: Resident, group: str) -> dict[str, Constant]:
    """What a calibration file says of it; the errors' correlation is left out.

    Args:
        memory: Fitted.
        group: The machine, for people.
    """
    deviations = np.sqrt(np.diag(memory.covariance))
    found = {
        _PREFIX + name: Constant(
            memory.values[name], float(deviation), _unit(text), "calibrated", group
        )
        for (name, (_, _, text)), deviation in zip(PRIORS.items(), deviations, strict=True)
    }
    spread = Constant(memory.log_deviation, 0.0, "1", "calibrated", group)
    return {**found, _PREFIX + _SPREAD: spread}


def resident_of(calibration: Calibration) -> Resident | None:
    """The memory of ranks on processors that a calibration knows; None where it knows none.

    Raises:
        PlanError: Some of its constants are missing.
    """
    known = calibration.constants
    names = [_PREFIX + name for name in (*PRIORS, _SPREAD)]
    missing = [name for name in names if name not in known]
    if len(missing) == len(names):
        return None
    if missing:
        raise PlanError(f"the calibration lacks {missing[0]}: calibrate again with this version")
    deviations = np.array([known[_PREFIX + name].log_deviation for name in PRIORS])
    return Resident(
        {name: known[_PREFIX + name].value for name in PRIORS},
        np.diag(deviations**2),
        known[_PREFIX + _SPREAD].value,
        len(calibration.provenance.rows),
    )


def _unit(text: str) -> str:
    return "MiB" if text.startswith("MiB") else "1"


def _design(cases: Cases) -> Array:
    """(cases, terms): bytes by which each coefficient is multiplied."""
    count = len(cases)
    ends = np.where(cases.tied > 0.0, 1.0, 2.0)
    parameters = stage_parameters(cases, cases.layers / cases.pipeline, ends)
    shards = np.where(cases.sharding == 3.0, cases.sharding_ranks, 1.0)
    # Weights and gradients in fp32, and one or two moments.
    states = parameters / shards * np.where(cases.muon > 0.0, 12.0, 16.0)
    tokens = cases.micro_batch * cases.sequence / cases.context
    wide = cases.intermediate + cases.experts_per_token * cases.expert_intermediate
    block = 4.0 * tokens * (10.0 * cases.hidden + 4.0 * (cases.query_width + wide) / cases.tensor)
    layers = cases.layers / cases.pipeline
    kept = np.where(
        cases.recompute == 2.0, layers * 4.0 * tokens * cases.hidden + block, layers * block
    )
    logits = 4.0 * tokens * cases.vocabulary / cases.tensor
    columns = (
        np.full(1, _MIB),
        _MIB * (cases.devices > 1.0),
        states,
        kept * (1.0 - cases.half),
        kept * cases.half,
        logits,
    )
    found: Array = np.stack([np.broadcast_to(column, (count,)) for column in columns], axis=1)
    return found
