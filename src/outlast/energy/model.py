"""Time and energy of operations at any clock: the equations, their fit to a device, predictions.

calibration = calibrate(profile_of_another_model)       # once for a kind of device
modelled = predicted_profile(probes, calibration, clocks_mhz)   # from one or two clocks
planner = EnergyPlanner(modelled)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outlast.energy.profile import Curve, Point, Profile
from outlast.errors import EnergyError
from outlast.extras import require
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outlast.energy.profile import Key

Array: TypeAlias = NDArray[np.float64]
NEWTON_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of an operator, a phase or a step on one device.

    Attributes:
        flops: Floating-point operations of matrix products.
        memory_bytes: Bytes that device memory reads and writes, after fusion.
        link_bytes: Bytes that leave the device over links.
        launches: Kernels.
    """

    flops: float
    memory_bytes: float
    link_bytes: float = 0.0
    launches: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            flops=self.flops + other.flops,
            memory_bytes=self.memory_bytes + other.memory_bytes,
            link_bytes=self.link_bytes + other.link_bytes,
            launches=self.launches + other.launches,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConstants:
    """Fitted once for a kind of device, then used for every model on it.

    ``P(f) = static + activity * f * V(f)^2`` with ``V(f) = 1 + knee_per_ghz * max(0, f - knee)``,
    and no more than the power limit: above it the effective clock stays behind the one asked for.
    The activity is the operation's, in watts per MHz at the voltage below the knee.

    Attributes:
        name: The device, in words.
        top_clock_mhz: Highest SM clock.
        static_watts: Power at work without switching, at steady temperature.
        knee_mhz: Clock above which the voltage must rise.
        knee_per_ghz: How steeply it rises, relative to the voltage below the knee.
        power_limit_watts: Cap in force; infinite where there is none.
        blocking_watts: Power while waiting for another device.
        peak_flop_per_s: Achieved rate of matrix products at the top clock.
        memory_bytes_per_s: Achieved memory bandwidth.
        launch_seconds: Time that a kernel costs at least.
        link_bytes_per_s: Achieved bandwidth of the links to other devices.
        cap_sharpness: How abruptly the cap takes hold: exponent of the smooth minimum of the clock
            asked for and the one that the cap allows. Kernels of an operation differ in power, so
            the cap bites some of them earlier than the mean power says.
        standard_errors: (name, standard error in the constant's unit) of what was fitted.
    """

    name: str
    top_clock_mhz: float
    static_watts: float
    knee_mhz: float
    knee_per_ghz: float
    power_limit_watts: float
    blocking_watts: float
    peak_flop_per_s: float = float("nan")
    memory_bytes_per_s: float = float("nan")
    launch_seconds: float = 5e-6
    link_bytes_per_s: float = float("nan")
    cap_sharpness: float = 40.0
    standard_errors: tuple[tuple[str, float], ...] = ()

    def voltage(self, clock_mhz: float) -> float:
        """Relative voltage: 1 up to the knee."""
        return 1.0 + self.knee_per_ghz * max(0.0, clock_mhz - self.knee_mhz) / 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """Effect of the clock on one operation on one kind of device.

    Attributes:
        fixed_seconds: Time that no clock changes: memory, links, launches.
        clock_seconds: The rest, at the top clock.
        activity_watts_per_mhz: Switching power by clock at the voltage below the knee.
        probes: Points that the response was fitted to; predicted times go through them.
        deviation: What like operations of this device do beyond the equations.
        time_spread: Relative standard error of predicted time, away from probes.
        energy_spread: Likewise of energy.
        flags: What a reader must know, one sentence each.
    """

    fixed_seconds: float
    clock_seconds: float
    activity_watts_per_mhz: float
    probes: tuple[Point, ...] = ()
    deviation: Deviation | None = None
    time_spread: float = 0.0
    energy_spread: float = 0.0
    flags: tuple[str, ...] = ()


def cap_clock_mhz(constants: DeviceConstants, activity_watts_per_mhz: float) -> float:
    """The clock at which an operation draws the power limit; infinite where there is none.

    Power is linear up to the knee. Above, it is convex, so that Newton's method from the linear
    solution, which is too high, comes down to the root without overshooting.
    """
    spare_watts = constants.power_limit_watts - constants.static_watts
    if not math.isfinite(spare_watts) or activity_watts_per_mhz <= 0:
        return math.inf
    clock = target = max(spare_watts / activity_watts_per_mhz, 1.0)
    slope = constants.knee_per_ghz / 1000
    if clock <= constants.knee_mhz:
        return clock
    for _ in range(NEWTON_STEPS):
        volts = constants.voltage(clock)
        clock -= (clock * volts**2 - target) / (volts**2 + 2 * clock * volts * slope)
    return clock


