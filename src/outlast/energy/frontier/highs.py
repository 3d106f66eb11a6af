"""Linear and integer programmes for HiGHS, silent and on one thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    from scipy.sparse import csc_array

    Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Rows:
    """Constraints ``lower <= matrix @ x <= upper``.

    Attributes:
        matrix: (rows, columns).
        lower: (rows,) or a number.
        upper: (rows,) or a number.
    """

    matrix: csc_array
    lower: Floats | float
    upper: Floats | float


def programme(
    costs: Floats, bounds: tuple[Floats, Floats], rows: Rows, *, integral: Floats | None = None
) -> Any:
    """A `highspy.Highs` that minimises ``costs @ x``; call its `run`.

    Args:
        costs: (columns,).
        bounds: (columns,) lower and upper ones.
        rows: The constraints.
        integral: (columns,) which of x must be whole; None for a linear programme.
    """
    import highspy

    matrix = rows.matrix
    count = matrix.shape[0]
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(costs), count
    model.col_cost_ = costs
    model.col_lower_, model.col_upper_ = bounds
    model.row_lower_ = np.broadcast_to(np.asarray(rows.lower, np.float64), count).copy()
    model.row_upper_ = np.broadcast_to(np.asarray(rows.upper, np.float64), count).copy()
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
