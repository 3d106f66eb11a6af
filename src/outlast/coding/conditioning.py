"""How much a code amplifies rounding errors, over sets of survivors; refuses what is too much."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outlast.coding.certificate import roundoff
from outlast.errors import CodingError

if TYPE_CHECKING:
    import numpy.typing as npt

    from outlast.coding.code import GradientCode

PATTERNS = 300
TOLERANCE = 1e-2
"""Largest relative rounding error that a code is built with, where the caller says nothing."""


@dataclass(frozen=True)
class Conditioning:
    """The worst of the examined sets of survivors.

    Attributes:
        condition: Largest condition number of the survivors' rows of the encoding matrix.
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

    A sample begins with the sets of consecutive workers, which are the worst for cyclic codes.

    Returns:
        The sets, and whether they are all.
    """
    if math.comb(workers, stragglers) <= most:
        every = itertools.combinations(range(workers), stragglers)
        return [np.array(each, dtype=np.int64) for each in every], True
    generator = np.random.default_rng(seed)
    window = np.arange(stragglers)
    sets = [(first + window) % workers for first in range(min(workers, most))]
    while len(sets) < most:
        sets.append(generator.choice(workers, stragglers, replace=False))
    return sets, False


def conditioning(
    code: GradientCode, stragglers: int | None = None, *, patterns: int = PATTERNS, seed: int = 0
) -> Conditioning:
    """Examine a code with `stragglers` workers gone (as many as it tolerates if None)."""
    gone = code.tolerance if stragglers is None else stragglers
    sets, every = straggler_patterns(code.workers, gone, patterns, seed)
    rows = code.matrix.toarray()
    condition = amplification = largest = rounding = 0.0
    for each in sets:
        alive = np.ones(code.workers, dtype=bool)
        alive[each] = False
        decoded = code.decode(alive)
        values = np.linalg.svd(rows[alive], compute_uv=False)
        # Rows may repeat (a repetition code's do): what counts is the span that they have.
        kept = values[values > values[0] * 1e-13] if len(values) else np.ones(1)
        condition = max(condition, float(kept[0] / kept[-1]))
        amplification = max(amplification, decoded.certificate.amplification)
        largest = max(largest, float(np.abs(decoded.weights).max(initial=0.0)))
        rounding = max(rounding, decoded.certificate.rounding)
    return Conditioning(condition, amplification, largest, rounding, len(sets), every)


def refuse_ill_conditioned(code: GradientCode, tolerance: float, *, advice: str) -> Conditioning:
    """The conditioning of a code that rounds its messages to `code.dtype`, if it is good enough.

    Raises:
        CodingError: When rounding could exceed `tolerance`, with the figure and `advice`.
    """
    found = conditioning(code)
    if not found.rounding <= tolerance:
        raise CodingError(
            f"{code.name} for {code.workers} workers and {code.tolerance} stragglers multiplies "
            f"messages by weights that sum to {found.amplification:.3g}; in {code.dtype} (unit "
            f"roundoff {roundoff(code.dtype):.2g}) rounding could be {found.rounding:.2g} of the "
            f"gradient, above tolerance = {tolerance:g}; {advice}"
        )
    return found