def effective_clocks_mhz(
    constants: DeviceConstants, activity_watts_per_mhz: float, clocks_mhz: Array
) -> Array:
    """(clocks,) at which the device really runs when asked for `clocks_mhz`."""
    cap = cap_clock_mhz(constants, activity_watts_per_mhz)
    if math.isinf(cap):
        return clocks_mhz
    sharpness = constants.cap_sharpness
    lows = np.logaddexp(-sharpness * np.log(clocks_mhz), -sharpness * math.log(cap))
    return np.asarray(np.exp(-lows / sharpness))


def evaluate(
    response: Response, constants: DeviceConstants, clocks_mhz: Array
) -> tuple[Array, Array]:
    """Seconds and joules by the equations alone.

    Args:
        response: Of the operation.
        constants: Of the device.
        clocks_mhz: (clocks,).

    Returns:
        (clocks,) seconds and (clocks,) joules.
    """
    clocks = effective_clocks_mhz(constants, response.activity_watts_per_mhz, clocks_mhz)
    volts = 1 + constants.knee_per_ghz * np.maximum(0.0, clocks - constants.knee_mhz) / 1000
    seconds = response.fixed_seconds + response.clock_seconds * constants.top_clock_mhz / clocks
    watts = constants.static_watts + response.activity_watts_per_mhz * clocks * volts**2
    return seconds, seconds * watts


SHARPNESS = 8.0
"""Exponent of the smooth maximum of compute and memory time: 9 % above both where they meet."""
LOW_SHARE = 0.7
"""The response agrees with the roofline at the top clock and at this share of it."""
COMPUTE_POWER, MEMORY_POWER = 1.1, 0.55
"""Switching power at the top clock of work bound by one of the two, as a share of what the limit
leaves above static power. Assumed, from matrix products that reach the cap; hence the spread."""
TIME_SPREAD, ENERGY_SPREAD = 0.15, 0.20
NOT_PROBED = "modelled from flops and bytes alone: nothing of this work was measured"


def roofline_seconds(
    work: Work, constants: DeviceConstants, clocks_mhz: Array
) -> Array | Unavailable:
    """``smoothmax(F / (R f / f_top), B / BW) + n t_launch + C / link``.

    Compute scales with the clock, memory and links do not (Williams et al., Roofline, 2009).

    Args:
        work: Of the operation.
        constants: With its rates.
        clocks_mhz: (clocks,) effective clocks.

    Returns:
        (clocks,) seconds; `Unavailable` where a rate that the work needs is not known.
    """
    needed = {
        "peak_flop_per_s": work.flops,
        "memory_bytes_per_s": work.memory_bytes,
        "link_bytes_per_s": work.link_bytes,
    }
    total = []
    for name, amount in needed.items():
        rate = getattr(constants, name)
        if amount and not rate > 0:
            return Unavailable(f"{name} of {constants.name} is not known", "measure it once")
        total.append(amount / rate if amount else 0.0)
    compute = total[0] * constants.top_clock_mhz / clocks_mhz
    largest = np.maximum(np.maximum(compute, total[1]), 1e-300)
    bound = (compute / largest) ** SHARPNESS + (total[1] / largest) ** SHARPNESS
    launches = work.launches * constants.launch_seconds
    return np.asarray(largest * bound ** (1 / SHARPNESS) + launches + total[2])


