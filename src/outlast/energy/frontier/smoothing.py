"""Profiles without the noise of their measurement, and the time that a plan should keep in hand.

A planner picks the points whose errors flatter it (the winner's curse), so plans from a noisy
profile miss their deadline on the device. Each curve is smoothed first: power and time are smooth
functions of the clock, so log time and log energy get the curve z that minimises

    sum (y_i - z_i)^2 + lambda * sum (second differences of z)^2

(Whittaker 1923), lambda from generalised cross-validation (Golub, Heath and Wahba 1979). Curves
of the same phase at the same clocks, such as those of equal stages, lend each other strength: their
mean is smoothed, and so is what each differs from it, which mostly is a straight line.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from outlast.energy.profile import Curve, Point, Profile
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from outlast.energy.profile import Key

Floats: TypeAlias = "npt.NDArray[np.float64]"

MARGIN_PER_NOISE = 0.75
"""Share of the noise to keep free of the deadline; see `margin_for`."""
_STRENGTHS = np.geomspace(1e-3, 1e6, 46)
# Fewer points than this show no noise, because any of them may be a bend.
_FEWEST = 6
# From median absolute deviation to standard deviation of a normal distribution.
_NORMAL = 1.4826


def noise_of(profile: Profile) -> float:
    """Standard deviation of the times' noise, as a share of them.

    Third differences of log time cancel what is smooth; of independent errors they have the
    variance 20 sigma^2 (Gasser, Sroka and Jennen-Steinmetz 1986). The median over all curves is
    not moved by single jumps.

    Raises:
        EnergyError: When no curve has enough points.
    """
    differences = [
        np.diff(np.log([point.seconds for point in curve.points]), 3)
        for curve in profile.curves.values()
        if len(curve.points) >= _FEWEST
    ]
    if not differences:
        raise EnergyError(
            f"the profile has no curve with {_FEWEST} clocks or more, too few to estimate its "
            "noise: pass noise, e.g. 0.01 for 1 %"
        )
    return float(_NORMAL * np.median(np.abs(np.concatenate(differences))) / np.sqrt(20.0))


def margin_for(profile: Profile, noise: float | None = None) -> float:
    """Share of the deadline to keep free so that a smoothed profile's plan meets it.

    `MARGIN_PER_NOISE` times the noise: found by repeating plans with 1 and 2 % noise on two
    measured profiles of GPT-3, of which at least 95 % then met the deadline without noise.

    Args:
        profile: As it was measured, not smoothed.
        noise: Standard deviation as a share, e.g. 0.01; estimated where None.

    Raises:
        EnergyError: When the noise is not a share or cannot be estimated.
    """
    return MARGIN_PER_NOISE * _checked(profile, noise)


def smoothed(profile: Profile, noise: float | None = None) -> Profile:
    """The profile with smooth curves; the measured one where it has next to no noise.

    Args:
        profile: As it was measured.
        noise: Standard deviation of times and energies as a share, e.g. 0.01. It keeps curves from
            being smoothed further than the noise explains; estimated where None.

    Raises:
        EnergyError: When the noise is not a share or cannot be estimated.
    """
    sigma = _checked(profile, noise)
    if sigma < 1e-6:
        return profile
    alike: dict[tuple[str, tuple[int, ...]], list[Key]] = {}
    for key, curve in profile.curves.items():
        clocks = tuple(point.clock_mhz for point in curve.points)
        alike.setdefault((key.phase, clocks), []).append(key)
    curves = dict(profile.curves)
    for (_, clocks), keys in alike.items():
        if len(clocks) >= _FEWEST:
            found = _smooth([profile.curves[key] for key in keys], sigma)
            curves.update(zip(keys, found, strict=True))
    return replace(profile, curves=curves)


def _checked(profile: Profile, noise: float | None) -> float:
    if noise is None:
        return noise_of(profile)
    if not 0 <= noise < 1:
        raise EnergyError(f"noise = {noise:g} is not a share of the times: say e.g. 0.01 for 1 %")
    return noise


def _smooth(curves: Sequence[Curve], sigma: float) -> list[Curve]:
    """Smooth curves at the same clocks, together."""
    clocks = np.array([point.clock_mhz for point in curves[0].points], dtype=float)
    found = []
    for values in (
        np.log([[point.seconds for point in curve.points] for curve in curves]),
        np.log([[point.joules for point in curve.points] for curve in curves]),
    ):
        mean = values.mean(axis=0)
        common = _whittaker(clocks, mean, sigma / len(curves) ** 0.5)
        found.append([common + _whittaker(clocks, name - mean, sigma) for name in values])
    return [
        Curve(
            tuple(
                Point(point.clock_mhz, float(time), float(energy))
                for point, time, energy in zip(curve.points, times, energies, strict=True)
            )
        )
        for curve, times, energies in zip(curves, np.exp(found[0]), np.exp(found[1]), strict=True)
    ]


def _whittaker(clocks: Floats, values: Floats, sigma: float) -> Floats:
    """The smooth curve of least generalised cross-validation whose residuals are at most noise."""
    count = len(values)
    steps = np.diff(clocks) / np.mean(np.diff(clocks))
    first = np.diff(np.eye(count), axis=0) / steps[:, None]
    second = np.diff(first, axis=0) / ((steps[1:] + steps[:-1]) / 2)[:, None]
    roughness, vectors = np.linalg.eigh(second.T @ second)
    coefficients = vectors.T @ values
    best, score = values, np.inf
    for strength in _STRENGTHS:
        kept = 1 / (1 + strength * np.clip(roughness, 0, None))
        residual = float(np.sum(((1 - kept) * coefficients) ** 2))
        freedom = count - float(kept.sum())
        # A curve that is off by more than the noise explains is too stiff.
        if residual > 2.0 * sigma**2 * freedom:
            continue
        found = count * residual / freedom**2
        if found < score:
            best, score = vectors @ (kept * coefficients), found
    return best
