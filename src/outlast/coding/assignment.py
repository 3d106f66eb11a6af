"""Assignments: the chunks of a batch that each worker computes.

`Assignment` is any table of workers and chunks; `spread` makes that of coverage, in which every
chunk has an owner and other holders. Chunk ``owner * k + j`` is the j-th of its owner's k chunks.
Besides its owner, d - 1 others hold it, and every rank holds equally many chunks of others. Where
there are ranks enough, all chunks that a rank may take over have different owners, and all helpers
of an owner are different ranks: whoever is slow, its work is divided among as many as possible.

In a hidden random order of the ranks, chunk j's m-th other holder stands ``shift(j, m)`` places
behind its owner. Different shifts make different owners (the shifts are the rows of a Latin
rectangle), and the random order and shifts leave no structure that slow neighbours could hit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from scipy.sparse import csc_array, csr_array

from outlast.errors import CodingError

if TYPE_CHECKING:
    from collections.abc import Sequence

Table = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Assignment:
    """A sparse 0/1 matrix: entry (w, c) is 1 where worker w computes chunk c.

    Attributes:
        incidence: (workers, chunks), CSR, float64, with sorted column indices.
    """

    incidence: csr_array

    @classmethod
    def of(
        cls, chunks_of_workers: Sequence[Sequence[int]] | npt.NDArray[np.int64], chunks: int
    ) -> Assignment:
        """The assignment with these chunks per worker, as an array where all have equally many.

        Raises:
            CodingError: Without workers, for chunks that do not exist, and for one that a worker
                is given twice.
        """
        if not len(chunks_of_workers):
            raise CodingError("an assignment needs at least 1 worker")
        pointers = np.concatenate([[0], np.cumsum([len(worker) for worker in chunks_of_workers])])
        if isinstance(chunks_of_workers, np.ndarray):
            indices = np.sort(chunks_of_workers, axis=1).ravel()
        else:
            indices = np.concatenate([np.sort(np.asarray(e, np.int64)) for e in chunks_of_workers])
        if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < chunks:
            raise CodingError(f"a worker is given a chunk that is not in [0, {chunks})")
        owners = np.repeat(np.arange(len(chunks_of_workers)), np.diff(pointers))
        twice = np.flatnonzero((np.diff(indices) == 0) & (np.diff(owners) == 0))
        if twice.size:
            raise CodingError(f"worker {owners[twice[0]]} is given chunk {indices[twice[0]]} twice")
        shape = (len(chunks_of_workers), chunks)
        return cls(csr_array((np.ones(len(indices)), indices, pointers), shape=shape))

    @property
    def workers(self) -> int:
        """Number of workers."""
        return int(self.incidence.shape[0])

    @property
    def chunks(self) -> int:
        """Number of chunks that the batch is divided into."""
        return int(self.incidence.shape[1])

    @property
    def loads(self) -> npt.NDArray[np.int64]:
        """(workers,) chunks that each worker computes."""
        loads: npt.NDArray[np.int64] = np.diff(self.incidence.indptr)
        return loads.astype(np.int64)

    @property
    def copies(self) -> npt.NDArray[np.int64]:
        """(chunks,) workers that compute each chunk."""
        return np.bincount(self.incidence.indices, minlength=self.chunks).astype(np.int64)

    @functools.cached_property
    def _by_chunk(self) -> csc_array:
        return self.incidence.tocsc()

    def chunks_of(self, worker: int) -> npt.NDArray[np.int64]:
        """The chunks of one worker, ascending.

        Raises:
            CodingError: For a worker that does not exist.
        """
        if not 0 <= worker < self.workers:
            raise CodingError(f"worker = {worker} is not in [0, {self.workers})")
        start, stop = self.incidence.indptr[worker : worker + 2]
        return np.asarray(self.incidence.indices[start:stop], dtype=np.int64)

    def holders_of(self, chunk: int) -> npt.NDArray[np.int64]:
        """The workers that compute one chunk, ascending.

        Raises:
            CodingError: For a chunk that does not exist.
        """
        if not 0 <= chunk < self.chunks:
            raise CodingError(f"chunk = {chunk} is not in [0, {self.chunks})")
        columns = self._by_chunk
        start, stop = columns.indptr[chunk : chunk + 2]
        return np.sort(np.asarray(columns.indices[start:stop], dtype=np.int64))


@dataclass(frozen=True, eq=False)
class Spread:
    """Chunks and their holders.

    Attributes:
        workers: Number of ranks, n.
        chunks_per_worker: Chunks that each rank owns, k.
        holder_table: (n k, d) ranks that hold each chunk, its owner first.
        backup_table: (n, k (d - 1)) chunks of others that each rank holds, their owners' last ones
            first: an owner works from its first chunk on, so its last is the last to be done twice.
    """

    workers: int
    chunks_per_worker: int
    holder_table: Table
    backup_table: Table

    @property
    def copies(self) -> int:
        """Ranks that hold a chunk, d."""
        return int(self.holder_table.shape[1])

    @property
    def chunks(self) -> int:
        """Number of chunks, n k."""
        return self.workers * self.chunks_per_worker

    def owner(self, chunk: int) -> int:
        """The rank whose chunk it is."""
        return chunk // self.chunks_per_worker

    def own(self, rank: int) -> range:
        """The chunks of a rank, in the order in which it computes them."""
        return range(rank * self.chunks_per_worker, (rank + 1) * self.chunks_per_worker)

    def backups(self, rank: int) -> Table:
        """(k (d - 1),) chunks of others that a rank holds, those to look at first in front."""
        return np.asarray(self.backup_table[rank])

    def holders(self, chunk: int) -> Table:
        """(d,) ranks that hold a chunk, its owner first."""
        return np.asarray(self.holder_table[chunk])

    @functools.cached_property
    def assignment(self) -> Assignment:
        """The same as a sparse matrix."""
        own = np.arange(self.chunks).reshape(self.workers, self.chunks_per_worker)
        return Assignment.of(list(np.concatenate([own, self.backup_table], axis=1)), self.chunks)


def spread(workers: int, chunks_per_worker: int, copies: int, *, seed: int = 0) -> Spread:
    """Give every chunk `copies` holders.

    Args:
        workers: Number of ranks, n.
        chunks_per_worker: Chunks that each rank owns, k.
        copies: Ranks that hold a chunk, its owner among them, d; from 1 to n.
        seed: Of the random order and shifts. Equal seeds make equal tables on all machines.

    Raises:
        CodingError: For counts below 1, or more copies than ranks.
    """
    for name, value in (("workers", workers), ("chunks_per_worker", chunks_per_worker)):
        if value < 1:
            raise CodingError(f"{name} = {value} is below 1")
    if not 1 <= copies <= workers:
        raise CodingError(
            f"copies = {copies} is not possible with {workers} workers: from 1 to {workers}"
        )
    # Raw output, since numpy keeps a bit generator's stream but not how permutations come from it.
    generator = np.random.PCG64(seed)
    rank_at = np.argsort(generator.random_raw(workers), kind="stable")
    place_of = np.empty_like(rank_at)
    place_of[rank_at] = np.arange(workers)
    others = copies - 1
    # (k, d - 1) shifts from 1 to n - 1, different within each row, each used equally often.
    dealt: list[int] = []
    while len(dealt) < chunks_per_worker * others:
        fresh = [int(e) + 1 for e in np.argsort(generator.random_raw(workers - 1), kind="stable")]
        begun = dealt[len(dealt) - len(dealt) % others :]
        missing = (others - len(begun)) % others
        first = [shift for shift in fresh if shift not in begun][:missing]
        dealt += first + [shift for shift in fresh if shift not in first]
    shifts = np.asarray(dealt[: chunks_per_worker * others], dtype=np.int64).reshape(
        chunks_per_worker, others
    )
    # helper[o, j, m] and, the other way round, lender[r, j, m].
    place = place_of[:, None, None]
    helper = rank_at[(place + shifts) % workers]
    lender = rank_at[(place - shifts) % workers]
    chunk = np.arange(workers * chunks_per_worker)
    holders = np.concatenate(
        [chunk[:, None] // chunks_per_worker, helper.reshape(len(chunk), others)], axis=1
    )
    backups = lender * chunks_per_worker + np.arange(chunks_per_worker)[:, None]
    last_first = backups[:, ::-1].reshape(workers, chunks_per_worker * others)
    return Spread(workers, chunks_per_worker, holders, last_first)
