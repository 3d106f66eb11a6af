"""Gradient coding that uses what slow workers have finished.

Workers tell which chunks they have finished, everybody learns the status, and only then messages
are encoded: Ramamoorthy, Meng and Girimaji, "Leveraging partial stragglers within gradient coding"
(NeurIPS 2024). A chunk finished by the workers W with rows R_W of a fixed matrix R (workers x
parts) is encoded with U = the pseudo-inverse of R_W: worker j adds sum_b U[b, j] block_b(g_c) to
its message, and block_b(g) = sum_j R[j, b] y_j. A chunk with at least `parts` finished copies is
decoded exactly, one with fewer leaves a residual of parts - copies, whatever the others did.

The order in which workers compute their chunks decides how early all chunks are covered. Where
every chunk is first for one worker, second for another and so on, no chunk waits for slow workers
only at their ends. Such orders are decompositions of the assignment into perfect matchings; a
regular bipartite graph always has one (König).

The holders W of a chunk amplify rounding by 1 / (smallest singular value of R_W), so R is chosen
for the largest smallest singular value over all sets of `parts` holders of a chunk; more holders
can only raise it. Besides Gaussian rows of norm 1 there are rows on the trigonometric moment curve:
with angle t, for odd parts (1/sqrt 2, cos t, sin t, cos 2t, ...), for even parts (cos t/2, sin t/2,
cos 3t/2, ...). Any `parts` rows of different angles are independent (the curve is a Chebyshev
system), and turning all angles leaves singular values as they are, so with angles 2 pi r w / n all
windows of a cyclic assignment are alike and the best of the n rates r is quickly found.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from scipy.sparse import csr_array, issparse
from scipy.sparse.csgraph import maximum_bipartite_matching

from outlast.coding.assignment import Assignment
from outlast.coding.certificate import roundoff
from outlast.coding.code import TOLERANCE, check_positive
from outlast.coding.codes.blocks import BlockCode
from outlast.errors import CodingError

if TYPE_CHECKING:
    import numpy.typing as npt

    from outlast.coding.certificate import Certificate

Recombination = Literal["best", "ring", "golden", "gaussian"]
_DRAWS = 8
_RATES = 2000
_SUBSETS = 500
_GOLDEN_TURN = (math.sqrt(5.0) - 1.0) / 2.0


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


class PartialDecoding(BlockCode):
    """The block code for what is finished in one step.

    `assignment` are the finished chunks, `coefficients` what workers encode them with. Workers
    whose coefficients are all 0 need not send; should a sender be lost after all, `decode` of the
    others finds the weights of least error.

    Attributes:
        recombination: (workers, parts) matrix R; block_b(g) = sum_j R[j, b] message_j.
        residuals: (chunks,) max(parts - finished copies, 0): the squared Frobenius norm of what is
            missing of each chunk's blocks.
    """

    name = "partial-straggler gradient code"
    source = (
        'Ramamoorthy, Meng and Girimaji, "Leveraging partial stragglers within gradient coding", '
        "NeurIPS 2024"
    )

    def __init__(
        self,
        finished: Assignment,
        entries: npt.NDArray[np.float64],
        matrix: npt.NDArray[np.float64],
        dtype: str,
    ) -> None:
        self.assignment = finished
        self.entries = entries
        self.recombination = matrix
        self.parts = matrix.shape[1]
        self.tolerance = 0
        self.dtype = dtype
        self.residuals = np.maximum(self.parts - finished.copies, 0)

    @functools.cached_property
    def certificate(self) -> Certificate:
        """Of the decoding from all messages."""
        return self.decode(np.ones(self.workers, dtype=bool)).certificate

    @property
    def mean_error(self) -> float:
        """Sum of `residuals` / parts: see `DecodedBlocks.mean_error`."""
        return float(self.residuals.sum()) / self.parts

    def decoding_weights(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
        """(parts, workers): the transpose of R while every message is there."""
        senders = self.message_norms > 0
        if np.all(alive | ~senders):
            return np.where(senders, self.recombination.T, 0.0)
        return super().decoding_weights(alive)


class PartialCode:
    """Partial-straggler gradient coding with as many chunks as workers.

    Args:
        workers: Number of workers, n.
        copies: Workers that may compute each chunk, and chunks per worker, d.
        parts: Blocks of a gradient; messages are this many times shorter and every chunk needs so
            many finished copies. With 1 the code is plain coverage with weights 0 and 1.
        seed: Of random matrices R.
        assignment: Who may compute what; cyclic if None.
        kind: How R is made; see `recombination`.
        dtype: Type of the messages.
        tolerance: Largest rounding error of a chunk's blocks, as a share of them.

    Attributes:
        assignment: See above.
        orders: (workers, copies) chunks in the order in which each worker computes them.
        recombination: (workers, parts) matrix R.
        amplification: Largest factor by which encoding a chunk amplifies rounding.

    Raises:
        CodingError: For parameters that do not fit, and where amplification x unit roundoff is
            above `tolerance`.
    """

    name = PartialDecoding.name
    source = PartialDecoding.source

    def __init__(
        self,
        workers: int,
        copies: int,
        parts: int = 1,
        *,
        seed: int = 0,
        assignment: Assignment | None = None,
        kind: Recombination = "best",
        dtype: str = "float32",
        tolerance: float = TOLERANCE,
    ) -> None:
        _check(workers, copies, parts, assignment)
        self.workers = self.chunks = workers
        self.copies, self.parts, self.dtype = copies, parts, dtype
        if assignment is None:
            self.orders = cyclic_orders(workers, copies)
            self.assignment = assignment_of(self.orders)
        else:
            self.orders = matching_orders(assignment)
            self.assignment = assignment
        holders = self.assignment.incidence.tocsc().indices.reshape(workers, copies)
        self.recombination, self.amplification = recombination(holders, parts, kind=kind, seed=seed)
        if not self.amplification * roundoff(dtype) <= tolerance:
            raise CodingError(
                f"parts = {parts} with copies = {copies} amplifies rounding "
                f"{self.amplification:.3g} times, in {dtype} (unit roundoff {roundoff(dtype):.2g}) "
                f"to {self.amplification * roundoff(dtype):.2g} of a chunk's gradient, above "
                f"tolerance = {tolerance:g}; take fewer parts or messages of a wider type"
            )

    @property
    def tolerance(self) -> int:
        """Any so many workers that finish nothing leave the gradient exact."""
        return self.copies - self.parts

    @functools.cached_property
    def q_max(self) -> int:
        """Most chunks that the cluster may compute before the gradient is exact."""
        return q_max(self.orders, self.parts)

    def order(self, worker: int) -> npt.NDArray[np.int64]:
        """(copies,) chunks of a worker in the order in which it computes them."""
        return np.asarray(self.orders[worker])

    def status(self, done: npt.NDArray[np.int64]) -> csr_array:
        """(workers, chunks) finished chunks when workers keep to their orders.

        Args:
            done: (workers,) how many chunks each worker has finished.

        Raises:
            CodingError: For numbers that are not in [0, copies].
        """
        done = np.asarray(done)
        if done.shape != (self.workers,) or done.min() < 0 or done.max() > self.copies:
            raise CodingError(
                f"done has shape {done.shape} and values up to {done.max(initial=0)}; it takes "
                f"{self.workers} numbers in [0, {self.copies}]"
            )
        # Sorting the chunks of each worker, with those not yet finished behind all others.
        reached = np.arange(self.copies) < done[:, None]
        chunks = np.sort(np.where(reached, self.orders, self.chunks), axis=1)
        indices = chunks[chunks < self.chunks]
        pointers = np.concatenate([[0], np.cumsum(done)])
        shape = (self.workers, self.chunks)
        return csr_array((np.ones(len(indices)), indices, pointers), shape=shape)

    def plan(self, finished: csr_array | npt.NDArray[np.bool_]) -> PartialDecoding:
        """Encoding for a known status.

        Args:
            finished: (workers, chunks) whether each worker has finished each chunk: a boolean array
                or a CSR matrix, as from `status`.

        Raises:
            CodingError: For a status of another shape, or of chunks that a worker does not hold.
        """
        status = finished if issparse(finished) else np.asarray(finished, dtype=np.float64)
        incidence = csr_array(status, dtype=np.float64)
        if incidence.shape != self.assignment.incidence.shape:
            raise CodingError(
                f"the status has shape {incidence.shape}, but there are {self.workers} workers and "
                f"{self.chunks} chunks"
            )
        incidence.eliminate_zeros()
        incidence.sort_indices()
        incidence.data[:] = 1.0
        strange = (incidence - incidence.multiply(self.assignment.incidence)).tocoo()
        if strange.count_nonzero():
            first = int(np.argmax(strange.data != 0))
            worker, chunk = int(strange.row[first]), int(strange.col[first])
            raise CodingError(
                f"worker {worker} is said to have finished chunk {chunk}, but it holds "
                f"{self.order(worker).tolist()}"
            )
        entries = self._selected(incidence) if self.parts == 1 else self._pseudo_inverses(incidence)
        return PartialDecoding(Assignment(incidence), entries, self.recombination, self.dtype)

    def _selected(self, finished: csr_array) -> npt.NDArray[np.float64]:
        """(finished, 1) 1 for one worker per chunk: the one that computes it soonest, else 0."""
        worker, chunk = _coordinates(finished)
        # Each worker's order as keys; a finished chunk is found among them by binary search.
        keys = np.arange(self.workers)[:, None] * self.chunks + self.orders
        sorter = np.argsort(keys, axis=None)
        found = sorter[np.searchsorted(keys.ravel(), worker * self.chunks + chunk, sorter=sorter)]
        ranked = np.lexsort((worker, found % self.copies, chunk))
        entries = np.zeros((len(worker), 1))
        entries[ranked[np.unique(chunk[ranked], return_index=True)[1]]] = 1.0
        return entries

    def _pseudo_inverses(self, finished: csr_array) -> npt.NDArray[np.float64]:
        """(finished, parts) the columns of the pseudo-inverses of each chunk's rows of R."""
        worker, chunk = _coordinates(finished)
        by_chunk = np.argsort(chunk, kind="stable")
        copies = np.bincount(chunk, minlength=self.chunks)
        starts = np.cumsum(copies) - copies
        entries = np.empty((len(worker), self.parts))
        # Chunks with equally many copies are solved together.
        for count in np.unique(copies[copies > 0]):
            members = by_chunk[starts[copies == count][:, None] + np.arange(count)]
            inverse = np.linalg.pinv(self.recombination[worker[members]])
            entries[members] = inverse.transpose(0, 2, 1)
        return entries

    def __repr__(self) -> str:
        return f"PartialCode(workers={self.workers}, copies={self.copies}, parts={self.parts})"


def _coordinates(matrix: csr_array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Row and column of every entry, row after row."""
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    return rows, matrix.indices.astype(np.int64)


def _check(workers: int, copies: int, parts: int, assignment: Assignment | None) -> None:
    check_positive("workers", workers)
    if not 1 <= copies <= workers:
        raise CodingError(f"copies = {copies} is not in [1, {workers}] for {workers} workers")
    if not 1 <= parts <= copies:
        raise CodingError(
            f"parts = {parts} is not in [1, {copies}]: every chunk needs at least {parts} copies, "
            f"but copies = {copies}"
        )
    if assignment is not None and assignment.incidence.shape != (workers, workers):
        raise CodingError(
            f"the assignment is of {assignment.chunks} chunks to {assignment.workers} workers, but "
            f"workers = {workers} needs {workers} of both"
        )
    if assignment is not None and int(assignment.loads[0]) != copies:
        raise CodingError(
            f"copies = {copies}, but the assignment gives {int(assignment.loads[0])} chunks to a "
            f"worker; take copies = {int(assignment.loads[0])}"
        )
