"""Replicated chunks and votes: gradients that survive workers which send anything at all.

An adversary knows everything and colludes. A chunk's gradient is computed by r workers, and honest
copies of it are equal (to the last bit, where the computation is reproducible). A chunk of which
less than half the copies come from adversaries is decided rightly by majority. How the chunks are
spread over the workers decides how many chunks the worst set of q adversaries can distort:
`Draco` groups workers, `outlast.coding.codes.byzantine.shield` spreads every pair of them.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from outlast.coding.assignment import Assignment
from outlast.coding.code import Bound
from outlast.coding.codes.byzantine.distortion import spectral_distortion, worst_distortion
from outlast.errors import CodingError, LostChunksError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

Aggregate = Literal["sum", "median"]


@dataclass(frozen=True, eq=False)
class ByzantineOutcome:
    """What the votes decided.

    Attributes:
        gradient: (gradient,) of the batch: the sum of the chunks' gradients.
        suspects: Workers that sent something else than what was decided.
        disputed: Chunks of which not all copies agree.
        undecided: Chunks for which no majority was found; the value with most votes is taken.
    """

    gradient: npt.NDArray[np.float64]
    suspects: frozenset[int]
    disputed: frozenset[int]
    undecided: frozenset[int]


@dataclass(frozen=True, eq=False)
class Vote:
    """The vote on one chunk.

    Attributes:
        value: (gradient,) the copy that most copies agree with.
        dissenting: Workers whose copies do not agree with it.
        decided: Whether more than half of the copies agree with it.
    """

    value: npt.NDArray[np.float64]
    dissenting: frozenset[int]
    decided: bool


def agree(
    first: npt.NDArray[np.float64], second: npt.NDArray[np.float64], tolerance: float
) -> bool:
    """Whether two copies differ by at most `tolerance` of their largest element; 0 for equality.

    A copy that holds NaN agrees with nothing, itself included.
    """
    if tolerance == 0.0 or first.shape != second.shape:
        return bool(np.array_equal(first, second))
    with np.errstate(invalid="ignore"):
        apart = np.abs(first - second).max(initial=0.0)
        size = max(np.abs(first).max(initial=0.0), np.abs(second).max(initial=0.0))
    return bool(apart <= tolerance * size) and math.isfinite(size)


def majority(copies: Mapping[int, npt.NDArray[np.float64]], tolerance: float = 0.0) -> Vote:
    """The vote among copies of one chunk, by worker.

    With fewer than half of the copies wrong, the value is a right one, or (for a tolerance above 0)
    within the tolerance of a right one.
    """
    workers = sorted(copies)
    votes = np.eye(len(workers), dtype=bool)
    for one in range(len(workers)):
        for other in range(one):
            same = agree(copies[workers[one]], copies[workers[other]], tolerance)
            votes[one, other] = votes[other, one] = same
    winner = int(votes.sum(axis=1).argmax())
    dissenting = frozenset(workers[item] for item in np.flatnonzero(~votes[winner]))
    decided = 2 * int(votes[winner].sum()) > len(workers)
    return Vote(copies[workers[winner]], dissenting, decided)


class ReplicatedVote:
    """An assignment of every chunk to r workers, and the votes on it.

    Guarantee: with at most (r - 1) / 2 adversaries, wherever they are, every chunk is decided
    rightly and every worker that sent a wrong copy is suspected, no other is. A copy that does not
    arrive is no vote: with e of a chunk's copies missing, r - e takes the place of r.

    Attributes:
        name: The scheme's name.
        source: Where it comes from.
        assignment: (workers, chunks).
        replication: Copies of each chunk, r.
        aggregate: ``sum`` of the decided chunks, exact as long as they are right; or ``median``,
            the number of chunks times their coordinate-wise median, which is not the gradient
            but cannot be moved far by few wrong chunks.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    assignment: Assignment
    replication: int
    aggregate: Aggregate = "sum"

    @property
    def workers(self) -> int:
        """Number of workers, n."""
        return self.assignment.workers

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return self.assignment.chunks

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(workers={self.workers}, chunks={self.chunks}, "
            f"replication={self.replication}, aggregate={self.aggregate!r})"
        )

    @property
    def tolerated(self) -> int:
        """Adversaries that distort nothing, wherever they are."""
        return (self.replication - 1) // 2

    def vote(
        self,
        results: Mapping[tuple[int, int], npt.NDArray[np.float64]],
        tolerance: float = 0.0,
    ) -> ByzantineOutcome:
        """Decide all chunks.

        Args:
            results: (worker, chunk) -> (gradient,) of what each worker sent; a worker's results for
                chunks that are not its own are refused.
            tolerance: See `agree`.

        Raises:
            LostChunksError: When no copy of a chunk is there.
            CodingError: For results of a worker for a chunk that is not its own.
        """
        copies = self._copies(results)
        return self._outcome([majority(copy_, tolerance) for copy_ in copies])

    def _copies(
        self, results: Mapping[tuple[int, int], npt.NDArray[np.float64]]
    ) -> list[dict[int, npt.NDArray[np.float64]]]:
        """Copies of each chunk, by worker; what has another shape than most agrees with nothing."""
        shapes = Counter(value.shape for value in results.values())
        shape = shapes.most_common(1)[0][0] if shapes else ()
        copies: list[dict[int, npt.NDArray[np.float64]]] = [{} for _ in range(self.chunks)]
        owned = [set(self.assignment.chunks_of(worker).tolist()) for worker in range(self.workers)]
        for (worker, chunk), value in results.items():
            if not 0 <= worker < self.workers or chunk not in owned[worker]:
                raise CodingError(f"chunk {chunk} is not one that worker {worker} computes")
            copies[chunk][worker] = value if value.shape == shape else np.full(shape, np.nan)
        lost = tuple(chunk for chunk, copy_ in enumerate(copies) if not copy_)
        if lost:
            raise LostChunksError(f"there is no copy of chunks {list(lost)}", lost)
        return copies

    def _outcome(self, votes: list[Vote]) -> ByzantineOutcome:
        values = np.stack([vote.value for vote in votes])
        if self.aggregate == "sum":
            gradient = values.sum(axis=0)
        else:
            gradient = len(values) * np.median(values, axis=0)
        suspects = frozenset[int]().union(*(vote.dissenting for vote in votes if vote.decided))
        disputed = frozenset(chunk for chunk, vote in enumerate(votes) if vote.dissenting)
        undecided = frozenset(chunk for chunk, vote in enumerate(votes) if not vote.decided)
        return ByzantineOutcome(gradient, suspects, disputed, undecided)

    def distorted_fraction(self, adversaries: int) -> Bound:
        """Share of the chunks that the worst set of so many adversaries can distort, epsilon(q).

        By trying all sets, where there are few enough (kind ``exact``), else the worst that a local
        search finds (kind ``lower``). A chunk counts as soon as half of its copies are wrong.
        """
        self._check_adversaries(adversaries)
        return worst_distortion(self.assignment, self.replication, adversaries)

    def distortion_bound(self, adversaries: int) -> Bound:
        """Upper bound of `distorted_fraction`, from the second singular value of the assignment."""
        self._check_adversaries(adversaries)
        return spectral_distortion(self.assignment, self.replication, adversaries)

    def _check_adversaries(self, adversaries: int) -> None:
        if not 0 <= adversaries <= self.workers:
            raise CodingError(f"adversaries = {adversaries} is not in 0 to {self.workers}")


