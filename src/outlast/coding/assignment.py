"""The assignment of coverage: every chunk has an owner and other holders.

Chunk ``owner * k + j`` is the j-th of its owner's k chunks.
Besides its owner, d - 1 others hold it, and every rank holds equally many chunks of others. Where
there are ranks enough, all chunks that a rank may take over have different owners, and all helpers
of an owner are different ranks: whoever is slow, its work is divided among as many as possible.

In a hidden random order of the ranks, chunk j's m-th other holder stands ``shift(j, m)`` places
behind its owner. Different shifts make different owners (the shifts are the rows of a Latin
rectangle), and the random order and shifts leave no structure that slow neighbours could hit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outlast.errors import CodingError

Table = npt.NDArray[np.int64]


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
