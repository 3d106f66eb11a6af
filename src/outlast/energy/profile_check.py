"""What a profile must be to plan with: complete, in SI units, and physically possible."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from outlast.errors import EnergyError

if TYPE_CHECKING:
    from outlast.energy.profile import Curve, Key, Profile

LOWEST_WATTS, HIGHEST_WATTS = 5.0, 3000.0
"""Between an embedded module that idles and more than any accelerator draws."""
TOP_SLOWER = 0.05
"""By how much the top clock may be slower than the fastest one: noise and throttling."""
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
    _check_units(profile, where)
    _check_clocks(profile, where)
    for key, curve in sorted(profile.curves.items()):
        _check_shape(key, curve, where)
    if watts > HIGHEST_WATTS:
        raise EnergyError(f"{where}: blocking_watts = {watts:g} looks like mW: give it in W")


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


def _check_units(profile: Profile, where: str) -> None:
    watts = [
        point.joules / point.seconds
        for curve in profile.curves.values()
        for point in curve.points
        if point.clock_mhz
    ]
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
        f"{where} gives a power of {typical:.3g} W (joules / seconds), which no accelerator draws "
        f"while it computes: {guess}"
    )


def _check_clocks(profile: Profile, where: str) -> None:
    """Curves of one kind of device must have the same clocks.

    Curves that share less than half of their clocks are taken for different devices, unless they
    are of one stage.
    """
    clocks = {
        key: {point.clock_mhz for point in curve.points}
        for key, curve in sorted(profile.curves.items())
        if curve.points[0].clock_mhz
    }
    for key, own in clocks.items():
        for other, wanted in clocks.items():
            alike = key.stage == other.stage or 2 * len(own & wanted) >= len(own | wanted)
            if alike and wanted - own:
                missing = sorted(wanted - own)
                shown = ", ".join(map(str, missing[:4])) + (", ..." if missing[4:] else "")
                raise EnergyError(
                    f"{where}: stage {key.stage} {key.phase} lacks {shown} MHz, which stage "
                    f"{other.stage} {other.phase} has: measure both at the same clocks, or leave "
                    "these clocks out"
                )


def _check_shape(key: Key, curve: Curve, where: str) -> None:
    name = f"{where}: stage {key.stage} {key.phase}"
    fastest = min(curve.points, key=lambda point: point.seconds)
    if curve.top.seconds > fastest.seconds * (1 + TOP_SLOWER):
        raise EnergyError(
            f"{name} is slower at {curve.top.clock_mhz} MHz ({curve.top.seconds:.4g} s) than at "
            f"{fastest.clock_mhz} MHz ({fastest.seconds:.4g} s): the device throttles at its top "
            "clock or the measurement is wrong, so measure again or leave that clock out"
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
