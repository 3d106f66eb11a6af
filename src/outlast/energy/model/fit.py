"""Constants of a kind of device from measured curves, with priors, bounds and standard errors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import median_filter
from scipy.optimize import least_squares

from outlast.energy.model.equations import DeviceConstants, Response, cap_clock_mhz, evaluate
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outlast.energy.profile import Curve, Key, Profile


Array: TypeAlias = NDArray[np.float64]


SMOOTHED_CLOCKS = 3
"""A median over as many clocks keeps steps of the device and drops noise of single points."""


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
    smoothed = median_filter(values, size=SMOOTHED_CLOCKS, mode="nearest")
    return smoothed, float(np.std(values - smoothed))


TIME_ERROR, ENERGY_ERROR = 0.01, 0.01
"""Relative errors of a measured point that residuals are counted in."""


LEARNED = 0.8
"""A constant is known when data made its standard error smaller than this share of the prior's."""


FITTED = ("static_watts", "knee_mhz", "knee_per_ghz", "power_limit_watts", "cap_sharpness")


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


@dataclass(frozen=True)
class _Scale:
    """Priors (mean, standard deviation) of the constants; what a physical device can have."""

    static_watts: tuple[float, float]
    top_mhz: float
    hottest_watts: float

    @property
    def means(self) -> Array:
        return np.array(
            [self.static_watts[0], 0.75 * self.top_mhz, 0.6, self.hottest_watts, math.log(33)]
        )

    @property
    def errors(self) -> Array:
        return np.array(
            [self.static_watts[1], 0.2 * self.top_mhz, 0.3, 0.1 * self.hottest_watts, 0.5]
        )

    @property
    def low(self) -> Array:
        return np.array([5.0, 0.4 * self.top_mhz, 0.02, 0.8 * self.hottest_watts, math.log(4)])

    @property
    def high(self) -> Array:
        static = min(3 * self.static_watts[0], 0.7 * self.hottest_watts)
        return np.array([static, self.top_mhz, 3.0, 1.5 * self.hottest_watts, math.log(150)])


def fit_constants(profile: Profile, *, strict: bool = True) -> DeviceConstants:
    """Constants of a device from measured curves; see `calibrate`."""
    return calibrate(profile, strict=strict).constants


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
    curves = _distinct(profile)
    if not curves:
        raise EnergyError(
            "the profile has no curve with 2 clocks or more: constants of the device need a sweep"
        )
    top = max(curve.top.clock_mhz for curve in curves.values())
    hottest = max(p.joules / p.seconds for curve in curves.values() for p in curve.points)
    scale = _Scale((profile.blocking_watts, 0.3 * profile.blocking_watts), top, hottest)
    base = DeviceConstants(
        name=profile.device,
        top_clock_mhz=top,
        static_watts=scale.means[0],
        knee_mhz=scale.means[1],
        knee_per_ghz=scale.means[2],
        power_limit_watts=hottest,
        blocking_watts=profile.blocking_watts,
    )
    problem = _Problem(base, scale, list(curves.values()))
    solution = problem.solve()
    constants, responses = problem.unpack(solution.x)
    jacobian = solution.jac
    misfit = problem.misfit(solution.x)
    widening = max(1.0, float(np.mean(misfit**2)))
    scaled = jacobian.copy()
    # Priors are not widened: they are what is believed, not what was measured.
    scaled[: len(misfit)] /= math.sqrt(widening)
    covariance = np.linalg.pinv(scaled.T @ scaled)
    errors = np.asarray(np.sqrt(np.maximum(np.diag(covariance)[:5], 0.0)))
    capped = [
        cap_clock_mhz(constants, response.activity_watts_per_mhz) < 1.02 * top
        for response in responses
    ]
    if not any(capped):
        constants = replace(constants, power_limit_watts=math.inf)
    # Without a cap there is nothing to know about it.
    known = FITTED[:3] if not any(capped) else FITTED[:4]
    if strict:
        _refuse_unknown(known, errors, scale)
        _refuse_unseen_knee(constants, float(errors[2]), list(curves.values()))
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
    """Unknowns: five constants, then three numbers of each curve relative to its top point."""

    base: DeviceConstants
    scale: _Scale
    curves: Sequence[Curve]

    def unpack(self, x: Array) -> tuple[DeviceConstants, list[Response]]:
        constants = replace(
            self.base,
            static_watts=float(x[0]),
            knee_mhz=float(x[1]),
            knee_per_ghz=float(x[2]),
            power_limit_watts=float(x[3]),
            cap_sharpness=math.exp(x[4]),
        )
        responses = []
        for curve, (fixed, clock, activity) in zip(self.curves, x[5:].reshape(-1, 3), strict=True):
            top = curve.top.seconds
            responses.append(
                Response(
                    fixed_seconds=float(fixed * top),
                    clock_seconds=float(clock * top),
                    activity_watts_per_mhz=float(
                        activity * self.scale.hottest_watts / self.scale.top_mhz
                    ),
                )
            )
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
        count = len(self.curves)
        scale = self.scale

        def residuals(x: Array) -> Array:
            return np.concatenate([self.misfit(x), (x[:5] - scale.means) / scale.errors])

        low = np.concatenate([scale.low, [0.0, 0.02, 0.05] * count])
        high = np.concatenate([scale.high, [1.2, 1.3, 8.0] * count])
        start = np.concatenate([scale.means, [0.2, 0.8, 0.7] * count])
        start = np.clip(start, low + 1e-3 * (high - low), high - 1e-3 * (high - low))
        return least_squares(
            residuals, start, bounds=(low, high), loss="soft_l1", x_scale=high - low
        )


def _distinct(profile: Profile) -> dict[Key, Curve]:
    """Curves with clocks, copies left out."""
    found: dict[Key, Curve] = {}
    for key in sorted(profile.curves):
        curve = profile.curves[key]
        if len(curve.points) >= 2 and curve not in found.values():
            found[key] = curve
    return found


def _refuse_unknown(known: Sequence[str], errors: Array, scale: _Scale) -> None:
    for name, error, prior in zip(known, errors, scale.errors, strict=False):
        if error > LEARNED * prior:
            raise EnergyError(
                f"{name} cannot be determined from this profile (standard error {error:.3g}, "
                f"{prior:.3g} before any data): measure more clocks, on both sides of the knee, "
                "or take the constants from another model on the same device"
            )


def _refuse_unseen_knee(
    constants: DeviceConstants, slope_error: float, curves: Sequence[Curve]
) -> None:
    """A knee outside the measured clocks, or one behind which nothing rises, was not seen."""
    low = min(curve.points[0].clock_mhz for curve in curves)
    high = max(curve.points[-1].clock_mhz for curve in curves)
    if low < constants.knee_mhz < high and constants.knee_per_ghz > 2 * slope_error:
        return
    raise EnergyError(
        f"knee_mhz cannot be determined from clocks of {low} to {high} MHz: power shows no "
        "beginning of a voltage rise there; measure more clocks, or take the constants from "
        "another model on the same device"
    )
