"""Codes made of polynomials that are evaluated at the unit roots of the workers.

Worker w stands at the angle 2 pi w / n. Column c of the encoding matrix is a polynomial that
vanishes at all workers that do not hold chunk c; the decoding weights are one that vanishes at the
stragglers. Both are products of distances on the circle. Weights are at most 2^s / n times
something fixed, whoever straggles; coefficients explode when a chunk's holders are neighbours and
are small when the holders are spread over the circle. So the mask decides about rounding: with
spread holders these codes amplify a bounded number of times at any n, while cyclic ones grow like
n^s.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from outlast.coding.codes.nullspace import NullspaceCode, affine, check_workers, encoding
from outlast.coding.conditioning import TOLERANCE
from outlast.errors import CodingError

Mask = Literal["spread", "consecutive"]

_ADVICE = "take FractionalRepetition, which amplifies nothing, fewer stragglers or a wider dtype"
_EXCHANGES = 80
"""Exchanges of holders that are tried, per worker."""


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
        spread = mask == "spread"
        holders = _spread(workers, stragglers) if spread else _neighbours(workers, stragglers)
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

    @property
    def numbers_per_entry(self) -> int:
        """Real numbers that a message has for each number of a gradient: 2, as it is complex."""
        return 2

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

    Decoding weights are a_w = cos(k theta_w + phase) + lower frequencies k - 1, k - 2, ..., with
    k = (s + 1) / 2 (half integers for even s). Such a function with s given zeros is a product of
    s + 1 sines of half distances, at most 2^s, since its last zero follows from the phase. A
    chunk's s + 1 holders carry the coefficients that give each of these functions its leading
    coefficient: 1 / (distances among the holders), over the sine of half the sum of their angles.
    Holders begin at equal distances; exchanges of pairs of holders, which leave the loads alone,
    move the chunks with a small sine to where it is large.

    The construction is Outlast's own. Its encoding is exact by linear algebra; that rounding is
    small is measured over patterns at construction, like that of every other code.

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
        angles = 2.0 * np.pi * np.arange(workers) / workers
        holders = _spread(workers, stragglers)
        phase = _best_phase(angles, holders)
        if stragglers:
            holders = _exchanged(angles, holders, phase, seed)
        rows = _trigonometric_rows(angles, stragglers, phase)
        leading = np.eye(stragglers + 1)[0]
        self.matrix = encoding(rows, leading, holders)
        self.particular, self.kernel = affine(rows, leading)
        self.conditioning = self.accept(tolerance, _ADVICE)


def _neighbours(workers: int, stragglers: int) -> npt.NDArray[np.int64]:
    """(chunks, s + 1) holders c, c - 1, ..., c - s of each chunk c."""
    return (np.arange(workers)[:, None] - np.arange(stragglers + 1)) % workers


def _spread(workers: int, stragglers: int) -> npt.NDArray[np.int64]:
    """(chunks, s + 1) holders of each chunk, about n / (s + 1) workers apart."""
    offsets = np.arange(stragglers + 1) * workers // (stragglers + 1)
    return (np.arange(workers)[:, None] + offsets) % workers


def _phase_sine(
    angle_sums: npt.NDArray[np.float64], copies: int, phase: float | npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """What the leading coefficient divides by; 0 where a chunk cannot be encoded.

    The product of 2 sin((theta - theta_h) / 2) over m holders has the leading coefficient
    i^-m exp(-i sum theta_h / 2), while cos(m theta / 2 + phase) has exp(i phase) / 2; on a real
    multiple of it, the function vanishes at all holders.
    """
    return np.asarray(np.sin(angle_sums / 2.0 + phase + np.pi / 2.0 * copies))


def _best_phase(angles: npt.NDArray[np.float64], holders: npt.NDArray[np.int64]) -> float:
    """The phase of a grid that keeps the smallest `_phase_sine` of all chunks largest."""
    workers, copies = holders.shape
    grid = np.arange(8 * workers) * np.pi / (8 * workers)
    sums = angles[holders].sum(axis=1)
    sines = np.abs(_phase_sine(sums, copies, grid[:, None]))
    return float(grid[sines.min(axis=1).argmax()])


def _strength(at_holders: npt.NDArray[np.float64], phase: float) -> float:
    """Sum of a chunk's squared coefficients, from its holders' angles."""
    copies = len(at_holders)
    sines = 2.0 * np.sin((at_holders[:, None] - at_holders) / 2.0)
    np.fill_diagonal(sines, 1.0)
    sine = float(_phase_sine(at_holders.sum(), copies, phase))
    return float(np.sum(sines.prod(axis=1) ** -2.0)) / max(sine**2, 1e-300)


def _exchanged(
    angles: npt.NDArray[np.float64], holders: npt.NDArray[np.int64], phase: float, seed: int
) -> npt.NDArray[np.int64]:
    """Holders after exchanges between chunks that made the coefficients smaller.

    Each exchange gives two chunks one holder of the other, so that loads and copies stay. Every
    second one starts at the chunk with the largest coefficients.
    """
    workers, copies = holders.shape
    holders = holders.copy()
    generator = np.random.default_rng(seed)
    strengths = np.array([_strength(angles[each], phase) for each in holders])
    tries = _EXCHANGES * workers
    others = generator.integers(workers, size=(tries, 2))
    places = generator.integers(copies, size=(tries, 2))
    for number in range(tries):
        first = int(strengths.argmax()) if number % 2 else int(others[number, 0])
        second = int(others[number, 1])
        pair = holders[[first, second]]
        given, taken = pair[0, places[number, 0]], pair[1, places[number, 1]]
        if taken in pair[0] or given in pair[1]:
            continue
        pair[0, places[number, 0]], pair[1, places[number, 1]] = taken, given
        found = [_strength(angles[each], phase) for each in pair]
        if sum(found) < strengths[first] + strengths[second]:
            holders[[first, second]], strengths[[first, second]] = pair, found
    return holders


def _trigonometric_rows(
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
