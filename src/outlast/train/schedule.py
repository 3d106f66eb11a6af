"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outlast.job import ScheduleSection


def learning_rate_factor(step: int, steps: int, schedule: ScheduleSection) -> float:
    """The share of the peak learning rate for one step.

    Args:
        step: Steps already done, 0 <= step < steps.
        steps: Steps in the whole run.
        schedule: Kind and constants. Cosine: Loshchilov & Hutter 2017, eq. 5, without restarts.
            WSD (warm-up, stable, linear decay): Hu et al. 2024 (MiniCPM), section 4.

    Returns:
        A factor in (0, 1] (0 only where `final_fraction` is 0, after the last step).
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    final = schedule.final_fraction
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "cosine":
        progress = (step - schedule.warmup_steps) / max(steps - schedule.warmup_steps, 1)
        return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))
    decay_steps = round(schedule.decay_fraction * steps)
    until_end = steps - step
    if until_end >= decay_steps:
        return 1.0
    return final + (1.0 - final) * until_end / decay_steps
