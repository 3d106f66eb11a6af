"""Codes made of polynomials that are evaluated at the unit roots of the workers.

Column c of the encoding matrix is a polynomial that vanishes at all workers that do not hold chunk
c; the decoding weights are one that vanishes at the stragglers. Both are products of distances on
the circle. Weights have a bound that depends on the number of stragglers alone, whoever they are;
coefficients explode when a chunk's holders are neighbours and are small when they are spread over
the circle. So the mask decides about rounding: with spread holders amplification hardly grows with
the workers, while that of cyclic codes grows like n^s.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from outlast.coding.codes.checks import check_workers
from outlast.coding.codes.circle import (
    angles_of,
    best_phase,
    exchanged,
    neighbouring_holders,
    spread_holders,
    trigonometric_rows,
)
from outlast.coding.codes.nullspace import NullspaceCode, affine, encoding
from outlast.coding.conditioning import TOLERANCE
from outlast.errors import CodingError

Mask = Literal["spread", "consecutive"]

_ADVICE = "take FractionalRepetition, which amplifies nothing, fewer stragglers or a wider dtype"


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

    Weights and coefficients are as `outlast.coding.codes.circle` explains. Holders begin at equal
    distances; exchanges between chunks, which leave the loads alone, move chunks with a small sine
    to where it is large.

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
