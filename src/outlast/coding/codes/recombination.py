"""Matrices from which workers that share a chunk make the blocks of its gradient.

The partial-straggler code (`outlast.coding.codes.partial`) decodes with a fixed matrix R (workers x
parts). The holders W of a chunk encode with the pseudo-inverse of their rows R_W, which amplifies
rounding by 1 / (smallest singular value of R_W). So the matrix is chosen for the largest smallest
singular value over all sets of `parts` holders of a chunk; more holders can only raise it.

Besides Gaussian rows of norm 1 there are rows on the trigonometric moment curve: with angle t, for
odd parts (1/sqrt 2, cos t, sin t, cos 2t, ...), for even parts (cos t/2, sin t/2, cos 3t/2, ...).
Any `parts` rows of different angles are independent (the curve is a Chebyshev system), and turning
all angles leaves singular values as they are, so with angles 2 pi r w / n all windows of a cyclic
assignment are alike and the best of the n rates r is quickly found.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from outlast.errors import CodingError

if TYPE_CHECKING:
    import numpy.typing as npt

Recombination = Literal["best", "ring", "golden", "gaussian"]

_DRAWS = 8
_RATES = 2000
_SUBSETS = 500
_GOLDEN_TURN = (math.sqrt(5.0) - 1.0) / 2.0


def recombination(
    holders: npt.NDArray[np.int64], parts: int, *, kind: Recombination = "best", seed: int = 0
) -> tuple[npt.NDArray[np.float64], float]:
    """A matrix R and its worst amplification.

    Args:
        holders: (chunks, copies) workers that hold each chunk.
        parts: Blocks of a gradient.
        kind: ``ring`` for angles 2 pi r w / n with the best rate r for holders that follow each
            other, ``golden`` for multiples of the golden angle, ``gaussian`` for the best of 8
            random draws, ``best`` for the best of all these.
        seed: Of the random draws.

    Returns:
        The (workers, parts) matrix with rows of norm 1, and the largest 1 / singular value of the
        rows of `parts` holders of a chunk; see `worst_amplification`.

    Raises:
        CodingError: For an unknown kind.
    """
    if kind not in get_args(Recombination):
        raise CodingError(f"kind = {kind!r} is not one of {', '.join(get_args(Recombination))}")
    workers = int(holders.max()) + 1
    if parts == 1:
        return np.ones((workers, 1)), 1.0
    candidates = _candidates(workers, holders.shape[1], parts, kind, seed)
    rated = [(candidate, worst_amplification(candidate, holders)) for candidate in candidates]
    return min(rated, key=lambda pair: pair[1])


def worst_amplification(
    matrix: npt.NDArray[np.float64], holders: npt.NDArray[np.int64], seed: int = 0
) -> float:
    """Largest norm of the inverse of the rows of `parts` holders of a chunk.

    Args:
        matrix: (workers, parts).
        holders: (chunks, copies) workers that hold each chunk.
        seed: Chooses 500 of the sets of `parts` holders per chunk where there are more.
    """
    subsets = _subsets(holders.shape[1], matrix.shape[1], seed)
    smallest = math.inf
    # Chunk by chunk in slices: all sets of all chunks would not fit into memory for large codes.
    size = max(200_000 // len(subsets), 1)
    for start in range(0, len(holders), size):
        rows = matrix[holders[start : start + size][:, subsets]]
        values = np.linalg.svd(rows, compute_uv=False)[..., -1]
        smallest = min(smallest, float(values.min()))
    return 1.0 / smallest if smallest > 0 else math.inf


def moment_curve(angles: npt.NDArray[np.floating[Any]], parts: int) -> npt.NDArray[np.float64]:
    """(angles, parts) points of the trigonometric moment curve, of norm 1."""
    frequencies = np.arange(1, parts // 2 + 1) - (0.0 if parts % 2 else 0.5)
    phases = angles[:, None] * frequencies
    waves = np.stack([np.cos(phases), np.sin(phases)], axis=2).reshape(len(angles), -1)
    constant = np.full((len(angles), parts % 2), math.sqrt(0.5))
    return np.asarray(np.concatenate([constant, waves], axis=1) * math.sqrt(2.0 / parts))


def _candidates(
    workers: int, copies: int, parts: int, kind: Recombination, seed: int
) -> Iterator[npt.NDArray[np.float64]]:
    turns = 2.0 * math.pi * np.arange(workers)
    if kind in {"best", "ring"}:
        yield moment_curve(turns * (_ring_rate(workers, copies, parts) / workers), parts)
    if kind in {"best", "golden"}:
        yield moment_curve(turns * _GOLDEN_TURN, parts)
    if kind in {"best", "gaussian"}:
        generator = np.random.default_rng(seed)
        for _ in range(_DRAWS):
            rows = generator.standard_normal((workers, parts))
            yield rows / np.linalg.norm(rows, axis=1, keepdims=True)


def _ring_rate(workers: int, copies: int, parts: int) -> int:
    """The rate r for which `copies` workers that follow each other have the best angles."""
    # r and n - r are mirror images. Beyond so many rates a window's angles differ too little.
    rates = np.unique(np.linspace(1, max(workers // 2, 1), _RATES).astype(np.int64))
    window = np.arange(copies)[None]
    spread = (moment_curve(2.0 * math.pi * np.arange(copies) * r / workers, parts) for r in rates)
    return int(
        min(zip(rates, spread, strict=True), key=lambda p: worst_amplification(p[1], window))[0]
    )


def _subsets(copies: int, parts: int, seed: int) -> npt.NDArray[np.int64]:
    """(sets, parts) positions in a row of holders: all sets, or some where these are too many."""
    if math.comb(copies, parts) <= _SUBSETS:
        return np.array(list(itertools.combinations(range(copies), parts)), dtype=np.int64)
    generator = np.random.default_rng(seed)
    return generator.random((_SUBSETS, copies)).argsort(axis=1)[:, :parts]
