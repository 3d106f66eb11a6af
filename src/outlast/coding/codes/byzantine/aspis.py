"""Aspis: adversaries detected as those that are outside of the largest group that agrees.

Konstantinidis and Ramamoorthy, "Aspis: A Robust Detection System for Distributed Learning" (ISIT
2022) and "Detection and Mitigation of Byzantine Attacks in Distributed Training" (IEEE/ACM
Transactions on Networking, 2024). Honest workers agree with each other on all chunks that they
share. A worker that sends a wrong copy disagrees with every honest holder of that chunk, and loses
its place among them for all chunks.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import numpy as np

from outlast.coding.assignment import Assignment
from outlast.coding.code import Bound
from outlast.coding.codes.byzantine.vote import (
    Aggregate,
    ByzantineOutcome,
    ReplicatedVote,
    agree,
    majority,
)
from outlast.errors import CodingError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

_MOST_CHUNKS = 100_000


def maximum_cliques(adjacency: npt.NDArray[np.bool_]) -> list[frozenset[int]]:
    """All largest sets of vertices that are joined to each other.

    Branch and bound on bit sets (Bron and Kerbosch 1973, with Tomita's pivots): exponential at
    worst, milliseconds for tens of vertices where most pairs are joined.

    Args:
        adjacency: (vertices, vertices) symmetric.
    """
    vertices = len(adjacency)
    joined = [
        sum(1 << other for other in np.flatnonzero(row).tolist() if other != vertex)
        for vertex, row in enumerate(adjacency)
    ]
    best: list[int] = [0]

    def grow(clique: int, candidates: int, done: int) -> None:
        nonlocal best
        size, largest = clique.bit_count(), best[0].bit_count()
        if not candidates and not done:
            best = [clique] if size > largest else [*best, clique] if size == largest else best
            return
        if size + candidates.bit_count() < largest:
            return
        pivot = max(
            _bits(candidates | done), key=lambda bit: (joined[bit] & candidates).bit_count()
        )
        for vertex in _bits(candidates & ~joined[pivot]):
            bit = 1 << vertex
            grow(clique | bit, candidates & joined[vertex], done & joined[vertex])
            candidates &= ~bit
            done |= bit

    grow(0, (1 << vertices) - 1, 0)
    return [frozenset(_bits(clique)) for clique in best]


def _bits(number: int) -> list[int]:
    found = []
    while number:
        lowest = number & -number
        found.append(lowest.bit_length() - 1)
        number ^= lowest
    return found


class AgreementVote(ReplicatedVote):
    """Votes among workers that agree with each other wherever they share a chunk.

    Where one largest group agrees on everything, only its members' copies count. Where there are
    several, those count that are in any of them. `ReplicatedVote`'s guarantee holds: a worker that
    sends a wrong copy disagrees with at least r - q > q honest workers, so no group with it is as
    large as that of all honest workers. With more adversaries, but less than half of the workers,
    those that disagree with all honest ones are still found; those that disagree with few may
    instead make these look guilty.
    """

    def vote(
        self,
        results: Mapping[tuple[int, int], npt.NDArray[np.float64]],
        tolerance: float = 0.0,
        *,
        agreement: npt.NDArray[np.bool_] | None = None,
    ) -> ByzantineOutcome:
        """Find the largest group that agrees, and decide all chunks; see `ReplicatedVote.vote`.

        Suspects are the workers outside of every largest group. A chunk of which none inside has
        a copy is undecided.

        Args:
            results: See `ReplicatedVote.vote`.
            tolerance: See `agree`.
            agreement: (workers, workers) who agreed with whom in earlier steps, all true before the
                first; disagreements of this step are noted in it. Without it steps stand alone.

        Raises:
            LostChunksError: When no copy of a chunk is there.
            CodingError: For results of a worker for a chunk that is not its own, or an agreement of
                another shape.
        """
        if agreement is None:
            agreement = np.ones((self.workers, self.workers), dtype=bool)
        if agreement.shape != (self.workers, self.workers):
            raise CodingError(
                f"agreement has shape {agreement.shape}, but there are {self.workers} workers"
            )
        copies = self._copies(results)
        _note_disagreements(copies, tolerance, agreement)
        trusted = frozenset[int]().union(*maximum_cliques(agreement))
        votes = []
        undecided = set()
        for chunk, held in enumerate(copies):
            kept = {worker: value for worker, value in held.items() if worker in trusted}
            vote = majority(kept or held, tolerance)
            if not kept or not vote.decided:
                undecided.add(chunk)
            votes.append(vote)
        outcome = self._outcome(votes)
        silent = {worker for worker in range(self.workers) if self._silent(worker, results)}
        disputed = frozenset(
            chunk for chunk, held in enumerate(copies) if majority(held, tolerance).dissenting
        )
        suspects = frozenset(range(self.workers)) - trusted - silent
        return ByzantineOutcome(outcome.gradient, suspects, disputed, frozenset(undecided))

    def _silent(
        self, worker: int, results: Mapping[tuple[int, int], npt.NDArray[np.float64]]
    ) -> bool:
        """Whether nothing came from a worker: a straggler is no adversary."""
        return not any((worker, int(item)) in results for item in self.assignment.chunks_of(worker))


def _note_disagreements(
    copies: list[dict[int, npt.NDArray[np.float64]]],
    tolerance: float,
    agreement: npt.NDArray[np.bool_],
) -> None:
    """Make `agreement` false for all pairs whose copies of any chunk differ."""
    for held in copies:
        for one, other in itertools.combinations(held, 2):
            if agreement[one, other] and not agree(held[one], held[other], tolerance):
                agreement[one, other] = agreement[other, one] = False


class Aspis(AgreementVote):
    """One chunk for every r of the n workers: C(n, r) chunks, C(n - 1, r - 1) for each worker.

    Every two workers share C(n - 2, r - 2) chunks, so no worker can be wrong unnoticed by all.

    Args:
        workers: n.
        replication: r, odd, at least 3.
        aggregate: See `ReplicatedVote`; the paper takes the median.

    Raises:
        CodingError: For a replication that is even or does not fit, or more than 100,000 chunks.
    """

    name = "Aspis"
    source = "Konstantinidis and Ramamoorthy (ISIT 2022)"

    def __init__(
        self, workers: int, replication: int = 3, *, aggregate: Aggregate = "median"
    ) -> None:
        check_replication(workers, replication)
        chunks = math.comb(workers, replication)
        if chunks > _MOST_CHUNKS:
            raise CodingError(
                f"workers = {workers} with replication = {replication} would be {chunks} chunks, "
                f"more than {_MOST_CHUNKS}; take fewer workers, AspisPlus or ByzShield"
            )
        held: list[list[int]] = [[] for _ in range(workers)]
        for chunk, group in enumerate(itertools.combinations(range(workers), replication)):
            for worker in group:
                held[worker].append(chunk)
        self.replication, self.aggregate = replication, aggregate
        self.assignment = Assignment.of(held, chunks)

    def detected_fraction(self, adversaries: int) -> Bound:
        """Share of the chunks that adversaries distort in spite of detection, q < n / 2.

        By the attack of the paper: they disagree with q chosen honest workers only, so that two
        groups of n - q agree, and outvote these where they hold the majority: half of the
        C(2 q, r) chunks among the 2 q. Fewer than (r + 1) / 2 adversaries distort nothing.
        """
        self._check_adversaries(adversaries)
        if 2 * adversaries >= self.workers:
            raise CodingError(
                f"adversaries = {adversaries} of {self.workers} workers are no minority; at most "
                f"{(self.workers - 1) // 2} are"
            )
        if adversaries <= self.tolerated:
            return Bound(0.0, "exact", "less than half of every chunk's copies")
        chunks = math.comb(2 * adversaries, self.replication) / 2
        return Bound(chunks / self.chunks, "lower", f"{self.source}, fixed disagreement")


class AspisPlus(AgreementVote):
    """One chunk for each block of a Steiner triple system: any two workers share exactly one.

    n (n - 1) / 6 chunks of 3 copies, (n - 1) / 2 for each worker: far fewer than Aspis has. Two
    workers meet once in a step, so a single step detects less; the paper permutes the workers
    between steps (`seed`) and gathers disagreements over several (`agreement`).

    Args:
        workers: n = 3 modulo 6, at least 9 (Bose's construction).
        seed: Of the permutation of the workers; None for none.
        aggregate: See `ReplicatedVote`.

    Raises:
        CodingError: For another number of workers.
    """

    name = "Aspis+"
    source = "Konstantinidis and Ramamoorthy (ToN 2024), with the blocks of Bose (1939)"

    def __init__(
        self, workers: int, *, seed: int | None = None, aggregate: Aggregate = "median"
    ) -> None:
        if workers < 9 or workers % 6 != 3:
            below = max(workers - (workers - 3) % 6, 9)
            raise CodingError(
                f"workers = {workers} is not 3 modulo 6, at least 9; {below} or {below + 6} would "
                "do"
            )
        order = list(range(workers))
        if seed is not None:
            order = np.random.default_rng(seed).permutation(workers).tolist()
        held: list[list[int]] = [[] for _ in range(workers)]
        blocks = _triples(workers)
        for chunk, block in enumerate(blocks):
            for point in block:
                held[order[point]].append(chunk)
        self.replication, self.aggregate = 3, aggregate
        self.assignment = Assignment.of(held, len(blocks))


def _triples(points: int) -> list[tuple[int, int, int]]:
    """Bose's Steiner triple system on points 3 a + level, a in an odd cyclic group."""
    size = points // 3
    half = (size + 1) // 2
    blocks = [(3 * a, 3 * a + 1, 3 * a + 2) for a in range(size)]
    for level in range(3):
        for a, b in itertools.combinations(range(size), 2):
            middle = (a + b) * half % size
            blocks.append((3 * a + level, 3 * b + level, 3 * middle + (level + 1) % 3))
    return blocks


def check_replication(workers: int, replication: int) -> None:
    """Refuse a number of copies that has no majority, or that there are no workers for."""
    most = workers - (workers + 1) % 2
    if replication < 3 or replication > workers or replication % 2 == 0:
        if workers < 3:
            raise CodingError(f"workers = {workers} is below 3; 3 would do")
        below = min(max(replication - (replication + 1) % 2, 3), most)
        hint = f"{below} or {below + 2}" if below + 2 <= most else f"{below}"
        raise CodingError(
            f"replication = {replication} is not an odd number from 3 to {most} for {workers} "
            f"workers; {hint} would do"
        )
