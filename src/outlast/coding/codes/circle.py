"""Workers on a circle: real, well-conditioned coefficients for chunks with spread holders.

Worker w stands at the angle theta_w = 2 pi w / n. Decoding weights are functions

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

import numpy as np
import numpy.typing as npt

_ROUNDS = (50, 400)
_ROUND_CHUNKS = 200_000
"""Rounds of exchanges at least and at most, and what rounds times chunks should be between."""
_PHASES = 1024


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


def _phase_sine(
    angle_sums: npt.NDArray[np.float64], copies: int, phase: float
) -> npt.NDArray[np.float64]:
    """What the coefficients are divided by; 0 where a chunk cannot be encoded.

    The product of 2 sin((theta - theta_h) / 2) over m holders has the leading coefficient
    i^-m exp(-i sum theta_h / 2), while cos(m theta / 2 + phase) has exp(i phase) / 2: on a real
    multiple of it, a function of the space vanishes at all holders.
    """
    return np.asarray(np.sin(_phase_angle(angle_sums, copies, phase)))


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
    shifted = _phase_sine(at_holders.sum(axis=-1), copies, phase)
    squares = np.sum(sines.prod(axis=-1) ** -2.0, axis=-1)
    return np.asarray(squares / np.maximum(shifted**2, 1e-300))