def roofline_response(work: Work, constants: DeviceConstants) -> Response | Unavailable:
    """The response of work without any probe.

    Args:
        work: Of the operation.
        constants: With rates and a power limit.

    Returns:
        A response with wide spreads and a flag; `Unavailable` without rates or limit.
    """
    top = constants.top_clock_mhz
    seconds = roofline_seconds(work, constants, np.array([top, LOW_SHARE * top]))
    if isinstance(seconds, Unavailable):
        return seconds
    if not math.isfinite(constants.power_limit_watts):
        return Unavailable(
            f"the power of unmeasured work on {constants.name} is not known without a power limit",
            "probe the work at one clock",
        )
    if seconds[0] <= 0:
        return Unavailable("there is no work", "capture the step first")
    clock_seconds = float(seconds[1] - seconds[0]) / (1 / LOW_SHARE - 1)
    share = min(clock_seconds / float(seconds[0]), 1.0)
    spare_watts = constants.power_limit_watts - constants.static_watts
    power = MEMORY_POWER + (COMPUTE_POWER - MEMORY_POWER) * share
    return Response(
        fixed_seconds=max(float(seconds[0]) - clock_seconds, 0.0),
        clock_seconds=clock_seconds,
        activity_watts_per_mhz=power * spare_watts / (top * constants.voltage(top) ** 2),
        time_spread=TIME_SPREAD,
        energy_spread=ENERGY_SPREAD,
        flags=(NOT_PROBED,),
    )


SMOOTHED_CLOCKS = 3
"""A median over as many clocks keeps steps of the device and drops noise of single points."""
TIME_ERROR, ENERGY_ERROR = 0.01, 0.01
"""Relative errors of a measured point that residuals are counted in."""
LEARNED = 0.8
"""A constant is known when data made its standard error smaller than this share of the prior's."""
FITTED = ("static_watts", "knee_mhz", "knee_per_ghz", "power_limit_watts", "cap_sharpness")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """Logarithms of measured over modelled by clock.

    Attributes:
        clocks_mhz: Ascending.
        seconds: Of time, at each clock.
        joules: Of energy, at each clock.
        time_noise: Standard deviation of what smoothing took away, of time.
        energy_noise: Likewise of energy.
    """

    clocks_mhz: tuple[float, ...]
    seconds: tuple[float, ...]
    joules: tuple[float, ...]
    time_noise: float
    energy_noise: float

    def at(self, clocks_mhz: Array) -> tuple[Array, Array]:
        """Of time and energy at other clocks; constant beyond the measured ones."""
        return (
            np.interp(clocks_mhz, self.clocks_mhz, self.seconds),
            np.interp(clocks_mhz, self.clocks_mhz, self.joules),
        )


def deviation_of(curve: Curve, response: Response, constants: DeviceConstants) -> Deviation:
    """Difference of a measured curve from its fit."""
    clocks, seconds, joules = np.array(curve.points, dtype=float).T
    modelled_seconds, modelled_joules = evaluate(response, constants, clocks)
    time, time_noise = _smooth(np.log(seconds / modelled_seconds))
    energy, energy_noise = _smooth(np.log(joules / modelled_joules))
    return Deviation(
        clocks_mhz=tuple(clocks.tolist()),
        seconds=tuple(time.tolist()),
        joules=tuple(energy.tolist()),
        time_noise=time_noise,
        energy_noise=energy_noise,
    )


def mean(deviations: Sequence[Deviation]) -> Deviation:
    """Of several operations, at the clocks of the first."""
    clocks = np.array(deviations[0].clocks_mhz)
    found = [deviation.at(clocks) for deviation in deviations]
    return Deviation(
        clocks_mhz=deviations[0].clocks_mhz,
        seconds=tuple(np.mean([pair[0] for pair in found], axis=0).tolist()),
        joules=tuple(np.mean([pair[1] for pair in found], axis=0).tolist()),
        time_noise=float(np.mean([deviation.time_noise for deviation in deviations])),
        energy_noise=float(np.mean([deviation.energy_noise for deviation in deviations])),
    )


def _smooth(values: Array) -> tuple[Array, float]:
    """The running median and the standard deviation around it."""
    if len(values) < SMOOTHED_CLOCKS:
        return np.zeros_like(values), float(np.sqrt(np.mean(values**2)))
    require("energy", "the noise of a profile", "scipy")
    from scipy.ndimage import median_filter

    smoothed = median_filter(values, size=SMOOTHED_CLOCKS, mode="nearest")
    return smoothed, float(np.std(values - smoothed))


@dataclass(frozen=True)
class Calibration:
    """All that is known about a kind of device before a new model runs on it.

    Attributes:
        constants: Of the equations.
        deviations: What measured curves do beyond the equations, by stage and phase.
        fixed_share: Mean share of time at the top clock that no clock changes.
    """

    constants: DeviceConstants
    deviations: Mapping[Key, Deviation] = field(default_factory=dict)
    fixed_share: float = 0.3


