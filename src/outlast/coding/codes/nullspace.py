"""Codes whose exact decoding weights are known as an affine space.

All weights a with B^T a = 1 are ``particular + kernel z``. A set of stragglers asks for a = 0 at
its members, which is a system as small as the number of stragglers: O(s^3 + n s) instead of least
squares with a matrix as large as the code. With orthonormal columns orthogonal to the particular
weights, the shortest z is also the shortest a, which amplifies rounding least.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import csr_array

from outlast.coding.code import Decoder, GradientCode, check_decoder
from outlast.coding.conditioning import (
    PATTERNS,
    Conditioning,
    refuse_ill_conditioned,
    straggler_patterns,
    summary,
)
from outlast.errors import CodingError

if TYPE_CHECKING:
    import numpy.typing as npt

_MOST_SETS = 50_000
_ENTRIES = 2_000_000


class NullspaceCode(GradientCode):
    """A code that is exact for any `tolerance` stragglers, with a small system to decode.

    Subclasses set `particular` and `kernel` beside the encoding matrix.

    Attributes:
        particular: (workers,) weights that decode when all workers are there.
        kernel: (workers, m) orthonormal columns, m >= tolerance, orthogonal to `particular`, that
            add nothing to the decoded gradient: B^T kernel = 0.
    """

    particular: npt.NDArray[Any]
    kernel: npt.NDArray[Any]

    def accept(self, tolerance: float, advice: str) -> Conditioning:
        """The conditioning, over all sets of stragglers where they are not too many, if it is good.

        Near-singular sets are rare, so many are looked at.

        Raises:
            CodingError: When rounding could exceed `tolerance`; see `refuse_ill_conditioned`.
        """
        sets, every = examined_sets(self.workers, self.tolerance)
        weights = exact_weights(self.particular, self.kernel, sets)
        found = summary(self, list(sets), weights, exhaustive=every)
        return refuse_ill_conditioned(self, tolerance, advice=advice, found=found)

    def optimal_weights(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
        """(workers,) shortest exact weights; least squares beyond the tolerance."""
        gone = ~alive
        if int(gone.sum()) > self.tolerance:
            return super().optimal_weights(alive)
        weights = self.particular.copy()
        if gone.any():
            cancel = np.linalg.lstsq(self.kernel[gone], -self.particular[gone], rcond=None)[0]
            weights += self.kernel @ cancel
            weights[gone] = 0.0
        return weights

    def errors(
        self, alive: npt.NDArray[np.bool_], decoder: Decoder = "optimal"
    ) -> npt.NDArray[np.float64]:
        """As `GradientCode.errors`; 0 within the tolerance without a computation."""
        check_decoder(decoder)
        if decoder == "fixed":
            return super().errors(alive, decoder)
        errors = np.zeros(len(alive))
        beyond = (~alive).sum(axis=1) > self.tolerance
        if beyond.any():
            errors[beyond] = super().errors(alive[beyond])
        return errors


def examined_sets(workers: int, stragglers: int) -> tuple[npt.NDArray[np.int64], bool]:
    """(sets, stragglers) that a construction looks at, and whether they are all."""
    most = max(min(_MOST_SETS, _ENTRIES // workers), PATTERNS)
    sets, every = straggler_patterns(workers, stragglers, most)
    return np.array(sets), every


def exact_weights(
    particular: npt.NDArray[Any], kernel: npt.NDArray[Any], gone: npt.NDArray[np.int64]
) -> npt.NDArray[Any]:
    """(sets, workers) exact weights for many sets of as many stragglers as the kernel has columns.

    Args:
        particular: As `NullspaceCode.particular`.
        kernel: As `NullspaceCode.kernel`.
        gone: (sets, columns of the kernel) stragglers.

    Returns:
        Not finite everywhere, where some set cannot be decoded.
    """
    try:
        cancel = np.linalg.solve(kernel[gone], -particular[gone][:, :, None])[:, :, 0]
    except np.linalg.LinAlgError:
        return np.full((len(gone), len(particular)), np.inf)
    weights: npt.NDArray[Any] = particular + cancel @ kernel.T
    np.put_along_axis(weights, gone, 0.0, axis=1)
    return weights


def affine(
    rows: npt.NDArray[Any], values: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """`NullspaceCode.particular` and `NullspaceCode.kernel` from a matrix C with C B = values 1^T.

    Weights z^T C decode where z^T values = 1.

    Args:
        rows: (m + 1, workers) the matrix C, of full rank.
        values: (m + 1,) not all 0.
    """
    first = values / float(values @ values)
    complement = np.linalg.svd(values[None, :])[2][1:]
    kernel = np.linalg.qr((complement @ rows).T)[0]
    particular = first @ rows
    return particular - kernel @ (kernel.conj().T @ particular), kernel


def encoding(
    rows: npt.NDArray[np.float64], values: npt.NDArray[np.float64], holders: npt.NDArray[np.int64]
) -> csr_array:
    """The encoding matrix B with C B = values 1^T whose column c is zero outside ``holders[c]``.

    Args:
        rows: (m + 1, workers) the matrix C.
        values: (m + 1,).
        holders: (chunks, m + 1) different workers for each chunk.

    Raises:
        CodingError: When the columns of C of some chunk's holders are linearly dependent.
    """
    chunks, copies = holders.shape
    systems = rows[:, holders].transpose(1, 0, 2)
    try:
        coefficients = np.linalg.solve(systems, np.tile(values[None, :, None], (chunks, 1, 1)))
    except np.linalg.LinAlgError:
        raise CodingError("some chunk's holders cannot encode it; take another seed") from None
    columns = np.repeat(np.arange(chunks), copies)
    entries = (coefficients.ravel(), (holders.ravel(), columns))
    return csr_array(entries, shape=(rows.shape[1], chunks))
