"""Gradient codes: assignment, encoding matrix, decoders, guarantees, conditioning; repetition.

Worker w sends y_w = sum_c B[w, c] g_c, one vector as long as a gradient. From the messages of the
survivors S a decoder makes sum_w a_w y_w = sum_c alpha_c g_c with alpha = B^T a, which is the
gradient where alpha = 1.

Weights of least error come from the normal equations B_S B_S^T a = B_S 1, by conjugate gradients
for large codes. Every iterate is a combination of images of B_S, so what they converge to has no
part that decoding does not see: it is the shortest of all minima, also where messages are
dependent.
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import ABC
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from outlast.coding.certificate import Decoded, certify, roundoff
from outlast.errors import CodingError

if TYPE_CHECKING:
    from collections.abc import Sequence


_GRAM_RIDGE = 1e-5
_DENSE_STEPS = 40
_DENSE_ACCURACY = 1e-11
_FLAT = 1e-6
_SPARSE_STEPS = 2000
_SPARSE_ACCURACY = 1e-5
_EXACT = 1e-10
Decoder = Literal["optimal", "fixed"]
Survivors = Iterable[int] | npt.NDArray[np.bool_]
_DENSE_ENTRIES = 2_000_000
_GRAM_WORKERS = 2_000
_BATCH_ENTRIES = 20_000_000
_MOST_BYTES = 1_000_000_000
_RIDGE = 1e-12
PATTERNS = 300
_SPECTRA_OPERATIONS = 5e8

TOLERANCE = 1e-2
"""Largest relative rounding error that a code is built with, where the caller says nothing."""


def by_gram(
    gram: npt.NDArray[np.float64], target: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64] | None:
    """The shortest solution of consistent normal equations, from one Cholesky factorisation.

    The factor is that of gram + ridge, which exists for dependent messages as well; with it as a
    preconditioner all eigenvalues far above the ridge are nearly 1, and few steps are needed.

    Args:
        gram: (survivors, survivors) B_S B_S^T.
        target: (survivors,) B_S 1.

    Returns:
        (survivors,) weights; None where they did not settle to 1e-11 of their size, as messages
        that are nearly dependent prevent.
    """
    # Imported here, since it takes longer than most codes take to build.
    from scipy.linalg.lapack import dpotrf, dpotrs

    size = float(gram.diagonal().max(initial=0.0))
    if not size:
        return np.zeros(len(target))
    ridged = gram.copy()
    ridged.flat[:: len(target) + 1] += _GRAM_RIDGE * size
    # The transpose of a symmetric matrix is itself, in the order that LAPACK need not copy.
    factor = dpotrf(ridged.T, lower=1, clean=0, overwrite_a=1)[0]
    weights = np.zeros(len(target))
    residual = target.copy()
    step = direction = dpotrs(factor, residual, lower=1)[0]
    slope = float(residual @ step)
    for _ in range(_DENSE_STEPS):
        if np.abs(step).max() <= _DENSE_ACCURACY * np.abs(weights).max():
            return weights
        image = gram @ direction
        curvature = float(direction @ image)
        if curvature <= _FLAT * size * float(direction @ direction):
            # What is left is rounding, which points to where messages depend on each other.
            settled = np.abs(residual).max() <= _DENSE_ACCURACY * np.abs(target).max()
            return weights if settled else None
        weights = weights + slope / curvature * direction
        residual = target - gram @ weights
        step = dpotrs(factor, residual, lower=1)[0]
        before, slope = slope, float(residual @ step)
        direction = step + slope / before * direction
    return None


def by_products(matrix: csr_array, alive: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """(workers,) weights of a code that is too large for dense matrices (Hestenes, Stiefel 1952).

    From weights of zero the first step is along B_S 1, which are equal weights of the best length
    where loads are equal. The last is where the error could fall by about a 1e-8th of itself only,
    or where coefficients are 1 to 1e-10 (root mean square), well within what is certified as exact.

    Args:
        matrix: (workers, chunks) encoding matrix.
        alive: (workers,) mask.
    """
    transposed, conjugate = matrix.T, matrix.conj()
    weights = np.zeros(matrix.shape[0], dtype=matrix.dtype)
    off = np.ones(matrix.shape[1], dtype=matrix.dtype)
    gradient = direction = np.where(alive, conjugate @ off, 0.0)
    slope = float(np.vdot(gradient, gradient).real)
    # |B_S 1|^2 / |1|^2, about the largest squared singular value where loads are alike.
    enough = _SPARSE_ACCURACY**2 * slope / len(off)
    for _ in range(_SPARSE_STEPS):
        error = float(np.vdot(off, off).real)
        if slope <= enough * error or error <= len(off) * _EXACT**2:
            break
        image = transposed @ direction
        length = slope / float(np.vdot(image, image).real)
        weights = weights + length * direction
        off = off - length * image
        gradient = np.where(alive, conjugate @ off, 0.0)
        before, slope = slope, float(np.vdot(gradient, gradient).real)
        direction = gradient + slope / before * direction
    return weights


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


@dataclass(frozen=True, eq=False)
class Assignment:
    """A sparse 0/1 matrix: entry (w, c) is 1 where worker w computes chunk c.

    Attributes:
        incidence: (workers, chunks), CSR, float64, with sorted column indices.
    """

    incidence: csr_array

    @property
    def loads(self) -> npt.NDArray[np.int64]:
        """(workers,) chunks that each worker computes."""
        return np.asarray(np.diff(self.incidence.indptr), dtype=np.int64)

    @property
    def copies(self) -> npt.NDArray[np.int64]:
        """(chunks,) workers that compute each chunk."""
        chunks = self.incidence.shape[1]
        return np.bincount(self.incidence.indices, minlength=chunks).astype(np.int64)

    def chunks_of(self, worker: int) -> npt.NDArray[np.int64]:
        """The chunks of one worker, ascending.

        Raises:
            CodingError: For a worker that does not exist.
        """
        workers = self.incidence.shape[0]
        if not 0 <= worker < workers:
            raise CodingError(f"worker = {worker} is not in [0, {workers})")
        start, stop = self.incidence.indptr[worker : worker + 2]
        return np.asarray(self.incidence.indices[start:stop], dtype=np.int64)


class GradientCode(ABC):
    """A linear gradient code.

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
        """Workers and their chunks: the places where the encoding matrix is not zero."""
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
        """True if all coefficients of the encoding are 0 or 1."""
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
            weights, coefficients, certify(coefficients, weights, self.message_norms, self.dtype)
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
            counts = alive.sum(axis=1)
            weights = np.zeros(self.workers + 1)
            for count in np.unique(counts):
                first = np.arange(self.workers) < count
                weights[count] = self.fixed_weights(first).max(initial=0.0)
            coefficients = (self.matrix.T @ alive.T.astype(np.float64)) * weights[counts]
            return np.asarray(np.sum(np.abs(coefficients - 1.0) ** 2, axis=0))
        return self._optimal_errors(alive)

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
        """Amplification of rounding errors with `tolerance` workers gone.

        `outlast.coding.code.conditioning` examines other numbers of stragglers.
        """
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


