"""What every scalar gradient code has: an assignment, an encoding matrix, decoders, guarantees.

Worker w sends y_w = sum_c B[w, c] g_c, one vector as long as a gradient. From the messages of the
survivors S a decoder makes sum_w a_w y_w = sum_c alpha_c g_c with alpha = B^T a, which is the
gradient where alpha = 1. Codes whose workers send shorter messages are in
`outlast.coding.codes.blocks`.
"""

from __future__ import annotations

import functools
from abc import ABC
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from outlast.coding.assignment import Assignment
from outlast.coding.certificate import Decoded, certify
from outlast.coding.codes.least_squares import by_gram, by_products
from outlast.errors import CodingError

if TYPE_CHECKING:
    from outlast.coding.conditioning import Conditioning

Decoder = Literal["optimal", "fixed"]
Survivors = Iterable[int] | npt.NDArray[np.bool_]

_DENSE_ENTRIES = 2_000_000
_GRAM_WORKERS = 2_000
_BATCH_ENTRIES = 20_000_000
_MOST_BYTES = 1_000_000_000
_RIDGE = 1e-12


@dataclass(frozen=True)
class Bound:
    """A statement about a code's error, with where it comes from.

    Attributes:
        value: The error, in the sense of `Certificate.error`.
        kind: ``exact`` (equality), ``upper`` or ``lower`` bound, or ``estimate``.
        source: The paper and its theorem, or how the statement follows.
    """

    value: float
    kind: Literal["exact", "upper", "lower", "estimate"]
    source: str


