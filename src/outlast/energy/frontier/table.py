"""Durations and effective energies of all operations as arrays, for searches over clocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outlast.energy.profile import Point, effective

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

Places = list[int]
"""A plan: of each operation, which of its points it runs at; 0 is the fastest one."""


@dataclass(frozen=True, eq=False)
class Curves:
    """What each operation may run at, as arrays; operations that are alike share theirs.

    Attributes:
        seconds: (operations,) arrays of (points,), rising.
        joules: (operations,) arrays of (points,) effective energy, falling.
        corners: (operations,) which places are corners of the lower hull.
    """

    seconds: list[npt.NDArray[np.float64]]
    joules: list[npt.NDArray[np.float64]]
    corners: list[list[int]]

    @classmethod
    def of(
        cls,
        points: Sequence[Sequence[Point]],
        hulls: Sequence[Sequence[Point]],
        blocking_watts: float,
    ) -> Curves:
        """The arrays of Pareto points and their hulls, fastest first."""
        known: dict[int, tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], list[int]]] = {}
        for own, hull in zip(points, hulls, strict=True):
            if id(own) not in known:
                corners = set(hull)
                known[id(own)] = (
                    np.array([point.seconds for point in own]),
                    np.array([effective(point, blocking_watts) for point in own]),
                    [place for place, point in enumerate(own) if point in corners],
                )
        found = [known[id(own)] for own in points]
        return cls([f[0] for f in found], [f[1] for f in found], [f[2] for f in found])

    def durations(self, places: Sequence[int]) -> list[float]:
        """(operations,) seconds of a plan."""
        return [float(own[place]) for own, place in zip(self.seconds, places, strict=True)]

    def energy(self, places: Sequence[int]) -> float:
        """Effective joules of a plan."""
        return float(sum(own[place] for own, place in zip(self.joules, places, strict=True)))

    def below(self, seconds: Sequence[float]) -> Places:
        """The slowest corners of the hulls that are not slower than given durations."""
        return [
            max((c for c in corners if own[c] <= limit * (1 + 1e-9)), default=0)
            for own, corners, limit in zip(self.seconds, self.corners, seconds, strict=True)
        ]