class Draco(ReplicatedVote):
    """DRACO's repetition code: groups of r = 2 q + 1 workers, each with one chunk of its own.

    Any q adversaries distort nothing; q + 1 in one group distort its chunk. Every worker computes
    the share r / n of the batch.

    Args:
        workers: n, a multiple of 2 q + 1.
        adversaries: q.

    Raises:
        CodingError: When the groups do not come out even.
    """

    name = "DRACO, repetition"
    source = "Chen, Wang, Charles and Papailiopoulos (ICML 2018)"

    def __init__(self, workers: int, adversaries: int) -> None:
        check_adversaries(workers, adversaries)
        self.replication = 2 * adversaries + 1
        if workers % self.replication:
            below = workers - workers % self.replication
            raise CodingError(
                f"workers = {workers} is not a multiple of 2 adversaries + 1 = "
                f"{self.replication}; {below} or {below + self.replication} would do, or "
                "DracoCyclic"
            )
        groups = workers // self.replication
        self.assignment = Assignment.of(
            [[worker // self.replication] for worker in range(workers)], groups
        )


def check_adversaries(workers: int, adversaries: int) -> None:
    """Refuse numbers of adversaries with which no majority of all workers is honest."""
    if workers < 1:
        raise CodingError(f"workers = {workers} is below 1; 1 would do")
    most = (workers - 1) // 2
    if not 0 <= adversaries <= most:
        raise CodingError(
            f"adversaries = {adversaries} is not in 0 to {most} for {workers} workers; "
            f"{min(max(adversaries, 0), most)} would do"
        )