class GradientCode(ABC):
    """A scalar linear gradient code.

    Subclasses set `matrix` in their constructor, name themselves, and override what has a closed
    form. Workers and chunks are counted from 0.

    Attributes:
        name: The code's name as the literature has it.
        source: Where the construction comes from.
        matrix: (workers, chunks) encoding matrix B, CSR, float64 or complex128.
        tolerance: Any so many stragglers leave the gradient exact.
        dtype: Type of the messages.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    matrix: csr_array
    tolerance: int
    dtype: str = "float32"

    @property
    def workers(self) -> int:
        """Number of workers, n."""
        return int(self.matrix.shape[0])

    @property
    def chunks(self) -> int:
        """Number of chunks, k."""
        return int(self.matrix.shape[1])

    @functools.cached_property
    def assignment(self) -> Assignment:
        """Who computes what: where the encoding matrix is not zero."""
        pattern = (np.ones(self.matrix.nnz), self.matrix.indices, self.matrix.indptr)
        return Assignment(csr_array(pattern, shape=self.matrix.shape))

    @property
    def load(self) -> float:
        """Largest share of a batch that a worker computes, times the number of workers.

        1 is the load of training without a code.
        """
        return float(self.assignment.loads.max()) * self.workers / self.chunks

    @functools.cached_property
    def binary(self) -> bool:
        """Whether all coefficients of the encoding are 0 or 1."""
        return bool(np.all(self.matrix.data == 1))

    @functools.cached_property
    def message_norms(self) -> npt.NDArray[np.float64]:
        """(workers,) 2-norms of the rows of the encoding matrix."""
        return np.sqrt(np.asarray(abs(self.matrix).power(2).sum(axis=1), np.float64)).ravel()

    def decode(self, survivors: Survivors, decoder: Decoder = "optimal") -> Decoded:
        """Decoding weights and what they are worth.

        Args:
            survivors: Workers whose messages are there: their numbers, or a (workers,) mask.
            decoder: ``optimal`` for the smallest error of this set of survivors, ``fixed`` for
                weights that depend on their number only.

        Raises:
            CodingError: For workers that do not exist, or another decoder.
        """
        check_decoder(decoder)
        alive = self.mask(survivors)
        solve = self.optimal_weights if decoder == "optimal" else self.fixed_weights
        weights = solve(alive)
        coefficients = self.matrix.T @ weights
        return Decoded(
            weights,
            coefficients,
            certify(coefficients, weights, self.message_norms, self.dtype),
        )

    def error(self, survivors: Survivors, decoder: Decoder = "optimal") -> float:
        """See `Certificate.error`."""
        return self.decode(survivors, decoder).error

    def mask(self, survivors: Survivors) -> npt.NDArray[np.bool_]:
        """(workers,) whether each worker is among the survivors."""
        alive = np.zeros(self.workers, dtype=bool)
        alive[survivor_numbers(survivors, self.workers)] = True
        return alive

    def optimal_weights(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
        """(workers,) weights of least error, of least norm among these.

        The minimum of |B_S^T a - 1| by least squares; codes with structure know it faster. Large
        codes' are found step by step, to far more digits of the error than gradients have.
        """
        if self.workers * self.chunks > _DENSE_ENTRIES or self.workers > _GRAM_WORKERS:
            return by_products(self.matrix, alive)
        survivors = np.flatnonzero(alive)
        found = None
        # Normal equations square the condition number, which codes that are not 0/1 can ill afford.
        if self.binary:
            gram, target = self._normal_equations
            found = by_gram(gram[np.ix_(survivors, survivors)], target[survivors])
        if found is None:
            system = self.matrix[survivors].T.toarray()
            found = np.linalg.lstsq(system, np.ones(self.chunks), rcond=None)[0]
        weights = np.zeros(self.workers, dtype=self.matrix.dtype)
        weights[survivors] = found
        return weights

    @functools.cached_property
    def _normal_equations(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """(workers, workers) B B^T and (workers,) B 1."""
        gram = (self.matrix @ self.matrix.T).toarray()
        return gram, np.asarray(self.matrix.sum(axis=1), dtype=np.float64).ravel()

    def fixed_weights(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
        """(workers,) weights that depend on the number of survivors only.

        For 0/1 codes the one-step decoder of Charles, Papailiopoulos and Ellenberg (2017): all
        survivors n / (u d), which makes the coefficients right on average over random stragglers.

        Raises:
            CodingError: For codes that have no such decoder.
        """
        if not self.binary:
            raise CodingError(
                f"{self.name} has no fixed decoding weights, its encoding is not 0/1; "
                'take decoder = "optimal"'
            )
        survivors = int(alive.sum())
        weights = np.zeros(self.workers)
        if survivors:
            weights[alive] = self.workers * self.chunks / (self.matrix.nnz * survivors)
        return weights

    def errors(
        self, alive: npt.NDArray[np.bool_], decoder: Decoder = "optimal"
    ) -> npt.NDArray[np.float64]:
        """The error of many sets of survivors at once.

        Args:
            alive: (draws, workers) masks.
            decoder: As in `decode`.

        Returns:
            (draws,) errors. The optimal decoder's come from the normal equations and are right to
            about 1e-6 of the number of chunks.

        Raises:
            CodingError: For another decoder, or one that the code does not have; for the optimal
                decoder of codes so large that its dense matrices would take more than 1 GB.
        """
        check_decoder(decoder)
        if decoder == "fixed":
            return self._fixed_errors(alive)
        return self._optimal_errors(alive)

    def _fixed_errors(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        counts = alive.sum(axis=1)
        weights = np.zeros(self.workers + 1)
        for count in np.unique(counts):
            first = np.arange(self.workers) < count
            weights[count] = self.fixed_weights(first).max(initial=0.0)
        coefficients = (self.matrix.T @ alive.T.astype(np.float64)) * weights[counts]
        return np.asarray(np.sum(np.abs(coefficients - 1.0) ** 2, axis=0))

    def _optimal_errors(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """Squared distances of 1 from the span of the survivors' rows, by batched solves."""
        # The encoding, its Gram matrix, and a system with its mask and its solver's copy.
        needed = 8 * (self.workers * self.chunks + 4 * self.workers**2)
        if needed > _MOST_BYTES:
            raise CodingError(
                f"errors of the optimal decoder for workers = {self.workers} and chunks = "
                f"{self.chunks} would take about {needed / 1e9:.1f} GB for dense matrices; take "
                'decoder = "fixed", decode sets of survivors one by one, or fewer workers'
            )
        dense = self.matrix.toarray()
        gram = dense.conj() @ dense.T
        target = dense.conj().sum(axis=1)
        ridge = _RIDGE * float(np.abs(np.diag(gram)).max())
        errors = np.empty(len(alive))
        size = max(_BATCH_ENTRIES // self.workers**2, 1)
        for start in range(0, len(alive), size):
            kept = alive[start : start + size]
            system = gram * (kept[:, :, None] & kept[:, None, :])
            system += np.eye(self.workers) * np.where(kept, ridge, 1.0)[:, :, None]
            right = np.where(kept, target, 0.0)[:, :, None]
            solution = np.linalg.solve(system, right)
            # |B^T a - 1|^2 in full, since the short form loses all digits to the ridge.
            coefficients = np.einsum("dwx,wc->dc", solution, dense)
            errors[start : start + size] = np.sum(np.abs(coefficients - 1.0) ** 2, axis=1)
        return errors

    def worst_error(self, stragglers: int) -> Bound:
        """A bound of the optimal decoder's error over all sets of so many stragglers.

        Raises:
            CodingError: For a number of stragglers that is not in [0, workers].
        """
        survivors_of(self.workers, stragglers)
        if stragglers <= self.tolerance:
            return Bound(0.0, "exact", self.source)
        return Bound(float(self.chunks), "upper", "weights of zero")

    def expected_error(self, stragglers: int) -> Bound | None:
        """The optimal decoder's mean error over random sets of so many stragglers, if known.

        Raises:
            CodingError: For a number of stragglers that is not in [0, workers].
        """
        survivors_of(self.workers, stragglers)
        if stragglers <= self.tolerance:
            return Bound(0.0, "exact", self.source)
        return None

    @functools.cached_property
    def conditioning(self) -> Conditioning:
        """How much rounding errors are amplified with `tolerance` workers gone.

        `outlast.coding.conditioning.conditioning` examines other numbers of stragglers.
        """
        from outlast.coding.conditioning import conditioning

        return conditioning(self)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(workers={self.workers}, chunks={self.chunks}, "
            f"load={self.load:g}, tolerance={self.tolerance})"
        )


def decode(code: GradientCode, survivors: Survivors, decoder: Decoder = "optimal") -> Decoded:
    """Decoding weights for these survivors and the error that they leave.

    ``weights, error = decode(code, survivors)``; see `GradientCode.decode`.
    """
    return code.decode(survivors, decoder)


def survivor_numbers(survivors: Survivors, workers: int) -> npt.NDArray[np.int64]:
    """The survivors' numbers in the order in which they are given; ascending for a mask.

    Raises:
        CodingError: For workers that do not exist, or a mask of another length.
    """
    given: npt.NDArray[Any] = np.asarray(
        survivors if isinstance(survivors, np.ndarray) else list(survivors)
    )
    if given.dtype == bool:
        if given.shape != (workers,):
            raise CodingError(
                f"the survivors' mask has shape {given.shape}, but the code has {workers} workers"
            )
        return np.flatnonzero(given)
    numbers = given.astype(np.int64)
    if np.any(numbers != given):
        raise CodingError("survivors are not all whole numbers; give numbers or a boolean mask")
    if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < workers:
        raise CodingError(
            f"survivors {int(numbers.min())} to {int(numbers.max())} are not all in [0, {workers})"
        )
    return numbers


def survivors_of(workers: int, stragglers: int) -> int:
    """Workers that are left.

    Raises:
        CodingError: For a number of stragglers that is not in [0, workers].
    """
    if not 0 <= stragglers <= workers:
        raise CodingError(f"stragglers = {stragglers} is not in [0, {workers}]")
    return workers - stragglers


def check_decoder(decoder: str) -> None:
    """Refuse a decoder that there is none of.

    Raises:
        CodingError: Unless it is ``optimal`` or ``fixed``.
    """
    if decoder not in get_args(Decoder):
        raise CodingError(f"decoder = {decoder!r} is not one of {', '.join(get_args(Decoder))}")
