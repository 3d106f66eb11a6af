"""Product codes: workers in a grid, a code along its rows and another one along its columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from scipy.sparse import csr_array, kron

from outlast.coding.certificate import roundoff
from outlast.coding.code import TOLERANCE, GradientCode
from outlast.errors import CodingError

if TYPE_CHECKING:
    import numpy.typing as npt

_RESTORED = 1e-9
"""Largest error, as a share of a row's norm, at which that row counts as a sum of others."""


class Kronecker(GradientCode):
    """B = B_1 (x) B_2: worker (i, j) computes chunk (c, e) where i computes c and j computes e.

    Worker (i, j) is number i n_2 + j, chunk (c, e) is number c k_2 + e. Where the survivors are
    themselves a product S_1 x S_2 (whole racks or whole positions are gone), optimal weights and
    coefficients are the products of the factors', and the error is
    k_1 k_2 - (k_1 - err_1)(k_2 - err_2). Other sets are decoded by least squares.

    Any (s_1 + 1)(s_2 + 1) - 1 stragglers are tolerated: they leave more than s_2 gaps in at most
    s_1 rows, the other rows decode by the second code, and these suffice for the first.

    Args:
        first: Code of the rows' numbers, n_1 workers.
        second: Code within a row, n_2 workers.
        tolerance: Largest rounding error, as a share of the gradient, that is accepted.

    Raises:
        CodingError: For codes with messages of different types, or too much rounding.
    """

    name: ClassVar[str] = "Kronecker product code"
    source: ClassVar[str] = "Sakorikar and Wang 2021"

    def __init__(
        self, first: GradientCode, second: GradientCode, *, tolerance: float = TOLERANCE
    ) -> None:
        if first.dtype != second.dtype:
            raise CodingError(
                f"codes of dtype = {first.dtype!r} and dtype = {second.dtype!r} have no common "
                "messages; give both the same"
            )
        self.first = first
        self.second = second
        self.matrix = csr_array(kron(first.matrix, second.matrix, format="csr"))
        self.dtype = first.dtype
        tolerances = (first.tolerance, second.tolerance)
        self.tolerance = (tolerances[0] + 1) * (tolerances[1] + 1) - 1
        if first.binary and second.binary:
            return
        # Sets of stragglers that are products have products of weights, and so of rounding.
        factors = (first.conditioning.rounding, second.conditioning.rounding)
        rounding = factors[0] * factors[1] / roundoff(self.dtype)
        if not rounding <= tolerance:
            raise CodingError(
                f"rounding in {self.dtype} could be {rounding:.2g} of the gradient, the product of "
                f"{first.name} and {second.name}, above tolerance = {tolerance:g}; take "
                "FractionalRepetition for one of them, or a wider dtype"
            )

    def grid(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """(n_1, n_2) the mask of survivors as a grid."""
        return alive.reshape(self.first.workers, self.second.workers)

    def optimal_weights(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
        """(workers,) products of the factors' weights where survivors are a product."""
        grid = self.grid(alive)
        rows, columns = np.any(grid, axis=1), np.any(grid, axis=0)
        if np.array_equal(grid, np.outer(rows, columns)):
            first = self.first.optimal_weights(rows)
            return np.outer(first, self.second.optimal_weights(columns)).ravel()
        return super().optimal_weights(alive)


@dataclass(frozen=True, eq=False)
class _Restoration:
    """Gaps of one line of the grid, each a sum of what the line has.

    Attributes:
        axis: 0 where the line is a row, 1 where it is a column.
        line: Its number.
        present: Positions that were known.
        gaps: Positions that become known.
        coefficients: (present, gaps) the sums.
    """

    axis: int
    line: int
    present: npt.NDArray[np.int64]
    gaps: npt.NDArray[np.int64]
    coefficients: npt.NDArray[Any]


class ProductCode(Kronecker):
    """Workers in a grid, decoded row by row, then column by column, until nothing changes.

    A line of the grid (all messages of a row or of a column) is a word of its own code: where the
    messages that are there determine a missing one, that one is restored, which may complete lines
    of the other direction. As soon as rows that decode suffice for the column code (or the other
    way round) the gradient is exact. Most sets of stragglers beyond the tolerance
    (s_1 + 1)(s_2 + 1) - 1 are exact as well; for the rest the weights are those of least squares.

    Args:
        row: Code within a row, n_2 workers.
        column: Code within a column, n_1 workers.
        tolerance: As for `Kronecker`.
    """

    name: ClassVar[str] = "product code"
    source: ClassVar[str] = "Elias 1954, for the two codes given"

    def __init__(
        self, row: GradientCode, column: GradientCode, *, tolerance: float = TOLERANCE
    ) -> None:
        super().__init__(column, row, tolerance=tolerance)
        self.row = row
        self.column = column

    def optimal_weights(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
        """(workers,) exact weights by peeling where it succeeds, else of least error."""
        weights = self.peeled_weights(alive)
        return super().optimal_weights(alive) if weights is None else weights

    def _optimal_errors(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """0 within the tolerance and where peeling succeeds; only the rest is computed."""
        errors = np.zeros(len(alive))
        beyond = np.flatnonzero((~alive).sum(axis=1) > self.tolerance)
        stuck = [draw for draw in beyond if self.peeled_weights(alive[draw]) is None]
        if stuck:
            errors[stuck] = super()._optimal_errors(alive[stuck])
        return errors

    def peeled_weights(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[Any] | None:
        """(workers,) weights of an exact decoding by rows and columns; None where that gets stuck.

        Never None for up to `tolerance` stragglers.
        """
        known = self.grid(alive).copy()
        restorations: list[_Restoration] = []
        while True:
            weights = self._exact_weights(known)
            if weights is not None:
                return self._without_restored(weights, restorations).ravel()
            found = _restore(known, self.row, 0)
            found += _restore(known, self.column, 1)
            if not found:
                return None
            restorations += found

    def _exact_weights(self, known: npt.NDArray[np.bool_]) -> npt.NDArray[Any] | None:
        """(n_1, n_2) weights from lines that decode exactly; None where these are too few."""
        for grid, outer, inner in (
            (known, self.column, self.row),
            (known.T, self.row, self.column),
        ):
            lines, of_line = np.unique(grid, axis=0, return_inverse=True)
            decoded = [inner.decode(line) for line in lines]
            exact = np.array([name.certificate.exact for name in decoded])[of_line.ravel()]
            total = outer.decode(exact)
            if total.certificate.exact:
                rows = np.array([name.weights for name in decoded])[of_line.ravel()]
                weights = total.weights[:, None] * rows
                return np.asarray(weights if grid is known else weights.T)
        return None

    @staticmethod
    def _without_restored(
        weights: npt.NDArray[Any], restorations: list[_Restoration]
    ) -> npt.NDArray[Any]:
        """The same sum written with received messages only: the last restored goes first."""
        dtypes = [weights.dtype, *(restoration.coefficients.dtype for restoration in restorations)]
        given = weights.astype(np.result_type(*dtypes))
        for restoration in reversed(restorations):
            line = given[restoration.line] if restoration.axis == 0 else given[:, restoration.line]
            line[restoration.present] += restoration.coefficients @ line[restoration.gaps]
            line[restoration.gaps] = 0.0
        return given


def _restore(known: npt.NDArray[np.bool_], code: GradientCode, axis: int) -> list[_Restoration]:
    """Fill what gaps of the grid's lines can be filled, in place."""
    lines = known if axis == 0 else known.T
    matrix = code.matrix.toarray()
    norms = np.linalg.norm(matrix, axis=1)
    solved: dict[bytes, tuple[npt.NDArray[np.int64], npt.NDArray[Any]]] = {}
    found = []
    for number, line in enumerate(lines):
        present = np.flatnonzero(line)
        if line.all() or not len(present):
            continue
        if line.tobytes() not in solved:
            missing = np.flatnonzero(~line)
            basis = matrix[present].T
            sums = np.linalg.lstsq(basis, matrix[missing].T, rcond=None)[0]
            off = np.linalg.norm(basis @ sums - matrix[missing].T, axis=0)
            good = off <= _RESTORED * norms[missing]
            solved[line.tobytes()] = missing[good], sums[:, good]
        gaps, coefficients = solved[line.tobytes()]
        if len(gaps):
            found.append(_Restoration(axis, number, present, gaps, coefficients))
            line[gaps] = True
    return found
