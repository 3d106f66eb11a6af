"""Fractional repetition: groups of workers that all compute the same chunks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import csr_array

from outlast.coding.certificate import roundoff
from outlast.coding.code import (
    Bound,
    Decoder,
    GradientCode,
    check_decoder,
    check_workers,
    survivors_of,
)
from outlast.errors import CodingError

if TYPE_CHECKING:
    import numpy.typing as npt


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
