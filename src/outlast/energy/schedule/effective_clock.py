"""The clock at which an operation really ran, found from how long it took.

A device at its power limit, or one that has not yet switched, runs slower than it was asked to.
Below the limit time follows ``t = a + b / f`` (a: memory and launches, b: computing). So the
measured times of one kind of operation give a, b and the clock above which it got no faster; and
above that clock each measured time gives the clock that was in force.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Array: TypeAlias = npt.NDArray[np.float64]

STEP_MHZ = 15.0
"""Distance of candidates for the highest clock reached: that of NVIDIA's clock steps."""

_LOWEST_SHARE = 0.8  # Of the highest clock reached: a slower time than that is no clock's doing.


@dataclass(frozen=True)
class EffectiveClock:
    """Of one stage and phase.

    Attributes:
        fixed_seconds: a, the time that no clock changes.
        cycles_millions: b, millions of clock cycles.
        reached_mhz: Clock above which a higher one makes nothing faster.
    """

    fixed_seconds: float
    cycles_millions: float
    reached_mhz: float

    @staticmethod
    def fitted(clocks_mhz: Array, seconds: Array) -> EffectiveClock:
        """Fit by least squares of relative errors.

        Args:
            clocks_mhz: (samples,) asked for.
            seconds: (samples,) measured.

        Returns:
            One that believes every clock where only one clock was measured.
        """
        from scipy.optimize import nnls

        lowest, highest = float(clocks_mhz.min()), float(clocks_mhz.max())
        best = EffectiveClock(0.0, 0.0, float("inf"))
        best_error = float("inf")
        # The highest comes first, and a lower one must be better, so that noise throttles nothing.
        for reached in np.arange(highest, lowest, -STEP_MHZ):
            slowness = 1.0 / np.minimum(clocks_mhz, reached)
            terms = np.stack([np.ones_like(slowness), slowness], axis=1) / seconds[:, None]
            (fixed, cycles), norm = nnls(terms, np.ones_like(seconds))
            if norm < best_error * (1 - 1e-9):
                best, best_error = EffectiveClock(fixed, cycles, float(reached)), norm
        return best

    def of(self, clocks_mhz: Array, seconds: Array) -> Array:
        """(samples,) clocks in force, in MHz: at most those that were asked for."""
        computing = np.maximum(seconds - self.fixed_seconds, 1e-12)
        lowest = _LOWEST_SHARE * min(self.reached_mhz, float(clocks_mhz.max(initial=0.0)))
        found = np.clip(self.cycles_millions / computing, lowest, None)
        in_force: Array = np.where(
            clocks_mhz > self.reached_mhz, np.minimum(found, clocks_mhz), clocks_mhz
        )
        return in_force
