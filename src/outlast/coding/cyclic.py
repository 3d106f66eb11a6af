"""Codes that are exact for any s stragglers: cyclic ones and Reed-Solomon ones.

In cyclic codes worker i computes the chunks i, i + 1, ..., i + s, modulo n.

Exact decoding weights are known as an affine space: all weights a with B^T a = 1 are
``particular + kernel z``. A set of stragglers asks for a = 0 at its members, which is a system as
small as the number of stragglers: O(s^3 + n s) instead of least squares with a matrix as large as
the code. With orthonormal columns orthogonal to the particular weights, the shortest z is also the
shortest a, which amplifies rounding least.

Reed-Solomon codes have well-conditioned coefficients on a circle, chunks with spread holders.
Column c of the encoding matrix is a polynomial that vanishes at all workers, the unit roots, that
do not hold chunk c; the decoding weights are one that vanishes at the stragglers. Both are products
of distances on the circle. Weights have a bound that depends on the number of stragglers alone;
coefficients explode when a chunk's holders are neighbours and are small when they are spread. So
the mask decides about rounding: with spread holders amplification hardly grows with the workers,
while that of cyclic codes grows like n^s.

The real codes: worker w stands at the angle theta_w = 2 pi w / n. Decoding weights are functions

    a(theta) = z_0 cos(k theta + phase) + lower frequencies k - 1, k - 2, ...,   k = (s + 1) / 2,

(half integers for even s) with z_0 = 1. One with s given zeros is half a product of s + 1 factors
2 sin((theta - zero) / 2), so at most 2^s wherever the zeros are: its last zero follows from the
phase. The coefficients b of a chunk with s + 1 holders are those with sum_h a(theta_h) b_h = z_0
for all such functions. Up to signs they are 1 over the product of 2 sin of half distances to the
other holders, over the sine of half the sum of the holders' angles, shifted by the phase: small
where holders are far apart and this sine is not near 0. Random matrices have no such bound: among
many sets of stragglers some are nearly singular.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from outlast.coding.certificate import roundoff
from outlast.coding.code import (
    PATTERNS,
    TOLERANCE,
    Conditioning,
    Decoder,
    GradientCode,
    check_decoder,
    check_workers,
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
_CIRCLE_ADVICE = (
    "take FractionalRepetition, which amplifies nothing, fewer stragglers or a wider dtype"
)

_MOST_WORKERS = 1000
"""Finding the null space takes n^3 operations: seconds for so many."""

_ROUNDS = (50, 400)
_ROUND_CHUNKS = 200_000
"""Rounds of exchanges at least and at most, and what rounds times chunks should be between."""

_PHASES = 1024
Mask = Literal["spread", "consecutive"]


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

        Args:
            tolerance: Largest rounding error of messages in `dtype`, as a share of the gradient.
            advice: What to take instead.

        Raises:
            CodingError: When rounding could exceed `tolerance`, with the figure and `advice`.
        """
        sets, every = examined_sets(self.workers, self.tolerance)
        weights = exact_weights(self.particular, self.kernel, sets)
        found = summary(self, list(sets), weights, exhaustive=every)
        if not found.rounding <= tolerance:
            raise CodingError(
                f"{self.name} for {self.workers} workers and {self.tolerance} stragglers "
                f"multiplies messages by weights that sum to {found.amplification:.3g}; in "
                f"{self.dtype} (unit roundoff {roundoff(self.dtype):.2g}) rounding could be "
                f"{found.rounding:.2g} of the gradient, above tolerance = {tolerance:g}; {advice}"
            )
        return found

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
            # The shortest a with B^T a = 1, and an orthonormal basis of all a with B^T a = 0.
            left, values, right = np.linalg.svd(rows)
            rank = workers - stragglers
            particular = left[:, :rank] @ (right[:rank].sum(axis=1) / values[:rank])
            kernel = left[:, rank:]
            weights = exact_weights(particular, kernel, gone)
            found = float((np.abs(weights) @ np.linalg.norm(rows, axis=1)).max())
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


def spread_holders(workers: int, stragglers: int) -> npt.NDArray[np.int64]:
    """(chunks, s + 1) holders of each chunk, about n / (s + 1) workers apart."""
    offsets = np.arange(stragglers + 1) * workers // (stragglers + 1)
    return np.asarray((np.arange(workers)[:, None] + offsets) % workers)


def best_phase(angles: npt.NDArray[np.float64], holders: npt.NDArray[np.int64]) -> float:
    """The phase of a grid that keeps the smallest sine of all chunks largest.

    Args:
        angles: (workers,).
        holders: (chunks, s + 1).
    """
    phases = min(8 * len(angles), _PHASES)
    grid = np.arange(phases) * np.pi / phases
    # |sin| is smallest at the chunk whose angle is nearest to a multiple of pi.
    copies = holders.shape[1]
    places = np.sort(_phase_angle(angles[holders].sum(axis=1), copies, 0.0) % np.pi)
    wanted = -grid % np.pi
    after = np.searchsorted(places, wanted)
    around = places[np.stack([after - 1, after % len(places)])]
    return float(grid[np.argmax(np.abs(np.sin(around - wanted)).min(axis=0))])


