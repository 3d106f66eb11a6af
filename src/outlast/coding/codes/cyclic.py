"""Cyclic codes: worker i computes the chunks i, i + 1, ..., i + s, modulo n.

Their exact decoding weights are known as an affine space: all weights a with B^T a = 1 are
``particular + kernel z``. A set of stragglers asks for a = 0 at its members, which is a system as
small as the number of stragglers: O(s^3 + n s) instead of least squares with a matrix as large as
the code. With orthonormal columns orthogonal to the particular weights, the shortest z is also the
shortest a, which amplifies rounding least.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from outlast.coding.code import (
    PATTERNS,
    TOLERANCE,
    Conditioning,
    Decoder,
    GradientCode,
    check_decoder,
    check_workers,
    refuse_ill_conditioned,
    straggler_patterns,
    summary,
)
from outlast.errors import CodingError

_MOST_SETS = 50_000
_ENTRIES = 2_000_000
_ADVICE = (
    "take RealReedSolomon, whose amplification does not grow with the workers, "
    "FractionalRepetition, which amplifies nothing, or a wider dtype"
)

_MOST_WORKERS = 1000
"""Finding the null space takes n^3 operations: seconds for so many."""


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


class CyclicRepetition(NullspaceCode):
    """Tandon's random code: any number of workers, exact for any s stragglers almost surely.

    The rows of B span the null space of a random matrix H (s, n) with H 1 = 0, so that any n - s of
    them have 1 in their span. Only the row space of H matters, not its scale. Random codes have
    near-singular sets of survivors; the best of several draws is kept.

    Args:
        workers: Number of workers and of chunks, n.
        stragglers: Any so many may be missing, s; every worker computes s + 1 chunks.
        seed: Of the draws.
        dtype: Type of the messages.
        tolerance: Largest rounding error, as a share of the gradient, that is accepted.
        draws: Random matrices that are compared.

    Raises:
        CodingError: For stragglers outside [0, workers), more than 1000 workers, no draw, or too
            much rounding.
    """

    name = "cyclic repetition"
    source = (
        "Tandon, Lei, Dimakis and Karampatziakis, Gradient Coding: Avoiding Stragglers in "
        "Distributed Learning (ICML 2017)"
    )

    def __init__(
        self,
        workers: int,
        stragglers: int,
        *,
        seed: int = 0,
        dtype: str = "float32",
        tolerance: float = TOLERANCE,
        draws: int = 8,
    ) -> None:
        check_workers(workers, stragglers)
        if workers > _MOST_WORKERS:
            raise CodingError(
                f"workers = {workers} is above {_MOST_WORKERS}: the random code is found by a "
                f"singular value decomposition of a {workers} x {workers} matrix; take "
                "RealReedSolomon, which needs none"
            )
        if draws < 1:
            raise CodingError(f"draws = {draws} is below 1, the smallest number")
        self.tolerance = stragglers
        self.dtype = dtype
        generator = np.random.default_rng(seed)
        gone = examined_sets(workers, stragglers)[0]
        best = np.inf
        for _ in range(draws if stragglers else 1):
            rows = _random_rows(workers, stragglers, generator)
            particular, kernel = _left_null_space(rows, stragglers)
            norms = np.linalg.norm(rows, axis=1)
            weights = exact_weights(particular, kernel, gone)
            found = float((np.abs(weights) @ norms).max())
            if found <= best:
                best, dense, self.particular, self.kernel = found, rows, particular, kernel
        self.matrix = csr_array(dense)
        self.conditioning = self.accept(tolerance, _ADVICE)


class CyclicMDS(NullspaceCode):
    """The real cyclic code of Raviv et al.: no randomness, better conditioned than a random code.

    B is the circulant matrix of g(x) / g(1) with g(x) the product of x - z over the s n-th roots of
    unity z nearest to -1. These come in conjugate pairs, and g is real, if and only if one of n and
    s is odd and the other even. All coefficients are positive.

    Args:
        workers: Number of workers and of chunks, n.
        stragglers: Any so many may be missing, s; every worker computes s + 1 chunks.
        dtype: Type of the messages.
        tolerance: Largest rounding error, as a share of the gradient, that is accepted.

    Raises:
        CodingError: For stragglers outside [0, workers) or of the workers' parity, or too much
            rounding.
    """

    name = "cyclic MDS"
    source = (
        "Raviv, Tamo, Tandon and Dimakis, Gradient Coding from Cyclic MDS Codes and Expander "
        "Graphs (ICML 2018)"
    )

    def __init__(
        self, workers: int, stragglers: int, *, dtype: str = "float32", tolerance: float = TOLERANCE
    ) -> None:
        check_workers(workers, stragglers)
        # Without stragglers there is no root, hence no pair to complete.
        if stragglers and (workers - stragglers) % 2 == 0:
            parity = "odd" if workers % 2 else "even"
            raise CodingError(
                f"workers = {workers} and stragglers = {stragglers} are both {parity}, but a real "
                f"cyclic MDS code has one odd and one even; take stragglers = {stragglers + 1}, or "
                f"workers = {workers - 1} or {workers + 1}"
            )
        self.tolerance = stragglers
        self.dtype = dtype
        # (s + 1,) coefficients of g(x) / g(1).
        step = np.arange(1, stragglers + 1)
        ratios = np.sin(np.pi * step[::-1] / workers) / np.sin(np.pi * step / workers)
        coefficients = np.concatenate([[1.0], np.cumprod(ratios)])
        generator = np.asarray(coefficients / coefficients.sum())
        rows = np.repeat(np.arange(workers), stragglers + 1)
        columns = (np.arange(workers)[:, None] + np.arange(stragglers + 1)) % workers
        entries = (np.tile(generator, workers), (rows, columns.ravel()))
        self.matrix = csr_array(entries, shape=(workers, workers))
        self.particular = np.ones(workers)
        self.kernel = _highest_frequencies(workers, stragglers)
        self.conditioning = self.accept(tolerance, _ADVICE)


def _random_rows(
    workers: int, stragglers: int, generator: np.random.Generator
) -> npt.NDArray[np.float64]:
    """(n, n) rows with cyclic support that are orthogonal to a random H with H 1 = 0."""
    checks = generator.standard_normal((stragglers, workers))
    checks -= checks.mean(axis=1, keepdims=True)
    support = (np.arange(workers)[:, None] + np.arange(stragglers + 1)) % workers
    rows = np.zeros((workers, workers))
    rows[np.arange(workers), support[:, 0]] = 1.0
    if stragglers:
        systems = checks[:, support[:, 1:]].transpose(1, 0, 2)
        right = -checks[:, support[:, 0]].T[:, :, None]
        solution = np.linalg.solve(systems, right)[:, :, 0]
        np.put_along_axis(rows, support[:, 1:], solution, axis=1)
    # The scale of a row is free; unit rows make the least squares below well scaled.
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def _left_null_space(
    rows: npt.NDArray[np.float64], dimension: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The shortest a with B^T a = 1, and an orthonormal basis of all a with B^T a = 0."""
    left, values, right = np.linalg.svd(rows)
    rank = len(rows) - dimension
    particular = left[:, :rank] @ (right[:rank].sum(axis=1) / values[:rank])
    return particular, left[:, rank:]


def _highest_frequencies(workers: int, count: int) -> npt.NDArray[np.float64]:
    """(n, count) orthonormal real basis of the `count` discrete frequencies nearest to n / 2."""
    angle = 2.0 * np.pi * np.arange(workers) / workers
    columns = []
    for frequency in range((workers - count + 1) // 2, (workers + 1) // 2):
        columns.append(np.sqrt(2.0 / workers) * np.cos(frequency * angle))
        columns.append(np.sqrt(2.0 / workers) * np.sin(frequency * angle))
    if count % 2:
        columns.append(np.sqrt(1.0 / workers) * (-1.0) ** np.arange(workers))
    return np.asarray(np.reshape(columns, (count, workers)).T, dtype=np.float64)
