"""Gradient coding that uses what slow workers have finished.

Workers tell which chunks they have finished, everybody learns the status, and only then messages
are encoded: Ramamoorthy, Meng and Girimaji, "Leveraging partial stragglers within gradient coding"
(NeurIPS 2024). A chunk finished by the workers W with rows R_W of a fixed matrix R (workers x
parts) is encoded with U = the pseudo-inverse of R_W: worker j adds sum_b U[b, j] block_b(g_c) to
its message, and block_b(g) = sum_j R[j, b] y_j. A chunk with at least `parts` finished copies is
decoded exactly, one with fewer leaves a residual of parts - copies, whatever the others did.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import csr_array, issparse

from outlast.coding.assignment import Assignment
from outlast.coding.certificate import roundoff
from outlast.coding.codes.blocks import BlockCode
from outlast.coding.codes.checks import check_positive
from outlast.coding.codes.ordering import (
    assignment_of,
    cyclic_orders,
    matching_orders,
    q_max,
)
from outlast.coding.codes.recombination import Recombination, recombination
from outlast.coding.conditioning import TOLERANCE
from outlast.errors import CodingError

if TYPE_CHECKING:
    import numpy.typing as npt

    from outlast.coding.certificate import Certificate


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
        """What everybody encodes, once the status is known.

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
