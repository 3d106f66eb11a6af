"""Checkpoint margin: the time before the limit at which a link begins its last save.

A link of remaining time ``W`` that begins its last save ``x`` before the end keeps ``W - x``
seconds of work with probability ``F(x)``, the share of saves that take at most ``x``. The best lead
maximises ``(W - x) F(x)``, that is ``F(x) / f(x) = W - x`` (Barbut, Benoit, Herault, Robert and
Vivien, "When to checkpoint at the end of a fixed-length reservation?", FTXS 2023).

``F`` is not known but seen: the logarithms of save times are taken as normal with unknown mean and
spread, and ``F`` is what they predict of one more save, a Student distribution. With few saves it
is wide; what is believed of the spread before any was seen (`PRIOR_SPREAD`, as if from
`PRIOR_SAVES` saves) keeps it from being absurdly so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.cluster.chain.files import run_log
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.cluster.chain.files import ChainFiles, ChainPlan


PRIOR_SPREAD = 0.15
"""Standard deviation of the logarithm of save times, before any was seen."""
PRIOR_SAVES = 4.0
"""As how many saves that belief counts.

Simulated: more saves of a wider spread keep leads long where saves hardly scatter (6 of 0.25: 1.5
times the best idle tail); fewer make the prediction's tails heavy (2 of 0.1: 1.6 times after 3 to 9
saves; so does a log-uniform belief: 1.8).
"""
MISSED_AT_MOST = 0.005
"""A lead that more saves than this share outlast is never chosen, however short the link."""
NEWEST_SAVES = 200
"""Older saves than so many say little of today's file system."""
_STEPS = 60
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


@dataclass(frozen=True)
class SaveTimes:
    """Distribution of save times: log-Student.

    Attributes:
        centre: Mean of the logarithms of seconds.
        spread: Scale of the logarithm of the next save.
        freedom: Degrees of freedom.
        saves: How many were seen.
    """

    centre: float
    spread: float
    freedom: float
    saves: int

    def share_within(self, seconds: float) -> float:
        """Probability that the next save takes at most `seconds`."""
        from scipy.special import stdtr

        if seconds <= 0.0:
            return 0.0
        return float(stdtr(self.freedom, (math.log(seconds) - self.centre) / self.spread))

    def quantile_seconds(self, share: float) -> float:
        """Seconds within which this share of saves ends."""
        from scipy.special import stdtrit

        return math.exp(self.centre + self.spread * float(stdtrit(self.freedom, share)))


def save_times(seconds: Sequence[float]) -> SaveTimes:
    """Fit the distribution of the next save time to `seconds` of earlier saves.

    Args:
        seconds: Of each save from its request to its publication, oldest first; at least one.

    Raises:
        ClusterError: No save, or one that took no time or less.
    """
    if not seconds or not all(0.0 < second < math.inf for second in seconds):
        raise ClusterError("save times must be above 0 s, and one at least must have been measured")
    logarithms = [math.log(second) for second in seconds[-NEWEST_SAVES:]]
    count = len(logarithms)
    centre = math.fsum(logarithms) / count
    squares = math.fsum((logarithm - centre) ** 2 for logarithm in logarithms)
    # One degree of freedom is spent on the centre, which the prior says nothing about.
    freedom = PRIOR_SAVES + count - 1
    variance = (PRIOR_SAVES * PRIOR_SPREAD**2 + squares) / freedom
    return SaveTimes(centre, math.sqrt(variance * (1.0 + 1.0 / count)), freedom, count)


def best_lead_seconds(times: SaveTimes, at_risk_seconds: float) -> float:
    """Seconds before the end at which the last save should begin.

    Args:
        times: What a save takes.
        at_risk_seconds: Work that is lost if the save is not done in time: the length of the link,
            or what has passed since its last checkpoint.

    Returns:
        The lead ``x`` that maximises ``(at_risk_seconds - x) F(x)``, but no less than what all but
        `MISSED_AT_MOST` of saves take; at most half of `at_risk_seconds`.
    """
    least = times.quantile_seconds(1.0 - MISSED_AT_MOST)
    longest = times.quantile_seconds(1.0 - 1e-7)
    if math.isinf(at_risk_seconds):
        return longest

    def worth(lead: float) -> float:
        return (at_risk_seconds - lead) * times.share_within(lead)

    low = times.quantile_seconds(0.5)
    high = max(min(longest, at_risk_seconds), times.quantile_seconds(0.6))
    # It has one peak: golden sections of the logarithm.
    assert callable(worth)
    left, right = math.log(low), math.log(high)
    for _ in range(_STEPS):
        first, second = right - _GOLDEN * (right - left), left + _GOLDEN * (right - left)
        if worth(math.exp(first)) < worth(math.exp(second)):
            left = first
        else:
            right = second
    best = math.exp(0.5 * (left + right))
    return min(max(best, least), 0.5 * at_risk_seconds)


END_SECONDS = 5.0
"""From the end of the save to that of the processes, and what Slurm's clock may be off."""
ASSUMED_SAVE_SECONDS = 30.0
"""Of a save, before one was measured."""
MOST_AT_RISK_SECONDS = 7 * 86400.0
"""Of a link whose length is not known, or longer than that: it saves on the way."""


def lead_seconds_of(
    plan: ChainPlan, save_seconds: Sequence[float], *, at_risk_seconds: float, hard_end: bool
) -> float:
    """Seconds before its end at which a link begins its last save.

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


def first_lead_seconds(files: ChainFiles, plan: ChainPlan) -> float:
    """Seconds before its limit at which Slurm warns a link submitted now."""
    usable = plan.usable_seconds() or 0.0
    saves = run_log(files).save_seconds
    return lead_seconds_of(plan, saves, at_risk_seconds=usable, hard_end=True)
