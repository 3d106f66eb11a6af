"""Which clocks to measure on a new model, and measuring them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from outlast.energy.profile import Point
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outlast.energy.devices.protocol import ClockedDevice
    from outlast.energy.model.constants import DeviceConstants

SPREAD = (1.0, 0.84, 0.68)
"""Shares of the top clock to probe where nothing is known about the device."""
WINDOW_READINGS = 100
"""A window of as many updates of the energy counter knows its energy to 1 %."""
LONGEST_WARM_UP = 1000


def choose_probes(
    clocks_mhz: Sequence[int], constants: DeviceConstants | None = None, count: int = 2
) -> tuple[int, ...]:
    """Clocks that tell most about an operation, ascending.

    The top clock anchors deadlines and shows the cap. The voltage knee has no cap, is where energy
    is least, and lies far enough from the top to part fixed from clock-bound time. A third probe
    goes between the two.

    Args:
        clocks_mhz: Those the device has.
        constants: Of the device, where known.
        count: 1 to 3.

    Raises:
        EnergyError: For another count, or fewer clocks than probes.
    """
    known = sorted(set(clocks_mhz))
    if not 1 <= count <= min(len(SPREAD), len(known)):
        raise EnergyError(
            f"count = {count} probes of {len(known)} clocks must be 1 to {len(SPREAD)}, and no "
            "more than the clocks"
        )
    top = known[-1]
    wanted = [share * top for share in SPREAD]
    if constants is not None:
        knee = min(constants.knee_mhz, 0.95 * top)
        wanted = [top, knee, (top + knee) / 2]
    chosen: list[int] = []
    for clock in wanted[:count]:
        left = [number for number in known if number not in chosen]
        chosen.append(min(left, key=lambda name: abs(name - clock)))
    return tuple(sorted(chosen))


def probe(measure: Callable[[int], Point], clocks_mhz: Sequence[int]) -> tuple[Point, ...]:
    """Measure an operation at some clocks, the top one first.

    Args:
        measure: Runs the operation at a clock in MHz and says what it took.
        clocks_mhz: To measure.

    Raises:
        EnergyError: When a measurement is not of the clock asked for, or not positive.
    """
    points = []
    for clock in sorted(clocks_mhz, reverse=True):
        point = measure(clock)
        good = all(math.isfinite(item) and item > 0 for item in (point.seconds, point.joules))
        if point.clock_mhz != clock or not good:
            raise EnergyError(
                f"the probe at {clock} MHz gave {point.seconds} s and {point.joules} J at "
                f"{point.clock_mhz} MHz: measure it again"
            )
        points.append(point)
    return tuple(sorted(points))


def measure_on(
    device: ClockedDevice,
    work: Callable[[], object],
    now_seconds: Callable[[], float],
    *,
    warm_seconds: float = 10.0,
) -> Callable[[int], Point]:
    """A `measure` for `probe` that locks the clock of a device, and unlocks it afterwards.

    The caller has opted in to setting clocks: advice never comes here. The operation is repeated
    until the energy counter has changed often enough for 1 % of its energy.

    Args:
        device: Real, replayed or analytic.
        work: Runs the operation once, to its end (synchronised).
        now_seconds: The clock that `device` lives by, e.g. `time.monotonic`.
        warm_seconds: Work before each window, so that temperature, and with it leakage, settles.
    """

    def measure(clock_mhz: int) -> Point:
        try:
            device.lock_clock(clock_mhz)
            _until_locked(device, work, clock_mhz)
            _repeat(work, now_seconds, warm_seconds)
            return _window(device, work, now_seconds, clock_mhz)
        finally:
            device.unlock()

    return measure


def _until_locked(device: ClockedDevice, work: Callable[[], object], clock_mhz: int) -> None:
    """Run until the clock holds, or a cap keeps it below; unreadable clocks get one run."""
    for _ in range(LONGEST_WARM_UP):
        work()
        state = device.read()
        throttled = not isinstance(state.throttle_reasons, Unavailable) and state.throttle_reasons
        if isinstance(state.sm_clock_mhz, Unavailable) or throttled:
            return
        if abs(state.sm_clock_mhz - clock_mhz) <= 1:
            return
    raise EnergyError(
        f"{device.name} does not reach {clock_mhz} MHz in {LONGEST_WARM_UP} runs: look at its "
        "other users and limits"
    )


def _window(
    device: ClockedDevice,
    work: Callable[[], object],
    now_seconds: Callable[[], float],
    clock_mhz: int,
) -> Point:
    before, begin = _counter(device), now_seconds()
    count = _repeat(work, now_seconds, WINDOW_READINGS * device.counter_seconds)
    seconds, joules = now_seconds() - begin, _counter(device) - before
    return Point(clock_mhz, seconds / count, joules / count)


def _repeat(
    work: Callable[[], object], now_seconds: Callable[[], float], least_seconds: float
) -> int:
    """Run for a time, once at least; returns how often."""
    begin = now = now_seconds()
    count = 0
    while now - begin < least_seconds or not count:
        work()
        count += 1
        before, now = now, now_seconds()
        # Else this would never end.
        if now <= before:
            raise EnergyError(
                "the operation to probe took no time by the clock it is measured with: give the "
                "clock of its device"
            )
    return count


def _counter(device: ClockedDevice) -> float:
    joules = device.read().joules
    if isinstance(joules, Unavailable):
        raise EnergyError(f"{device.name} cannot be probed: {joules.reason}")
    return joules
