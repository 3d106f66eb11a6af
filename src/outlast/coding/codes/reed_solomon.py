"""Reed-Solomon codes: well-conditioned coefficients on a circle, chunks with spread holders.

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

from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from outlast.coding.code import TOLERANCE, check_workers
from outlast.coding.codes.cyclic import NullspaceCode, affine, encoding
from outlast.errors import CodingError

_ROUNDS = (50, 400)

_ROUND_CHUNKS = 200_000
"""Rounds of exchanges at least and at most, and what rounds times chunks should be between."""

_PHASES = 1024
Mask = Literal["spread", "consecutive"]
_ADVICE = "take FractionalRepetition, which amplifies nothing, fewer stragglers or a wider dtype"


def angles_of(workers: int) -> npt.NDArray[np.float64]:
    """(workers,) the workers' angles."""
    return np.asarray(2.0 * np.pi * np.arange(workers) / workers)


def spread_holders(workers: int, stragglers: int) -> npt.NDArray[np.int64]:
    """(chunks, s + 1) holders of each chunk, about n / (s + 1) workers apart."""
    offsets = np.arange(stragglers + 1) * workers // (stragglers + 1)
    return np.asarray((np.arange(workers)[:, None] + offsets) % workers)


def neighbouring_holders(workers: int, stragglers: int) -> npt.NDArray[np.int64]:
    """(chunks, s + 1) holders c, c - 1, ..., c - s of each chunk c."""
    return np.asarray((np.arange(workers)[:, None] - np.arange(stragglers + 1)) % workers)


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
        holders = (spread_holders if mask == "spread" else neighbouring_holders)(
            workers, stragglers
        )
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
        self.conditioning = self.accept(tolerance, _ADVICE)

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
        angles = angles_of(workers)
        holders = spread_holders(workers, stragglers)
        phase = best_phase(angles, holders)
        holders = exchanged(angles, holders, phase, seed)
        rows = trigonometric_rows(angles, stragglers, phase)
        leading = np.eye(stragglers + 1)[0]
        self.matrix = encoding(rows, leading, holders)
        self.particular, self.kernel = affine(rows, leading)
        self.conditioning = self.accept(tolerance, _ADVICE)
