"""Time and energy of a new operation at all clocks, from one or two of them.

calibration = calibrate(profile_of_another_model)       # once for a kind of device
modelled = predicted_profile(probes, calibration, clocks_mhz)
planner = EnergyPlanner(modelled)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from outlast.energy.model.equations import Response, cap_clock_mhz, evaluate
from outlast.energy.model.fit import mean
from outlast.energy.profile import Curve, Point, Profile
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outlast.energy.model.equations import DeviceConstants
    from outlast.energy.replay import ClockedDevice


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outlast.energy.model.equations import DeviceConstants
    from outlast.energy.model.fit import Calibration, Deviation
    from outlast.energy.profile import Key


Array: TypeAlias = NDArray[np.float64]


PROBE_TIME_ERROR, PROBE_POWER_ERROR = 0.003, 0.01
"""Relative errors of a probe: time repeats better than power."""


SHARE_ERROR = 0.25
"""Standard deviation of the share of fixed time between operations."""


LARGEST_MISFIT = 0.06
"""Probes whose time or energy is farther from the fit than this do not follow the model."""


LOWEST_CLOCK = 0.45
"""The equations are not trusted below this share of the top clock: no profile went there."""


REACH = 0.15
"""Logarithm of the ratio of clocks over which a probe loses its weight."""


STRANGE_TIME, STRANGE_ENERGY = 0.015, 0.025
"""Relative errors where no measured curve of the like is known for the device."""


@dataclass(frozen=True)
class Prediction:
    """A modelled curve with its 95 % intervals.

    Attributes:
        curve: Best estimates.
        low_seconds, high_seconds: (points,) intervals of time.
        low_joules, high_joules: (points,) intervals of energy.
        flags: What a reader must know, one sentence each.
    """

    curve: Curve
    low_seconds: tuple[float, ...]
    high_seconds: tuple[float, ...]
    low_joules: tuple[float, ...]
    high_joules: tuple[float, ...]
    flags: tuple[str, ...] = ()


def fit_response(
    probes: Sequence[Point], calibration: Calibration, key: Key | None = None
) -> Response | Unavailable:
    """Fit the effect of the clock on an operation to measurements at one clock or more.

    Args:
        probes: Of the operation.
        calibration: Of the device.
        key: Names the operation, so that deviations of its like (same phase) can be used.

    Returns:
        The response, or why the probes do not determine one.

    Raises:
        EnergyError: Without probes, or for times or energies that are not positive.
    """
    ordered = tuple(sorted(probes))
    if not ordered or any(not (p.seconds > 0 and p.joules > 0) for p in ordered):
        raise EnergyError(
            f"probes = {list(ordered)} must hold one point or more, with positive time and energy"
        )
    deviation, alike = _deviation(calibration, key)
    clocks, seconds, joules = np.array(ordered, dtype=float).T
    if deviation is not None:
        time, energy = deviation.at(clocks)
        seconds, joules = seconds / np.exp(time), joules / np.exp(energy)
    response = _least_squares((clocks, seconds, joules), calibration)
    modelled_seconds, modelled_joules = evaluate(response, calibration.constants, clocks)
    worst = max(
        float(np.max(np.abs(np.log(modelled_seconds / seconds)))),
        float(np.max(np.abs(np.log(modelled_joules / joules)))),
    )
    if worst > LARGEST_MISFIT:
        return Unavailable(
            f"the probes differ from the model of {calibration.constants.name} by {worst:.0%}",
            "measure the full sweep of this operation, or calibrate on a more similar model",
        )
    spread = _spread(deviation, alike)
    return Response(
        fixed_seconds=response.fixed_seconds,
        clock_seconds=response.clock_seconds,
        activity_watts_per_mhz=response.activity_watts_per_mhz,
        probes=ordered,
        deviation=deviation,
        time_spread=spread[0],
        energy_spread=spread[1],
        flags=_probe_flags(ordered, response, calibration.constants, alike),
    )


def predict(
    response: Response, constants: DeviceConstants, clocks_mhz: Sequence[int]
) -> Prediction | Unavailable:
    """Time and energy at each clock.

    Predicted times pass through the probes: between them, what the fit leaves over is
    interpolated. So do energies, as far as they are known better from the probes than by the model.
    The intervals widen with the distance from the nearest probe.

    Args:
        response: Of the operation.
        constants: Of the device.
        clocks_mhz: Those below 45 % of the top clock (`LOWEST_CLOCK`) are left out, since the
            model does not hold there.

    Returns:
        The prediction; `Unavailable` when no clock is left.
    """
    wanted = sorted(set(clocks_mhz))
    kept = [clock for clock in wanted if clock >= LOWEST_CLOCK * constants.top_clock_mhz]
    if not kept:
        return Unavailable(
            f"the model does not hold below {LOWEST_CLOCK * constants.top_clock_mhz:g} MHz",
            "measure these clocks",
        )
    flags = list(response.flags)
    if len(kept) < len(wanted):
        flags.append(f"clocks below {kept[0]} MHz are left out: the model does not hold there")
    clocks = np.array(kept, dtype=float)
    seconds, joules = _through_probes(response, constants, clocks)
    far = np.ones_like(clocks)
    if response.probes:
        probed = np.log([point.clock_mhz for point in response.probes])
        far = np.min(np.abs(np.log(clocks)[:, None] - probed[None, :]), axis=1) / REACH
        if clocks[0] < 0.9 * response.probes[0].clock_mhz:
            flags.append(f"below {response.probes[0].clock_mhz} MHz it is extrapolated")
        if clocks[-1] > 1.02 * response.probes[-1].clock_mhz:
            flags.append(f"above {response.probes[-1].clock_mhz} MHz it is extrapolated")
    far = np.minimum(far, 2.0)
    time = 2 * np.sqrt(PROBE_TIME_ERROR**2 + (response.time_spread * far) ** 2)
    energy = 2 * np.sqrt(PROBE_POWER_ERROR**2 + (response.energy_spread * far) ** 2)
    points = [
        Point(clock, float(second), float(joule))
        for clock, second, joule in zip(kept, seconds, joules, strict=True)
    ]
    return Prediction(
        Curve(tuple(points)),
        low_seconds=tuple((seconds * np.exp(-time)).tolist()),
        high_seconds=tuple((seconds * np.exp(time)).tolist()),
        low_joules=tuple((joules * np.exp(-energy)).tolist()),
        high_joules=tuple((joules * np.exp(energy)).tolist()),
        flags=tuple(flags),
    )


def predictions(
    probes: Mapping[Key, Sequence[Point]], calibration: Calibration, clocks_mhz: Sequence[int]
) -> dict[Key, Prediction]:
    """A prediction of every operation that a clock changes.

    Args:
        probes: Measured points of every operation; those of clock 0 (transfers) are left out.
        calibration: Of the device.
        clocks_mhz: Clocks that a plan may use.

    Raises:
        EnergyError: When an operation cannot be predicted; says which and why.
    """
    found = {}
    for key, points in probes.items():
        if all(point.clock_mhz == 0 for point in points):
            continue
        response = fit_response(points, calibration, key)
        prediction = (
            response
            if isinstance(response, Unavailable)
            else predict(response, calibration.constants, clocks_mhz)
        )
        if isinstance(prediction, Unavailable):
            raise EnergyError(
                f"stage {key.stage} {key.phase} cannot be predicted: {prediction.reason}; "
                f"{prediction.remedy}"
            )
        found[key] = prediction
    return found


def margin_of(predicted: Mapping[Key, Prediction]) -> float:
    """The largest relative half-width of the 95 % intervals of time; 0 of no prediction.

    That much longer than planned a step may take, if all of its operations err to one side.
    """
    return max(
        (
            (high - low) / 2 / point.seconds
            for prediction in predicted.values()
            for point, low, high in zip(
                prediction.curve.points,
                prediction.low_seconds,
                prediction.high_seconds,
                strict=True,
            )
        ),
        default=0.0,
    )


def predicted_profile(
    probes: Mapping[Key, Sequence[Point]], calibration: Calibration, clocks_mhz: Sequence[int]
) -> Profile:
    """A modelled profile, for the planner.

    Args:
        probes: Measured points of every operation; those of clock 0 (transfers) are taken over.
        calibration: Of the device.
        clocks_mhz: Clocks that a plan may use.

    Returns:
        The profile. Its flags are those of the predictions, each with the operations that it is
        about, and how wide the intervals are; `predictions` has the intervals themselves.

    Raises:
        EnergyError: When an operation cannot be predicted; says which and why.
    """
    predicted = predictions(probes, calibration, clocks_mhz)
    curves = {
        key: predicted[key].curve if key in predicted else Curve(tuple(points))
        for key, points in probes.items()
    }
    about: dict[str, list[str]] = {}
    for key, item in sorted(predicted.items()):
        for flag in item.flags:
            about.setdefault(flag, []).append(f"stage {key.stage} {key.phase}")
    flags = [f"{', '.join(names)}: {flag}" for flag, names in about.items()]
    if predicted:
        margin = margin_of(predicted)
        flags.append(f"times are modelled, with 95 % intervals of up to {margin:.1%} either way")
    constants = calibration.constants
    return Profile(
        curves, constants.blocking_watts, device=constants.name, kind="modelled", flags=tuple(flags)
    )


def chosen_clock(curve: Curve, longest_seconds: float) -> int:
    """The clock of least energy that is fast enough.

    Raises:
        EnergyError: When none is; says the shortest time.
    """
    fast = [point for point in curve.points if point.seconds <= longest_seconds]
    if not fast:
        least = min(point.seconds for point in curve.points)
        raise EnergyError(
            f"longest_seconds = {longest_seconds:g} cannot be met: the shortest is {least:g} s"
        )
    return min(fast, key=lambda point: point.joules).clock_mhz


def _through_probes(
    response: Response, constants: DeviceConstants, clocks: Array
) -> tuple[Array, Array]:
    """Equations, deviation, and what the probes add to both."""
    seconds, joules = _with_deviation(response, constants, clocks)
    if response.probes:
        probed, probe_seconds, probe_joules = np.array(response.probes, dtype=float).T
        time, energy = _with_deviation(response, constants, probed)
        seconds = seconds * np.exp(np.interp(clocks, probed, np.log(probe_seconds / time)))
        # As much of it as is more than noise of the probe (simple kriging).
        spread = response.energy_spread**2
        trust = spread / (spread + PROBE_POWER_ERROR**2)
        left = np.log(probe_joules / energy) - np.log(probe_seconds / time)
        left = trust * left + np.log(probe_seconds / time)
        joules = joules * np.exp(np.interp(clocks, probed, left))
    return seconds, joules


def _with_deviation(
    response: Response, constants: DeviceConstants, clocks: Array
) -> tuple[Array, Array]:
    seconds, joules = evaluate(response, constants, clocks)
    if response.deviation is not None:
        time, energy = response.deviation.at(clocks)
        seconds, joules = seconds * np.exp(time), joules * np.exp(energy)
    return seconds, joules


def _least_squares(points: tuple[Array, Array, Array], calibration: Calibration) -> Response:
    clocks, seconds, joules = points
    longest, watts = float(seconds[-1]), float(np.max(joules / seconds))
    per_mhz = watts / calibration.constants.top_clock_mhz

    def response(x: Array) -> Response:
        return Response(
            fixed_seconds=float(x[0]) * longest,
            clock_seconds=float(x[1]) * longest,
            activity_watts_per_mhz=float(x[2]) * per_mhz,
        )

    def residuals(x: Array) -> Array:
        modelled_seconds, modelled_joules = evaluate(response(x), calibration.constants, clocks)
        time = np.log(modelled_seconds / seconds)
        power = np.log(modelled_joules / joules) - time
        share = x[0] / (x[0] + x[1]) - calibration.fixed_share
        return np.concatenate(
            [time / PROBE_TIME_ERROR, power / PROBE_POWER_ERROR, [share / SHARE_ERROR]]
        )

    share = min(max(calibration.fixed_share, 0.01), 0.95)
    found = least_squares(
        residuals, [share, 1 - share, 0.6], bounds=([0.0, 0.02, 0.02], [1.2, 1.5, 20.0])
    )
    return response(found.x)


def _deviation(calibration: Calibration, key: Key | None) -> tuple[Deviation | None, bool]:
    """Of operations of the same phase, else of all; and whether they are of the same phase."""
    known = calibration.deviations
    if not known:
        return None, False
    alike = [known_item for other, known_item in known.items() if key and other.phase == key.phase]
    return mean(alike or list(known.values())), bool(alike)


def _spread(deviation: Deviation | None, alike: bool) -> tuple[float, float]:
    if deviation is None or not alike:
        return STRANGE_TIME, STRANGE_ENERGY
    return max(deviation.time_noise, 0.002), max(deviation.energy_noise, 0.005)


def _probe_flags(
    probes: tuple[Point, ...], response: Response, constants: DeviceConstants, alike: bool
) -> tuple[str, ...]:
    flags = []
    if len(probes) == 1:
        flags.append("from one probe: the share of time that no clock changes is assumed")
    cap = cap_clock_mhz(constants, response.activity_watts_per_mhz)
    if probes[0].clock_mhz > cap:
        flags.append(
            f"all probes are above {cap:.0f} MHz, where the power limit sets the clock: probe a "
            "lower one"
        )
    if not alike:
        flags.append("the device was not calibrated on an operation of this phase")
    return tuple(flags)


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
        device: Real or replayed.
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