def exchanged(
    angles: npt.NDArray[np.float64], holders: npt.NDArray[np.int64], phase: float, seed: int
) -> npt.NDArray[np.int64]:
    """(chunks, s + 1) holders after exchanges between chunks that made the coefficients smaller.

    Each exchange gives two chunks one holder of the other, so that loads and copies stay. In each
    round all chunks are paired at random.

    Args:
        angles: (workers,).
        holders: (chunks, s + 1).
        phase: Of the leading cosine.
        seed: Of the exchanges that are tried.
    """
    chunks, copies = holders.shape
    holders = holders.copy()
    if copies == 1:
        return holders
    generator = np.random.default_rng(seed)
    strengths = _strengths(angles[holders], phase)
    half = chunks // 2
    pairs = np.arange(half)
    for _ in range(int(np.clip(_ROUND_CHUNKS / chunks, *_ROUNDS))):
        order = generator.permutation(chunks)
        places = generator.integers(copies, size=(2, half))
        both = holders[order[: 2 * half].reshape(2, half)]
        given, taken = both[0, pairs, places[0]], both[1, pairs, places[1]]
        held = (both[0] == taken[:, None]) | (both[1] == given[:, None])
        both[0, pairs, places[0]], both[1, pairs, places[1]] = taken, given
        changed = order[: 2 * half].reshape(2, half)
        with np.errstate(divide="ignore"):
            found = _strengths(angles[both], phase)
        better = ~held.any(axis=1) & (found.sum(axis=0) < strengths[changed].sum(axis=0))
        holders[changed[:, better]] = both[:, better]
        strengths[changed[:, better]] = found[:, better]
    return holders


def trigonometric_rows(
    angles: npt.NDArray[np.float64], stragglers: int, phase: float
) -> npt.NDArray[np.float64]:
    """(s + 1, workers) the leading cosine, then all lower frequencies in steps of 1."""
    if stragglers == 0:
        return np.ones((1, len(angles)))
    top = (stragglers + 1) / 2.0
    lower = [top - step for step in range(1, stragglers + 1) if top - step >= 0.0]
    rows = [np.cos(top * angles + phase)]
    rows += [np.cos(frequency * angles) for frequency in lower]
    rows += [np.sin(frequency * angles) for frequency in lower if frequency > 0.0]
    return np.array(rows)


def _phase_angle(
    angle_sums: npt.NDArray[np.float64], copies: int, phase: float
) -> npt.NDArray[np.float64]:
    return np.asarray(angle_sums / 2.0 + phase + np.pi / 2.0 * copies)


def _strengths(at_holders: npt.NDArray[np.float64], phase: float) -> npt.NDArray[np.float64]:
    """(...) sums of chunks' squared coefficients, up to a factor.

    Args:
        at_holders: (..., s + 1) angles of the holders.
        phase: Of the leading cosine.
    """
    copies = at_holders.shape[-1]
    sines = 2.0 * np.sin((at_holders[..., :, None] - at_holders[..., None, :]) / 2.0)
    sines[..., np.arange(copies), np.arange(copies)] = 1.0
    angle_sums = at_holders.sum(axis=-1)
    shifted = np.asarray(np.sin(_phase_angle(angle_sums, copies, phase)))
    squares = np.sum(sines.prod(axis=-1) ** -2.0, axis=-1)
    return np.asarray(squares / np.maximum(shifted**2, 1e-300))


