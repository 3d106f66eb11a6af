"""The linear programme of the time-energy trade-off, whose optimum no plan can beat.

Project crashing (Kelley 1961; Fulkerson 1961): variables are the start s_i of each operation and
how far it is slowed down along each segment k of its lower hull, x_ik in [0, length_ik]. Then its
duration is d_i = d_i,min + sum_k x_ik and its effective energy e_i,max + sum_k slope_ik * x_ik;
since slopes rise along a hull, an optimum fills segments in order. Minimise the sum of effective
energies subject to s_i + d_i <= s_j for each edge and s_i + d_i <= T for the last operations.

Times are in units of which the fastest step takes 2 to 8, energies in as many joules, because the
tolerances of HiGHS are absolute. Only T changes between deadlines, so the dual simplex method goes
on from the last optimum.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import coo_array

from outlast.energy.profile import effective
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from scipy.sparse import csc_array

    from outlast.energy.profile import Point
    from outlast.energy.schedule import Schedule

    Floats = npt.NDArray[np.float64]


def highs_model(
    costs: Floats,
    bounds: tuple[Floats, Floats],
    matrix: csc_array,
    limits: tuple[Floats | float, Floats | float],
    *,
    integral: Floats | None = None,
) -> Any:
    """A `highspy.Highs` that minimises ``costs @ x``; call its `run`.

    Args:
        costs: (columns,).
        bounds: (columns,) lower and upper ones of x.
        matrix: (rows, columns).
        limits: (rows,) or a number: lower and upper ones of ``matrix @ x``.
        integral: (columns,) which of x must be whole; None for a linear programme.
    """
    import highspy

    count = matrix.shape[0]
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(costs), count
    model.col_cost_ = costs
    model.col_lower_, model.col_upper_ = bounds
    model.row_lower_, model.row_upper_ = (
        np.broadcast_to(np.asarray(limit, np.float64), count).copy() for limit in limits
    )
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = matrix.indptr
    model.a_matrix_.index_ = matrix.indices
    model.a_matrix_.value_ = matrix.data
    if integral is not None:
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        model.integrality_ = [kinds[bool(item)] for item in integral]
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    # One thread: the problems are small, and the order of pivots must not depend on the machine.
    highs.setOptionValue("threads", 1)
    highs.passModel(model)
    return highs


def lower_hull(points: Sequence[Point], blocking_watts: float) -> tuple[Point, ...]:
    """The corners of the largest convex function of time that is nowhere above the points.

    Args:
        points: As `Curve.pareto` gives them: fastest first, effective energy falling.
        blocking_watts: What a waiting device draws.

    Returns:
        Corners from the fastest to the point of least effective energy.
    """
    corners: list[Point] = []
    for point in points:
        while len(corners) >= 2:
            before, after = slopes((*corners[-2:], point), blocking_watts)
            if after > before:
                break
            corners.pop()
        corners.append(point)
    return tuple(corners)


def slopes(corners: Sequence[Point], blocking_watts: float) -> list[float]:
    """(corners - 1,) effective watts of each segment: negative and rising."""
    return [
        (effective(b, blocking_watts) - effective(a, blocking_watts)) / (b.seconds - a.seconds)
        for a, b in itertools.pairwise(corners)
    ]


class DeadlineError(EnergyError):
    """No plan meets the deadline.

    Args:
        message: The sentence.
        shortest_seconds: The shortest deadline that can be met.
    """

    def __init__(self, message: str, shortest_seconds: float) -> None:
        super().__init__(message)
        self.shortest_seconds = shortest_seconds


def unit_of(seconds: float, least: float) -> float:
    """The power of 4 in which a time is from `least` to below four times that; exact to divide by.

    Args:
        seconds: Above 0.
        least: Above 0.
    """
    return float(4.0 ** math.floor(math.log(seconds / least, 4)))


@dataclass(frozen=True, eq=False)
class Relaxed:
    """The optimum for one deadline, where durations between measured ones are allowed.

    Attributes:
        joules: Effective energy, a lower bound for all plans.
        seconds: (operations,) durations.
        starts: (operations,) in seconds.
        watts: What one more second until the deadline would save: minus the derivative of `joules`.
        edge_watts: (edges,) what one second of waiting between two operations costs: not negative.
        operation_watts: (operations,) what one second that an operation takes costs. It is the sum
            of `edge_watts` after the operation, and before it, but for the first and last ones.
    """

    joules: float
    seconds: npt.NDArray[np.float64]
    starts: npt.NDArray[np.float64]
    watts: float
    edge_watts: npt.NDArray[np.float64]
    operation_watts: npt.NDArray[np.float64]


class LinearProgram:
    """The linear programme of one schedule; solve it for as many deadlines as needed.

    Args:
        schedule: The step.
        hulls: Of each operation, see `lower_hull`.
        blocking_watts: Per device.

    Attributes:
        fastest_seconds: The shortest deadline that can be met.
    """

    def __init__(
        self, schedule: Schedule, hulls: Sequence[Sequence[Point]], blocking_watts: float
    ) -> None:
        self._schedule = schedule
        count, edges = len(schedule.operations), schedule.edges
        shortest = [hull[0].seconds for hull in hulls]
        self.fastest_seconds = schedule.makespan(shortest)
        self._unit = unit_of(self.fastest_seconds, 2.0)
        self._shortest = np.array(shortest) / self._unit
        self._constant = float(sum(effective(hull[0], blocking_watts) for hull in hulls))
        lengths = [np.diff([point.seconds for point in hull]) for hull in hulls]
        # Which operation each segment belongs to.
        self._owner = np.repeat(np.arange(count), [len(length) for length in lengths])
        self._last = [i for i in range(count) if not schedule.successors[i]]
        # The operation at the beginning of each row: of edges, then of those that come last.
        self._before = np.array([edge[0] for edge in edges] + self._last)
        rows = [*((row, *edge) for row, edge in enumerate(edges))]
        rows += [(row, index, -1) for row, index in enumerate(self._last, start=len(edges))]
        # Rows in which each operation's end stands, to put its segments there.
        ends: list[list[int]] = [[] for _ in range(count)]
        for row, index, _ in rows:
            ends[index].append(row)
        entries = [(row, index, 1.0) for row, index, _ in rows]
        entries += [(row, after, -1.0) for row, _, after in rows if after >= 0]
        entries += [
            (row, column, 1.0)
            for column, owner in enumerate(self._owner.tolist(), start=count)
            for row in ends[owner]
        ]
        at_row, at_column, value = zip(*entries, strict=True)
        slope = [watts for hull in hulls for watts in slopes(hull, blocking_watts)]
        costs = np.array([0.0] * count + slope)
        matrix = coo_array((value, (at_row, at_column)), shape=(len(rows), len(costs))).tocsc()
        upper = np.concatenate([np.full(count, np.inf), np.concatenate(lengths) / self._unit])
        limits = (-np.inf, -self._shortest[self._before])
        self._highs = highs_model(costs, (np.zeros(len(costs)), upper), matrix, limits)

    def solve(self, deadline_seconds: float) -> Relaxed:
        """The optimum for a deadline.

        Raises:
            DeadlineError: When no clocks meet it; says the shortest feasible one.
            EnergyError: When HiGHS finds no optimum.
        """
        # A deadline that is the fastest plan's own time must not fail by rounding.
        if deadline_seconds < self.fastest_seconds * (1 - 1e-9):
            raise DeadlineError(
                f"deadline = {deadline_seconds:g} s cannot be met: at the fastest clocks the step "
                f"takes {self.fastest_seconds:.6g} s",
                self.fastest_seconds,
            )
        deadline = max(deadline_seconds, self.fastest_seconds * (1 + 1e-12)) / self._unit
        first = len(self._schedule.edges)
        for row, index in enumerate(self._last, start=first):
            self._highs.changeRowBounds(row, -np.inf, deadline - self._shortest[index])
        self._highs.run()
        status = self._highs.getModelStatus()
        if self._highs.modelStatusToString(status) != "Optimal":
            raise EnergyError(
                f"the linear programme for deadline = {deadline_seconds:g} s ended as "
                f"{self._highs.modelStatusToString(status)}: check the profile's times for values "
                "that differ by many orders of magnitude"
            )
        solution = self._highs.getSolution()
        values = np.asarray(solution.col_value)
        count = len(self._shortest)
        slowed = np.bincount(self._owner, weights=values[count:], minlength=count)
        # A dual is negative where more room in its row would save energy.
        prices = np.maximum(-np.asarray(solution.row_dual), 0.0)
        operation_watts = np.zeros(count)
        np.add.at(operation_watts, self._before, prices)
        return Relaxed(
            joules=self._highs.getInfo().objective_function_value * self._unit + self._constant,
            seconds=(self._shortest + slowed) * self._unit,
            starts=values[:count] * self._unit,
            watts=float(prices[first:].sum()),
            edge_watts=prices[:first],
            operation_watts=operation_watts,
        )
