"""Codes for workers of known, different speeds: loads in proportion to speed."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from scipy.linalg import solveh_banded
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order

from outlast.coding.assignment import Assignment
from outlast.coding.certificate import roundoff
from outlast.coding.code import (
    TOLERANCE,
    Bound,
    GradientCode,
    check_positive,
    check_workers,
    survivors_of,
)
from outlast.coding.codes.cyclic import NullspaceCode, affine, encoding
from outlast.coding.codes.reed_solomon import angles_of, best_phase, exchanged, trigonometric_rows
from outlast.errors import CodingError

if TYPE_CHECKING:
    from collections.abc import Sequence

_ADVICE = "take GroupedBySpeed, which amplifies nothing, fewer stragglers or a wider dtype"
_CHUNKS_PER_WORKER = 4
_RIDGE = 1e-10
_BAND_ENTRIES = 5_000_000


class HeterogeneityAware(NullspaceCode):
    """Wang et al.: each chunk at s + 1 workers, as many chunks per worker as its speed earns.

    Workers take chunks one after the other around the circle of chunks until each has s + 1
    holders, one per lap. Column c of B solves C_holders b = z for a matrix C (s + 1, workers), so
    that every combination of the rows of C with z as in `outlast.coding.codes.reed_solomon`
    decodes; the one that vanishes at the stragglers is taken. The paper draws C at random, which
    leaves some sets of stragglers nearly singular; here C and the exchanges of holders are of
    that module.

    Args:
        speeds: (workers,) chunks per second of each worker, in any unit.
        stragglers: Any so many may be missing, s.
        chunks: Parts of a batch; more follow the speeds more finely. 4 per worker if None.
        seed: Of the exchanges of holders.
        dtype: Type of the messages.
        tolerance: Largest rounding error, as a share of the gradient, that is accepted.

    Raises:
        CodingError: For speeds that are not positive, stragglers outside [0, workers), fewer than
            one chunk, or too much rounding.
    """

    name = "heterogeneity-aware"
    source = (
        "Wang, Guo, Tang, Li and Li, Heterogeneity-aware Gradient Coding for Straggler Tolerance "
        "(ICDCS 2019)"
    )

    def __init__(
        self,
        speeds: Sequence[float],
        stragglers: int,
        *,
        chunks: int | None = None,
        seed: int = 0,
        dtype: str = "float32",
        tolerance: float = TOLERANCE,
    ) -> None:
        rates, parts = _checked(speeds, stragglers, chunks)
        workers = len(rates)
        self.tolerance = stragglers
        self.dtype = dtype
        self.speeds = rates
        loads = shares(rates, parts * (stragglers + 1), most=parts)
        # Laid end to end around the circle, the loads give each chunk one holder per lap.
        holders = np.repeat(np.arange(workers), loads).reshape(stragglers + 1, parts).T
        angles = angles_of(workers)
        phase = best_phase(angles, holders)
        holders = exchanged(angles, holders, phase, seed)
        rows = trigonometric_rows(angles, stragglers, phase)
        leading = np.eye(stragglers + 1)[0]
        self.matrix = encoding(rows, leading, holders)
        self.particular, self.kernel = affine(rows, leading)
        self.conditioning = self.accept(tolerance, _ADVICE)


class GroupedBySpeed(GradientCode):
    """Workers in s + 1 groups of about equal speed; each group computes every chunk once.

    Within a group a worker computes a run of consecutive chunks in proportion to its speed and
    sends their sum. Any s stragglers leave a group complete, and the sum of its messages is the
    gradient. Beyond s the code still decodes exactly whenever linear algebra can: a worker with
    chunks a to b - 1 is an edge between the places a and b, and the gradient is in the span of the
    messages if and only if edges of survivors join place 0 to place k (weights are +1 along an
    edge and -1 against it).

    Args:
        speeds: (workers,) chunks per second of each worker, in any unit.
        stragglers: Any so many may be missing, s.
        chunks: Parts of a batch; more follow the speeds more finely. 4 per worker if None.
        dtype: Type of the messages.

    Raises:
        CodingError: For speeds that are not positive, stragglers outside [0, workers), or fewer
            than one chunk.
    """

    name = "grouped by speed"
    source = (
        "after the groups of Wang, Guo, Tang, Li and Li, Heterogeneity-aware Gradient Coding for "
        "Straggler Tolerance (ICDCS 2019); decoding along paths is Outlast's own"
    )

    def __init__(
        self,
        speeds: Sequence[float],
        stragglers: int,
        *,
        chunks: int | None = None,
        dtype: str = "float32",
    ) -> None:
        rates, parts = _checked(speeds, stragglers, chunks)
        self.tolerance = stragglers
        roundoff(dtype)
        self.dtype = dtype
        self.speeds = rates
        self.groups = _balanced_groups(rates, stragglers + 1)
        self._starts = np.zeros(len(rates), dtype=np.int64)
        self._stops = np.zeros(len(rates), dtype=np.int64)
        for group in range(stragglers + 1):
            members = np.flatnonzero(self.groups == group)
            ends = np.cumsum(shares(rates[members], parts, most=parts))
            self._stops[members] = ends
            self._starts[members] = np.concatenate([[0], ends[:-1]])
        runs = zip(self._starts, self._stops, strict=True)
        self.matrix = Assignment.of([range(start, stop) for start, stop in runs], parts).incidence

    def decodable(self, alive: npt.NDArray[np.bool_]) -> bool:
        """Return whether the survivors' messages give the gradient exactly.

        Args:
            alive: (workers,) mask.
        """
        return self._exact(alive) is not None

    def optimal_weights(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
        """(workers,) 1 for the members of a complete group, else +-1 along the shortest path.

        Where nothing is exact, least squares by normal equations: in the order of their first
        chunks the workers overlap with few others around them, so these have few diagonals, and a
        ridge chooses among dependent messages.
        """
        exact = self._exact(alive)
        if exact is not None:
            return exact
        weights = np.zeros(self.workers)
        usable = np.flatnonzero(alive & (self._starts < self._stops))
        if usable.size == 0:
            return weights
        usable = usable[np.argsort(self._starts[usable], kind="stable")]
        starts, stops = self._starts[usable], self._stops[usable]
        diagonals = int((np.searchsorted(starts, stops) - np.arange(len(usable))).max())
        if diagonals * len(usable) > _BAND_ENTRIES:
            return super().optimal_weights(alive)
        # (diagonals, workers) chunks that each worker shares with the next ones in order of starts.
        overlaps = np.zeros((diagonals, len(starts)))
        for distance in range(diagonals):
            kept = len(starts) - distance
            common = np.minimum(stops[:kept], stops[distance:]) - starts[distance:]
            overlaps[distance, :kept] = np.maximum(common, 0)
        lengths = overlaps[0].copy()
        overlaps[0] += _RIDGE * lengths.max()
        weights[usable] = solveh_banded(overlaps, lengths, lower=True)
        return weights

    def worst_error(self, stragglers: int) -> Bound:
        """0 up to the tolerance; then at most the chunks of the stragglers, and never above all."""
        if stragglers <= self.tolerance:
            return super().worst_error(stragglers)
        spared = self._least_lost(self.workers - survivors_of(self.workers, stragglers))
        return Bound(float(spared), "upper", "the group that loses the fewest chunks decodes alone")

    def _least_lost(self, stragglers: int) -> int:
        """Chunks that the best group lacks when the largest loads of each group are missing."""
        by_group = [
            np.cumsum(np.sort(self.assignment.loads[self.groups == group])[::-1])
            for group in range(self.tolerance + 1)
        ]

        def needed(lost: int) -> int:
            """Stragglers without whom no group lacks so many chunks."""
            return sum(int(np.searchsorted(sums, lost)) + 1 for sums in by_group)

        return bisect.bisect_right(range(1, self.chunks + 1), stragglers, key=needed)

    def _exact(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64] | None:
        needed = self._starts < self._stops
        incomplete = np.bincount(self.groups[~alive & needed], minlength=self.tolerance + 1)
        complete = np.flatnonzero(incomplete == 0)
        if complete.size:
            return np.asarray((self.groups == complete[0]) & needed, dtype=np.float64)
        return self._path(alive & needed)

    def _path(self, usable: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64] | None:
        """+-1 along the fewest survivors that lead from place 0 to place k; breadth first."""
        places = self.chunks + 1
        # Of survivors with the same chunks the first is taken.
        edges, which = np.unique((self._starts * places + self._stops)[usable], return_index=True)
        workers = np.flatnonzero(usable)[which]
        ends = (edges // places, edges % places)
        graph = csr_array((np.ones(len(edges)), ends), shape=(places, places))
        before = breadth_first_order(graph, 0, directed=False)[1]
        if before[self.chunks] < 0:
            return None
        weights = np.zeros(self.workers)
        place = self.chunks
        while place:
            earlier = int(before[place])
            edge = min(earlier, place) * places + max(earlier, place)
            weights[workers[np.searchsorted(edges, edge)]] = 1.0 if earlier < place else -1.0
            place = earlier
        return weights


def shares(speeds: npt.NDArray[np.float64], total: int, *, most: int) -> npt.NDArray[np.int64]:
    """Whole numbers that sum to `total`, as proportional to `speeds` as can be.

    Args:
        speeds: (workers,) positive.
        total: Their sum; at most workers x `most`.
        most: Largest share; what a faster worker earns beyond it goes to the others.
    """
    exact = np.zeros(len(speeds))
    free = np.ones(len(speeds), dtype=bool)
    while free.any():
        left = total - most * int((~free).sum())
        exact[free] = left * speeds[free] / speeds[free].sum()
        over = free & (exact > most)
        if not over.any():
            break
        exact[over] = most
        free &= ~over
    # Sums like 0.1 + 0.2 must not push a share that is whole below itself.
    whole = np.floor(exact + 1e-9).astype(np.int64)
    remainders = np.where(whole < most, exact - whole, -np.inf)
    whole[np.argsort(-remainders, kind="stable")[: total - int(whole.sum())]] += 1
    return whole


def _balanced_groups(speeds: npt.NDArray[np.float64], groups: int) -> npt.NDArray[np.int64]:
    """(workers,) group of each: the fastest first, each to the group that is slowest so far."""
    sums = np.zeros(groups)
    chosen = np.zeros(len(speeds), dtype=np.int64)
    for worker in np.argsort(-speeds, kind="stable"):
        chosen[worker] = sums.argmin()
        sums[chosen[worker]] += speeds[worker]
    return chosen


def _checked(
    speeds: Sequence[float], stragglers: int, chunks: int | None
) -> tuple[npt.NDArray[np.float64], int]:
    """Speeds as an array and the number of chunks, if they make sense."""
    rates = np.asarray(speeds, dtype=np.float64)
    check_workers(len(rates), stragglers)
    wrong = np.flatnonzero(~(np.isfinite(rates) & (rates > 0)))
    if wrong.size:
        raise CodingError(
            f"speeds[{wrong[0]}] = {rates[wrong[0]]:g} is not above 0 and finite; leave out a "
            "worker that does nothing"
        )
    parts = _CHUNKS_PER_WORKER * len(rates) if chunks is None else chunks
    check_positive("chunks", parts)
    return rates, parts
