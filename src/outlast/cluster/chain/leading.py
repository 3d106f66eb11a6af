"""The lead of a link's last save, from what is known of its saves so far."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from outlast.cluster.chain.lead import best_lead_seconds, save_times

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.cluster.chain.plan import ChainPlan

END_SECONDS = 5.0
"""From the end of the save to that of the processes, and what Slurm's clock may be off."""
ASSUMED_SAVE_SECONDS = 30.0
"""Of a save, before one was measured."""
MOST_AT_RISK_SECONDS = 7 * 86400.0
"""Of a link whose length is not known, or longer than that: it saves on the way."""


def lead_seconds_of(
    plan: ChainPlan, save_seconds: Sequence[float], *, at_risk_seconds: float, hard_end: bool
) -> float:
    """How long before its end a link begins its last save.

    Args:
        plan: Of the chain; ``slurm.lead_seconds`` is taken as it is.
        save_seconds: Of the saves so far.
        at_risk_seconds: Length of the link; 0 or infinity: not known.
        hard_end: Whether Slurm ends the job there, and not the link itself.
    """
    if plan.lead_seconds:
        return plan.lead_seconds
    seen = list(save_seconds) or [plan.save_seconds]
    at_risk = min(at_risk_seconds if at_risk_seconds > 0.0 else math.inf, MOST_AT_RISK_SECONDS)
    lead = best_lead_seconds(save_times(seen), at_risk)
    return lead + (END_SECONDS if hard_end else 0.0)
