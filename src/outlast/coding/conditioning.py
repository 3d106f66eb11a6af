"""How much a code amplifies rounding errors, over sets of survivors; refuses what is too much."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from outlast.coding.certificate import roundoff
from outlast.errors import CodingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from outlast.coding.code import GradientCode

PATTERNS = 300
_SPECTRA_OPERATIONS = 5e8
TOLERANCE = 1e-2
"""Largest relative rounding error that a code is built with, where the caller says nothing."""


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
        condition = max(_condition(name) for name in kept)
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


def _condition(rows: npt.NDArray[Any]) -> float:
    """Largest over smallest singular value that is not 0.

    Rows may repeat (a repetition code's do): what counts is the span that they have.
    """
    if not len(rows):
        return 1.0
    values = np.linalg.svd(rows, compute_uv=False)
    kept = values[values > values[0] * 1e-13]
    return float(kept[0] / kept[-1]) if len(kept) else 1.0


def refuse_ill_conditioned(
    code: GradientCode, tolerance: float, *, advice: str, found: Conditioning | None = None
) -> Conditioning:
    """The conditioning of a code that rounds its messages to `code.dtype`, if it is good enough.

    Args:
        code: The code.
        tolerance: Largest rounding error, as a share of the gradient.
        advice: What to take instead.
        found: The conditioning where it is known; else it is measured.

    Raises:
        CodingError: When rounding could exceed `tolerance`, with the figure and `advice`.
    """
    found = conditioning(code) if found is None else found
    if not found.rounding <= tolerance:
        raise CodingError(
            f"{code.name} for {code.workers} workers and {code.tolerance} stragglers multiplies "
            f"messages by weights that sum to {found.amplification:.3g}; in {code.dtype} (unit "
            f"roundoff {roundoff(code.dtype):.2g}) rounding could be {found.rounding:.2g} of the "
            f"gradient, above tolerance = {tolerance:g}; {advice}"
        )
    return found
