"""In which order workers compute their chunks, so that all chunks are covered early.

A worker that is slow has finished the first chunks of its order. Where every chunk is first for
one worker, second for another and so on, no chunk waits for slow workers only at their ends:
Ramamoorthy, Meng and Girimaji, "Leveraging partial stragglers within gradient coding" (NeurIPS
2024). Such orders are decompositions of the assignment into perfect matchings; a regular bipartite
graph always has one (König).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from outlast.coding.assignment import Assignment
from outlast.errors import CodingError

if TYPE_CHECKING:
    import numpy.typing as npt


def cyclic_orders(workers: int, copies: int) -> npt.NDArray[np.int64]:
    """(workers, copies) orders in which worker w computes chunks w, w + 1, ... modulo workers.

    Each position is a perfect matching, so these orders are optimal for their assignment.
    """
    return (np.arange(workers)[:, None] + np.arange(copies)) % workers


def assignment_of(orders: npt.NDArray[np.int64]) -> Assignment:
    """The assignment of as many chunks as workers that these orders belong to."""
    workers, copies = orders.shape
    pointers = np.arange(0, workers * copies + 1, copies)
    content = (np.ones(orders.size), np.sort(orders, axis=1).ravel(), pointers)
    return Assignment(csr_array(content, shape=(workers, workers)))


def matching_orders(assignment: Assignment) -> npt.NDArray[np.int64]:
    """Orders whose every position is a perfect matching of workers and chunks.

    By maximum matchings (Hopcroft and Karp), each taken out before the next.

    Args:
        assignment: As many chunks as workers, all workers with equally many chunks and all chunks
            with equally many workers.

    Returns:
        (workers, copies) chunk that each worker computes first, second, ...

    Raises:
        CodingError: For another assignment.
    """
    copies = int(assignment.loads[0])
    if assignment.workers != assignment.chunks:
        raise CodingError(
            f"orders by matchings need as many chunks as workers, but there are "
            f"{assignment.chunks} chunks and {assignment.workers} workers"
        )
    if np.any(assignment.loads != copies) or np.any(assignment.copies != copies):
        loads, held = assignment.loads, assignment.copies
        raise CodingError(
            f"orders by matchings need equal loads and equal copies, but workers have "
            f"{loads.min()} to {loads.max()} chunks and chunks {held.min()} to {held.max()} copies"
        )
    left = assignment.incidence.copy()
    orders = np.empty((assignment.workers, copies), dtype=np.int64)
    for position in range(copies):
        matched = maximum_bipartite_matching(left, perm_type="column").astype(np.int64)
        orders[:, position] = matched
        kept = left.indices != np.repeat(matched, copies - position)
        pointers = np.arange(assignment.workers + 1) * (copies - position - 1)
        left = csr_array((left.data[kept], left.indices[kept], pointers), shape=left.shape)
    return orders


def q_max(orders: npt.NDArray[np.int64], copies_needed: int = 1) -> int:
    """Most chunks that the cluster may compute before every chunk is finished often enough.

    A chunk is late at worst when everybody who does not hold it has computed everything, all but
    `copies_needed` - 1 of its holders stand right before it, and these few, those that begin with
    it soonest, have computed everything as well; one more chunk then ends it.

    Args:
        orders: (workers, copies) orders; as many chunks as workers.
        copies_needed: Finished copies that every chunk needs: the code's parts.

    Raises:
        CodingError: When there are fewer copies than needed.
    """
    workers, copies = orders.shape
    if not 1 <= copies_needed <= copies:
        raise CodingError(f"copies_needed = {copies_needed} is not in [1, {copies}]")
    by_chunk = np.argsort(orders, axis=None, kind="stable").reshape(workers, copies)
    places = np.sort(by_chunk % copies, axis=1)
    most = places.sum(axis=1) + np.sum(copies - places[:, : copies_needed - 1], axis=1)
    return int(1 + copies * (workers - copies) + most.max())


def q_max_bound(workers: int, copies: int) -> int:
    """Lower bound of `q_max` over all orders of all assignments, for one needed copy.

    1 + d (n - d) + d (d - 1) / 2 (Ramamoorthy, Meng and Girimaji): a chunk's places in its holders'
    orders sum to d (d - 1) / 2 on average. Orders by matchings meet it.
    """
    return 1 + copies * (workers - copies) + copies * (copies - 1) // 2


def missing_copies(
    orders: npt.NDArray[np.int64], finished: npt.NDArray[np.int64], parts: int = 1
) -> npt.NDArray[np.int64]:
    """Missing copies of all chunks when workers stop at a deadline.

    Args:
        orders: (workers, copies) orders; as many chunks as workers.
        finished: (draws, workers) chunks that each worker has finished.
        parts: Finished copies that every chunk needs.

    Returns:
        (draws,) sum over chunks of max(parts - finished copies, 0). Divided by parts x chunks it is
        the mean square error of the decoded gradient, for uncorrelated chunk gradients of equal
        norm, as a share of their squared norm.
    """
    workers, copies = orders.shape
    holders = np.argsort(orders, axis=None, kind="stable").reshape(workers, copies)
    held = np.zeros((len(finished), workers), dtype=np.int64)
    for column in range(copies):
        worker, place = np.divmod(holders[:, column], copies)
        held += finished[:, worker] > place
    return np.asarray(np.maximum(parts - held, 0).sum(axis=1))