def calibrate(profile: Profile, *, strict: bool = True) -> Calibration:
    """Constants of a device and what its curves do beyond them.

    Least squares of log time and log energy with a robust loss, bounds that physics sets, and
    priors: static power is near the blocking power, the voltage rises from about three quarters of
    the top clock. Standard errors come from the curvature at the optimum, widened by the misfit.

    Args:
        profile: Measured; equal curves count once. Operations without a clock are left out.
        strict: Refuse when data leave a constant to its prior; else its prior stands.

    Raises:
        EnergyError: When a constant cannot be determined; names it.
    """
    curves: dict[Key, Curve] = {}
    for key in sorted(profile.curves):
        curve = profile.curves[key]
        if len(curve.points) >= 2 and curve not in curves.values():
            curves[key] = curve
    if not curves:
        raise EnergyError(
            "the profile has no curve with 2 clocks or more: constants of the device need a sweep"
        )
    top = max(curve.top.clock_mhz for curve in curves.values())
    hottest = max(p.joules / p.seconds for curve in curves.values() for p in curve.points)
    base = DeviceConstants(
        name=profile.device,
        top_clock_mhz=top,
        static_watts=profile.blocking_watts,
        knee_mhz=0.75 * top,
        knee_per_ghz=0.6,
        power_limit_watts=hottest,
        blocking_watts=profile.blocking_watts,
    )
    problem = _Problem(base, list(curves.values()))
    solution = problem.solve()
    constants, responses = problem.unpack(solution.x)
    misfit = problem.misfit(solution.x)
    scaled = solution.jac.copy()
    # Priors are not widened: they are what is believed, not what was measured.
    scaled[: len(misfit)] /= math.sqrt(max(1.0, float(np.mean(misfit**2))))
    covariance = np.linalg.pinv(scaled.T @ scaled)
    errors = np.asarray(np.sqrt(np.maximum(np.diag(covariance)[:5], 0.0)))
    capped = any(
        cap_clock_mhz(constants, response.activity_watts_per_mhz) < 1.02 * top
        for response in responses
    )
    if not capped:
        constants = replace(constants, power_limit_watts=math.inf)
    # Without a cap there is nothing to know about it.
    known = FITTED[:4] if capped else FITTED[:3]
    if strict:
        problem.refuse_undetermined(known, errors, constants)
    named = tuple(zip(known, errors.tolist(), strict=False))
    constants = replace(constants, standard_errors=named)
    deviations = {
        key: deviation_of(curve, response, constants)
        for (key, curve), response in zip(curves.items(), responses, strict=True)
    }
    shares = [r.fixed_seconds / (r.fixed_seconds + r.clock_seconds) for r in responses]
    return Calibration(constants, deviations, float(np.mean(shares)))


