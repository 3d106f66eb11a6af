"""What a profile must be to plan with: complete, in SI units, and physically possible."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import TYPE_CHECKING

from outlast.errors import EnergyError

if TYPE_CHECKING:
    from outlast.energy.profile import Curve, Key, Profile

LOWEST_WATTS, HIGHEST_WATTS = 5.0, 3000.0
"""Between an embedded module that idles and more than any accelerator draws."""
LEAST_BLOCKING_WATTS = 5.0
"""Below this, but not 0, a blocking power is probably in kW."""
THOUSAND = (500.0, 2000.0)
"""Times of one phase in two stages that differ by such a factor are in different units."""
TOP_SLOWER, NOISY_TOP_SLOWER = 0.01, 0.05
"""By how much the top clock may be slower than the fastest one; where noise explains it."""
JUMP = 0.25
"""By how much energy may leave a curve that first falls and then rises with the clock."""
_LOWEST_MHZ, _HIGHEST_MHZ = 50, 10_000


def check_profile(profile: Profile, where: str = "the profile") -> None:
    """Refuse a profile that would give wrong plans.

    Args:
        profile: What to check.
        where: What to call it in the sentence.

    Raises:
        EnergyError: Names the first thing that is wrong, its value and what would be right.
    """
    if not profile.curves:
        raise EnergyError(f"{where} has no curves: measure at least one operation")
    watts = profile.blocking_watts
    if not math.isfinite(watts) or watts < 0:
        raise EnergyError(
            f"{where}: blocking_watts = {watts:g} must be the power of a waiting device in W, "
            "e.g. 84"
        )
    for key, curve in sorted(profile.curves.items()):
        _check_points(key, curve, where)
        _check_units(key, curve, where)
    _check_times(profile, where)
    _check_blocking(profile, where)
    _check_clocks(profile, where)
    for key, curve in sorted(profile.curves.items()):
        _check_shape(key, curve, where)


def _check_points(key: Key, curve: Curve, where: str) -> None:
    name = f"{where}: stage {key.stage} {key.phase}"
    if not curve.points:
        raise EnergyError(f"{name} has no points: measure it at one clock or more")
    clocks = [point.clock_mhz for point in curve.points]
    for clock in clocks:
        if clocks.count(clock) > 1:
            raise EnergyError(f"{name} has {clock} MHz twice: keep one measurement of each clock")
        if clock and not _LOWEST_MHZ <= clock <= _HIGHEST_MHZ:
            raise EnergyError(
                f"{name} has a clock of {clock} MHz, which no device runs at: give clocks in MHz, "
                "e.g. 1410"
            )
    if clocks != sorted(clocks):
        raise EnergyError(f"{name} is not sorted by clock: give its points by rising clock")
    if 0 in clocks and len(clocks) > 1:
        raise EnergyError(
            f"{name} has clock 0, which is for operations that no clock changes, among others: "
            "give it one point only, or real clocks"
        )
    for point in curve.points:
        # What no clock changes may also take no energy of its own: a transfer on a link.
        positive = point.joules > 0 or (not point.clock_mhz and point.joules == 0)
        for unit, value, fine in (
            ("seconds", point.seconds, point.seconds > 0),
            ("joules", point.joules, positive),
        ):
            if not fine or not math.isfinite(value):
                raise EnergyError(
                    f"{name} at {point.clock_mhz} MHz has {unit} = {value:g}, which must be above "
                    "0: measure it again"
                )


def _check_units(key: Key, curve: Curve, where: str) -> None:
    watts = [point.joules / point.seconds for point in curve.points if point.clock_mhz]
    if not watts:
        return
    typical = statistics.median(watts)
    if typical < LOWEST_WATTS:
        guess = "are the times in ms (divide them by 1000), or is the energy in kJ?"
    elif typical > HIGHEST_WATTS:
        guess = "is the energy in mJ (divide it by 1000), or are the times in ks or hours?"
    else:
        return
    raise EnergyError(
        f"{where}: stage {key.stage} {key.phase} has a power of {typical:.3g} W "
        f"(joules / seconds), which no accelerator draws while it computes: {guess}"
    )


def _check_times(profile: Profile, where: str) -> None:
    """Refuse a stage in ms among others in s: also where its joules are in mJ, so that W look fine.

    A stage may be much lighter than others (an embedding alone), but rarely by such a factor.
    """
    fastest: dict[str, dict[Key, float]] = {}
    for key, curve in sorted(profile.curves.items()):
        if curve.top.clock_mhz:
            fastest.setdefault(key.phase, {})[key] = min(p.seconds for p in curve.points)
    for times in fastest.values():
        usual = statistics.median_low(times.values())
        other = next(key for key, seconds in times.items() if seconds == usual)
        for key, seconds in times.items():
            ratio = max(seconds, usual) / min(seconds, usual)
            if THOUSAND[0] <= ratio <= THOUSAND[1]:
                raise EnergyError(
                    f"{where}: stage {key.stage} {key.phase} takes {seconds:.4g} s but stage "
                    f"{other.stage} {other.phase} {usual:.4g} s, about a thousand times as much or "
                    "as little: is one of them in ms? Give both in s, and energy in J"
                )


def _check_blocking(profile: Profile, where: str) -> None:
    watts = profile.blocking_watts
    name = f"{where}: blocking_watts = {watts:g}"
    if watts > HIGHEST_WATTS:
        raise EnergyError(f"{name} looks like mW: give it in W")
    if 0 < watts < LEAST_BLOCKING_WATTS:
        raise EnergyError(
            f"{name} is less than any waiting accelerator draws: is it in kW? Give it in W, or 0 "
            "to leave waiting out"
        )
    working = [
        (point.joules / point.seconds, key, point.clock_mhz)
        for key, curve in profile.curves.items()
        for point in curve.points
        if point.clock_mhz
    ]
    if not working:
        return
    lowest, key, clock = min(working)
    if watts > lowest:
        raise EnergyError(
            f"{name} is above the {lowest:.4g} W of stage {key.stage} {key.phase} at {clock} MHz: "
            "a device that waits draws less than one that works, so measure its power while it "
            "waits"
        )


def _check_clocks(profile: Profile, where: str) -> None:
    """Curves of one kind of device must have the same clocks.

    Those of one stage are, and those with the same lowest and highest clock and the same step.
    """
    clocks = {
        key: {point.clock_mhz for point in curve.points}
        for key, curve in sorted(profile.curves.items())
        if curve.points[0].clock_mhz
    }
    for key, own in clocks.items():
        for other, wanted in clocks.items():
            alike = key.stage == other.stage or _range(own) == _range(wanted)
            if alike and wanted - own:
                missing = sorted(wanted - own)
                shown = ", ".join(map(str, missing[:4])) + (", ..." if missing[4:] else "")
                raise EnergyError(
                    f"{where}: stage {key.stage} {key.phase} lacks {shown} MHz, which stage "
                    f"{other.stage} {other.phase} has: measure both at the same clocks, or leave "
                    "these clocks out"
                )


def _range(clocks: set[int]) -> tuple[int, int, int]:
    """Lowest, highest and step of clocks, in MHz."""
    steps = [after - before for before, after in itertools.pairwise(sorted(clocks))]
    return min(clocks), max(clocks), min(steps, default=0)


def _check_shape(key: Key, curve: Curve, where: str) -> None:
    name = f"{where}: stage {key.stage} {key.phase}"
    fastest = min(curve.points, key=lambda point: point.seconds)
    slower = curve.top.seconds / fastest.seconds - 1
    if slower > min(max(TOP_SLOWER, 3 * _time_noise(curve)), NOISY_TOP_SLOWER):
        raise EnergyError(
            f"{name} is {slower:.1%} slower at its top clock of {curve.top.clock_mhz} MHz "
            f"({curve.top.seconds:.4g} s) than at {fastest.clock_mhz} MHz "
            f"({fastest.seconds:.4g} s): throttled? Measure again, or leave that clock out"
        )
    joules = [point.joules for point in curve.points]
    for place, point in enumerate(curve.points):
        low_left = min(joules[:place], default=point.joules)
        low_right = min(joules[place + 1 :], default=point.joules)
        # Energy falls with the clock, then rises: no point may stand out above both sides.
        if point.joules > max(low_left, low_right) * (1 + JUMP):
            raise EnergyError(
                f"{name} takes {point.joules:.4g} J at {point.clock_mhz} MHz but "
                f"{low_left:.4g} J at a lower clock and {low_right:.4g} J at a higher one: energy "
                "falls and then rises with the clock, so measure this clock again"
            )


def _time_noise(curve: Curve) -> float:
    """Relative standard deviation of times from those of neighbours; 0 for fewer than 5 points.

    Between neighbours time is taken as a + b / f; the median leaves out single bad points.
    """
    if len(curve.points) < 5:
        return 0.0
    errors = []
    for before, here, after in zip(curve.points, curve.points[1:], curve.points[2:], strict=False):
        whole = 1 / after.clock_mhz - 1 / before.clock_mhz
        share = (1 / here.clock_mhz - 1 / before.clock_mhz) / whole
        expected = before.seconds + share * (after.seconds - before.seconds)
        errors.append(abs(here.seconds / expected - 1))
    # 1.4826: from the median of magnitudes to the deviation of a normal distribution; 1.5: variance
    # of a point plus that of the mean of two.
    return 1.4826 * statistics.median(errors) / math.sqrt(1.5)
