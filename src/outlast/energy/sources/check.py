"""What makes a counter's figure doubtful: its device's power says otherwise, or it is too high."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from outlast.energy.sources.integral import Snapshot

POWER_CHECK_SAMPLES = 25
POWER_CHECK_TOLERANCE = 0.1
"""Integrated power of so many samples may differ so much from the counter without a flag."""

IMPLAUSIBLE_WATTS = 1e6
"""More than any rack draws."""


class Check(NamedTuple):
    """What the power samples of a window say about its counter.

    Attributes:
        watts: Mean of the samples; None where it agrees with the counter or too few tell.
        flags: What a reader must know.
    """

    watts: float | None
    flags: tuple[str, ...]


def power_check(begin: Snapshot | None, end: Snapshot | None, watts: float) -> Check:
    """Compares a counter's mean power with that of the samples in its window.

    Args:
        begin: Samples before the window; None where none are taken.
        end: Samples at its end.
        watts: Mean power by the counter.
    """
    if begin is None or end is None:
        return Check(None, ())
    failed, samples = end.failures - begin.failures, end.samples - begin.samples
    flags: tuple[str, ...] = ()
    if failed:
        flags = (f"power check stopped: {failed} of {failed + samples} samples failed",)
    seconds = end.seconds - begin.seconds
    if samples < POWER_CHECK_SAMPLES or seconds <= 0:
        return Check(None, flags)
    sampled = (end.joules - begin.joules) / seconds
    if abs(sampled - watts) <= POWER_CHECK_TOLERANCE * watts:
        return Check(None, flags)
    disagreement = (
        f"{samples} power samples give {sampled:.4g} W, "
        f"{sampled / watts - 1:+.0%} against {watts:.4g} W of the counter "
        "(on A100 and H100 the power reading sees only 25 % of the time)"
    )
    return Check(sampled, (*flags, disagreement))