@dataclass(frozen=True)
class Conditioning:
    """The worst of the examined sets of survivors.

    Attributes:
        condition: Largest condition number of the survivors' rows of the encoding matrix, over the
            first `PATTERNS` sets, or as many as take about a second; NaN for codes too large for
            one. It also counts directions that decoding does not use: what rounding costs is
            `rounding`.
        amplification: Largest sum of the absolute decoding weights.
        largest_weight: Largest absolute decoding weight.
        rounding: Largest `Certificate.rounding`.
        patterns: Sets examined.
        exhaustive: Whether these were all sets of so many stragglers.
    """

    condition: float
    amplification: float
    largest_weight: float
    rounding: float
    patterns: int
    exhaustive: bool


def straggler_patterns(
    workers: int, stragglers: int, most: int, seed: int = 0
) -> tuple[list[npt.NDArray[np.int64]], bool]:
    """Sets of stragglers: all of them where there are at most `most`, else a sample.

    A sample begins with sets of consecutive workers, which are the worst for cyclic codes: one for
    each first worker, but at most half of the sample. The rest is random.

    Returns:
        The sets, and whether they are all.
    """
    if math.comb(workers, stragglers) <= most:
        every = itertools.combinations(range(workers), stragglers)
        return [np.array(said, dtype=np.int64) for said in every], True
    generator = np.random.default_rng(seed)
    window = np.arange(stragglers)
    sets = [(first + window) % workers for first in range(min(workers, (most + 1) // 2))]
    # The smallest of random numbers are at a random set; row by row, so that a longer sample
    # continues a shorter one.
    drawn = generator.random((most - len(sets), workers))
    return sets + list(np.argsort(drawn, axis=1)[:, :stragglers]), False


def conditioning(
    code: GradientCode, stragglers: int | None = None, *, patterns: int = PATTERNS, seed: int = 0
) -> Conditioning:
    """Examine a code with `stragglers` workers gone (as many as it tolerates if None)."""
    gone = max(code.tolerance, 0) if stragglers is None else stragglers
    sets, every = straggler_patterns(code.workers, gone, patterns, seed)
    weights = np.array([code.optimal_weights(_without(code.workers, members)) for members in sets])
    return summary(code, sets, weights, exhaustive=every)


def summary(
    code: GradientCode,
    sets: Sequence[npt.NDArray[np.int64]],
    weights: npt.NDArray[Any],
    *,
    exhaustive: bool,
) -> Conditioning:
    """The conditioning of a code from decoding weights that are known.

    Args:
        code: The code.
        sets: Stragglers.
        weights: (sets, workers) decoding weights for each set.
        exhaustive: Whether these are all sets of so many stragglers.
    """
    spectra = min(int(_SPECTRA_OPERATIONS / (code.workers**2 * code.chunks)), PATTERNS)
    condition = math.nan
    if spectra:
        rows = code.matrix.toarray()
        kept = (rows[_without(code.workers, members)] for members in sets[:spectra])
        condition = max(condition_number(survivors) for survivors in kept)
    magnitudes = np.abs(weights)
    return Conditioning(
        condition=condition,
        amplification=float(magnitudes.sum(axis=1).max()),
        largest_weight=float(magnitudes.max()),
        rounding=roundoff(code.dtype)
        * float((magnitudes @ code.message_norms).max())
        / math.sqrt(code.chunks),
        patterns=len(sets),
        exhaustive=exhaustive,
    )


def _without(workers: int, stragglers: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    alive = np.ones(workers, dtype=bool)
    alive[stragglers] = False
    return alive


def condition_number(rows: npt.NDArray[Any]) -> float:
    """Largest over smallest singular value that is not 0.

    Rows may repeat (a repetition code's do): what counts is the span that they have.
    """
    if not len(rows):
        return 1.0
    values = np.linalg.svd(rows, compute_uv=False)
    kept = values[values > values[0] * 1e-13]
    return float(kept[0] / kept[-1]) if len(kept) else 1.0


def check_positive(name: str, value: int) -> None:
    """Refuse a count that is below 1.

    Raises:
        CodingError: For such a count, under this name.
    """
    if value < 1:
        raise CodingError(f"{name} = {value} is below 1, the smallest number")


def check_workers(workers: int, stragglers: int, most: int | None = None) -> None:
    """Refuse numbers of workers and stragglers that no code has.

    Args:
        workers: n.
        stragglers: s.
        most: Largest number of stragglers; workers - 1 if None.

    Raises:
        CodingError: Without workers, or for stragglers that are not in [0, most].
    """
    check_positive("workers", workers)
    largest = workers - 1 if most is None else most
    if not 0 <= stragglers <= largest:
        nearest = min(max(stragglers, 0), largest)
        more = f", or workers = {workers + stragglers - largest}" if stragglers > 0 else ""
        raise CodingError(
            f"stragglers = {stragglers} is not in [0, {largest}] for {workers} workers; take "
            f"stragglers = {nearest}{more}"
        )


class FractionalRepetition(GradientCode):
    """Workers in groups of s + 1; each worker of a group sends the sum of the group's s + 1 chunks.

    Workers and chunks g (s + 1) to g (s + 1) + s make group g. One survivor per group is enough,
    and its message enters with weight 1: nothing amplifies rounding.

    Args:
        workers: Number of workers and of chunks, n; a multiple of s + 1.
        stragglers: Any so many may be missing, s; every worker computes s + 1 chunks.
        dtype: Type of the messages.

    Raises:
        CodingError: When the groups do not come out even, or for stragglers outside [0, workers).
    """

    name = "fractional repetition"
    source = (
        "Tandon, Lei, Dimakis and Karampatziakis, Gradient Coding: Avoiding Stragglers in "
        "Distributed Learning (ICML 2017)"
    )

    def __init__(self, workers: int, stragglers: int, *, dtype: str = "float32") -> None:
        check_workers(workers, stragglers)
        if workers % (stragglers + 1):
            raise CodingError(_uneven(workers, stragglers))
        copies = stragglers + 1
        first = np.arange(workers) // copies * copies
        columns = (first[:, None] + np.arange(copies)).ravel()
        pointers = np.arange(0, workers * copies + 1, copies)
        entries = (np.ones(len(columns)), columns, pointers)
        self.matrix = csr_array(entries, shape=(workers, workers))
        self.tolerance = stragglers
        roundoff(dtype)
        self.dtype = dtype

    @property
    def copies(self) -> int:
        """Workers that compute each chunk, d = s + 1."""
        return self.tolerance + 1

    def decodable(self, alive: npt.NDArray[np.bool_]) -> bool:
        """Return whether each group has a survivor, so that the gradient is exact.

        Args:
            alive: (workers,) mask.
        """
        return bool(alive.reshape(-1, self.copies).any(axis=1).all())

    def optimal_weights(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
        """(workers,) 1 for the first survivor of each group, else 0; O(n).

        The replicas' mean would be as good and shorter, but would need every survivor's message,
        and replicas are equal to the last bit.
        """
        groups = alive.reshape(-1, self.copies)
        weights = np.zeros(groups.shape)
        present = np.flatnonzero(groups.any(axis=1))
        weights[present, groups.argmax(axis=1)[present]] = 1.0
        return weights.ravel()

    def errors(
        self, alive: npt.NDArray[np.bool_], decoder: Decoder = "optimal"
    ) -> npt.NDArray[np.float64]:
        """As `GradientCode.errors`; the optimal decoder's are the chunks of groups that are gone.

        These are exact.
        """
        check_decoder(decoder)
        if decoder == "fixed":
            return super().errors(alive, decoder)
        groups = alive.reshape(len(alive), -1, self.copies)
        return np.asarray(self.copies * (~groups.any(axis=2)).sum(axis=1), dtype=np.float64)

    def worst_error(self, stragglers: int) -> Bound:
        """Exactly d floor(s / d): whoever chooses the stragglers takes out whole groups."""
        dead = (self.workers - survivors_of(self.workers, stragglers)) // self.copies
        return Bound(
            float(self.copies * dead), "exact", "Charles, Papailiopoulos and Ellenberg (2017)"
        )

    def expected_error(self, stragglers: int) -> Bound:
        """E err = n C(n - d, u) / C(n, u) over random sets of u = n - `stragglers` survivors.

        A group is gone when all survivors are among the n - d workers outside it.
        """
        survivors = survivors_of(self.workers, stragglers)
        outside = math.comb(self.workers - self.copies, survivors)
        mean = self.workers * outside / math.comb(self.workers, survivors)
        return Bound(mean, "exact", "Charles, Papailiopoulos and Ellenberg (2017)")


def _uneven(workers: int, stragglers: int) -> str:
    """Why groups of s + 1 do not make up all workers, and what would."""
    copies = stragglers + 1
    fitting = [index for index in range(workers) if workers % (index + 1) == 0]
    lower = max(item for item in fitting if item < stragglers)
    upper = min(item for item in fitting if item > stragglers)
    fewer = workers // copies * copies
    return (
        f"workers = {workers} is not a multiple of stragglers + 1 = {copies}; take stragglers = "
        f"{lower} or {upper}, or workers = {fewer} or {fewer + copies}"
    )
