"""An estimate as a run's records hold it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.hardware import Unavailable
from outlast.records import Predicted

if TYPE_CHECKING:
    from outlast.plan.prediction import Estimate


def as_record(estimate: Estimate, calibration: str) -> Predicted:
    """An estimate as plain numbers, for the run's records."""
    step, memory, rate = estimate.step_seconds, estimate.memory.figure, estimate.tokens_per_s
    tokens = rate.middle * step.figure.middle
    joules = None if isinstance(estimate.joules, Unavailable) else estimate.joules.figure
    return Predicted(
        step_seconds=step.figure.middle,
        step_seconds_low=step.figure.low,
        step_seconds_high=step.figure.high,
        memory_bytes=memory.middle,
        memory_bytes_low=memory.low,
        memory_bytes_high=memory.high,
        tokens_per_s=rate.middle,
        joules_per_token=None if joules is None else joules.middle / tokens,
        joules_per_token_low=None if joules is None else joules.low / tokens,
        joules_per_token_high=None if joules is None else joules.high / tokens,
        terms={term.name: term.value for term in step.terms},
        coverage=step.figure.coverage,
        extrapolated=list(step.figure.extrapolated),
        calibration=calibration,
    )