class ReedSolomon(NullspaceCode):
    """Halbawi et al.: Reed-Solomon at the n-th roots of unity, with a balanced mask; complex.

    With alpha_w = exp(2 pi i w / n), B[w, c] = t_c(alpha_w), where t_c has degree n - s - 1,
    vanishes at all workers that do not hold chunk c and is 1 at 0. Decoding evaluates the survivors
    at 0, which has the closed form a_w = 1/n product over stragglers t of (1 - alpha_w / alpha_t).
    The decoded gradient is real up to rounding.

    Args:
        workers: Number of workers and of chunks, n.
        stragglers: Any so many may be missing, s; every worker computes s + 1 chunks.
        mask: ``spread`` for holders of a chunk at about equal distances, ``consecutive`` for
            neighbours, the cyclic code's mask, which is far worse conditioned.
        dtype: Type of the messages' real and imaginary parts.
        tolerance: Largest rounding error, as a share of the gradient, that is accepted.

    Raises:
        CodingError: For stragglers outside [0, workers), an unknown mask, or too much rounding.
    """

    name = "Reed-Solomon at unit roots"
    source = (
        "Halbawi, Azizan, Salehi and Hassibi, Improving Distributed Gradient Descent Using "
        "Reed-Solomon Codes (ISIT 2018)"
    )

    def __init__(
        self,
        workers: int,
        stragglers: int,
        *,
        mask: Mask = "spread",
        dtype: str = "float32",
        tolerance: float = TOLERANCE,
    ) -> None:
        check_workers(workers, stragglers)
        if mask not in {"spread", "consecutive"}:
            raise CodingError(f"mask = {mask!r} is not one of spread, consecutive")
        self.tolerance = stragglers
        self.dtype = dtype
        holders = spread_holders(workers, stragglers)
        if mask == "consecutive":
            holders = (np.arange(workers)[:, None] - np.arange(stragglers + 1)) % workers
        self._roots = np.exp(2j * np.pi * np.arange(workers) / workers)
        at_holders = self._roots[holders]
        ratios = 1.0 - at_holders[:, :, None] / at_holders[:, None, :]
        ratios[:, np.arange(stragglers + 1), np.arange(stragglers + 1)] = 1.0
        # The product over all other workers is n, so n over the holders is that over the rest.
        entries = (workers / ratios.prod(axis=2)).ravel()
        columns = np.repeat(np.arange(workers), stragglers + 1)
        self.matrix = csr_array((entries, (holders.ravel(), columns)), shape=(workers, workers))
        self.particular = np.full(workers, 1.0 / workers, dtype=complex)
        powers = np.arange(1, stragglers + 1)
        self.kernel = self._roots[:, None] ** powers / np.sqrt(workers)
        self.conditioning = self.accept(tolerance, _CIRCLE_ADVICE)

    def optimal_weights(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.complex128]:
        """(workers,) weights; O(n s) where as many workers straggle as the code tolerates."""
        gone = ~alive
        if int(gone.sum()) != self.tolerance:
            return super().optimal_weights(alive)
        ratios = 1.0 - self._roots[:, None] / self._roots[gone]
        weights = ratios.prod(axis=1) / self.workers
        weights[gone] = 0.0
        return np.asarray(weights)


class RealReedSolomon(NullspaceCode):
    """Real, for every n and s, and well conditioned: trigonometric polynomials, spread holders.

    Weights and coefficients are as the module explains. Holders begin at equal distances;
    exchanges between chunks, which leave the loads alone, move chunks with a small sine to where it
    is large.

    The construction is Outlast's own. Its weights are at most 2^s for every set of s stragglers, so
    rounding is at most 2^s sum_w |B_w| / sqrt(k) units also for sets that were not examined.

    Args:
        workers: Number of workers and of chunks, n.
        stragglers: Any so many may be missing, s; every worker computes s + 1 chunks.
        seed: Of the exchanges.
        dtype: Type of the messages.
        tolerance: Largest rounding error, as a share of the gradient, that is accepted.

    Raises:
        CodingError: For stragglers outside [0, workers), or too much rounding.
    """

    name = "real Reed-Solomon with spread holders"
    source = "Outlast; after Halbawi et al. (ISIT 2018) and Raviv et al. (ICML 2018)"

    def __init__(
        self,
        workers: int,
        stragglers: int,
        *,
        seed: int = 0,
        dtype: str = "float32",
        tolerance: float = TOLERANCE,
    ) -> None:
        check_workers(workers, stragglers)
        self.tolerance = stragglers
        self.dtype = dtype
        angles = np.asarray(2.0 * np.pi * np.arange(workers) / workers)
        holders = spread_holders(workers, stragglers)
        phase = best_phase(angles, holders)
        holders = exchanged(angles, holders, phase, seed)
        rows = trigonometric_rows(angles, stragglers, phase)
        leading = np.eye(stragglers + 1)[0]
        # Column c of B, which is zero outside the chunk's holders, is such that rows @ B = leading
        # 1^T; so weights z^T rows decode where z^T leading = 1.
        systems = rows[:, holders].transpose(1, 0, 2)
        right = np.tile(leading[None, :, None], (workers, 1, 1))
        try:
            coefficients = np.linalg.solve(systems, right)
        except np.linalg.LinAlgError:
            raise CodingError("some chunk's holders cannot encode it; take another seed") from None
        columns = np.repeat(np.arange(workers), stragglers + 1)
        entries = (coefficients.ravel(), (holders.ravel(), columns))
        self.matrix = csr_array(entries, shape=(workers, workers))
        complement = np.linalg.svd(leading[None, :])[2][1:]
        self.kernel = np.linalg.qr((complement @ rows).T)[0]
        particular = leading @ rows
        self.particular = particular - self.kernel @ (self.kernel.conj().T @ particular)
        self.conditioning = self.accept(tolerance, _CIRCLE_ADVICE)
