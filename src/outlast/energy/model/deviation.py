"""What operations of a device do beyond the equations, learned from measured curves.

A discrepancy function after Kennedy and O'Hagan (J. R. Stat. Soc. B 63, 2001): the logarithm of
measured over modelled, as a function of the clock. Real devices have steps that no simple law
has, e.g. the backward passes of GPT-3 on A40 get 6 % faster when the clock falls below 975 MHz.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.ndimage import median_filter

from outlast.energy.model.response import evaluate

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from outlast.energy.model.constants import DeviceConstants
    from outlast.energy.model.response import Response
    from outlast.energy.profile import Curve

    Array = npt.NDArray[np.float64]

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
    """How a measured curve differs from its fit."""
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