@dataclass(frozen=True)
class _Problem:
    """Unknowns: five constants, then three numbers of each curve relative to its top point.

    Attributes:
        base: The priors' means; the hottest watts of any point as power limit.
        curves: Measured.
    """

    base: DeviceConstants
    curves: Sequence[Curve]

    @property
    def priors(self) -> Array:
        """(4, 5) means, standard deviations, and what a physical device has at least and most."""
        static, top = self.base.static_watts, self.base.top_clock_mhz
        hottest = self.base.power_limit_watts
        rows = [
            (static, 0.3 * static, 5.0, min(3 * static, 0.7 * hottest)),
            (0.75 * top, 0.2 * top, 0.4 * top, top),
            (0.6, 0.3, 0.02, 3.0),
            (hottest, 0.1 * hottest, 0.8 * hottest, 1.5 * hottest),
            (math.log(33), 0.5, math.log(4), math.log(150)),
        ]
        return np.array(rows).T.copy()

    def unpack(self, x: Array) -> tuple[DeviceConstants, list[Response]]:
        constants = replace(
            self.base,
            static_watts=float(x[0]),
            knee_mhz=float(x[1]),
            knee_per_ghz=float(x[2]),
            power_limit_watts=float(x[3]),
            cap_sharpness=math.exp(x[4]),
        )
        hottest, top_mhz = self.base.power_limit_watts, self.base.top_clock_mhz
        responses = []
        for curve, (fixed, clock, activity) in zip(self.curves, x[5:].reshape(-1, 3), strict=True):
            top = curve.top.seconds
            per_mhz = float(activity * hottest / top_mhz)
            responses.append(_response(float(fixed * top), float(clock * top), per_mhz))
        return constants, responses

    def misfit(self, x: Array) -> Array:
        """Residuals of all points, in standard errors."""
        constants, responses = self.unpack(x)
        parts = []
        for curve, response in zip(self.curves, responses, strict=True):
            clocks, seconds, joules = np.array(curve.points, dtype=float).T
            modelled_seconds, modelled_joules = evaluate(response, constants, clocks)
            parts.append(np.log(modelled_seconds / seconds) / TIME_ERROR)
            parts.append(np.log(modelled_joules / joules) / ENERGY_ERROR)
        return np.concatenate(parts)

    def solve(self) -> Any:
        """SciPy's result; the last five residuals are those of the priors."""
        require("energy", "a calibration of energy", "scipy")
        from scipy.optimize import least_squares

        count = len(self.curves)
        means, errors, lowest, highest = self.priors

        def residuals(x: Array) -> Array:
            return np.concatenate([self.misfit(x), (x[:5] - means) / errors])

        low = np.concatenate([lowest, [0.0, 0.02, 0.05] * count])
        high = np.concatenate([highest, [1.2, 1.3, 8.0] * count])
        start = np.concatenate([means, [0.2, 0.8, 0.7] * count])
        start = np.clip(start, low + 1e-3 * (high - low), high - 1e-3 * (high - low))
        return least_squares(
            residuals, start, bounds=(low, high), loss="soft_l1", x_scale=high - low
        )

    def refuse_undetermined(
        self, known: Sequence[str], errors: Array, constants: DeviceConstants
    ) -> None:
        """Refuse constants that the data leave to their priors, and a knee that was not seen.

        Raises:
            EnergyError: Names the constant.
        """
        for name, error, prior in zip(known, errors, self.priors[1], strict=False):
            if error > LEARNED * prior:
                raise EnergyError(
                    f"{name} cannot be determined from this profile (standard error {error:.3g}, "
                    f"{prior:.3g} before any data): measure more clocks, on both sides of the "
                    "knee, or take the constants from another model on the same device"
                )
        low = min(curve.points[0].clock_mhz for curve in self.curves)
        high = max(curve.points[-1].clock_mhz for curve in self.curves)
        # A knee outside the measured clocks, or one behind which nothing rises, was not seen.
        if not (low < constants.knee_mhz < high and constants.knee_per_ghz > 2 * float(errors[2])):
            raise EnergyError(
                f"knee_mhz cannot be determined from clocks of {low} to {high} MHz: power shows no "
                "beginning of a voltage rise there; measure more clocks, or take the constants "
                "from another model on the same device"
            )


def _response(fixed_seconds: float, clock_seconds: float, activity: float) -> Response:
    return Response(
        fixed_seconds=fixed_seconds, clock_seconds=clock_seconds, activity_watts_per_mhz=activity
    )


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
    known = calibration.deviations
    alike = [item for other, item in known.items() if key and other.phase == key.phase]
    deviation = mean(alike or list(known.values())) if known else None
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
    flags = []
    if len(ordered) == 1:
        flags.append("from one probe: the share of time that no clock changes is assumed")
    cap = cap_clock_mhz(calibration.constants, response.activity_watts_per_mhz)
    if ordered[0].clock_mhz > cap:
        flags.append(
            f"all probes are above {cap:.0f} MHz, where the power limit sets the clock: probe a "
            "lower one"
        )
    time_spread, energy_spread = STRANGE_TIME, STRANGE_ENERGY
    if alike and deviation is not None:
        time_spread = max(deviation.time_noise, 0.002)
        energy_spread = max(deviation.energy_noise, 0.005)
    else:
        flags.append("the device was not calibrated on an operation of this phase")
    return replace(
        response,
        probes=ordered,
        deviation=deviation,
        time_spread=time_spread,
        energy_spread=energy_spread,
        flags=tuple(flags),
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
    require("energy", "a calibration of energy", "scipy")
    from scipy.optimize import least_squares

    clocks, seconds, joules = points
    longest, watts = float(seconds[-1]), float(np.max(joules / seconds))
    per_mhz = watts / calibration.constants.top_clock_mhz

    def response(x: Array) -> Response:
        return _response(float(x[0]) * longest, float(x[1]) * longest, float(x[2]) * per_mhz)

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
