"""Which worker computes which chunks of a batch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import csc_array, csr_array

from outlast.errors import CodingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt


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
