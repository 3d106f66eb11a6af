"""Soft block designs: any number of workers, chunks and copies, overlaps as equal as possible."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.linalg import LinearOperator, eigsh

from outlast.coding.certificate import roundoff
from outlast.coding.code import Bound, GradientCode, survivors_of
from outlast.coding.codes.checks import check_positive
from outlast.coding.codes.equal_weights import best_equal_weight, equal_weight_error
from outlast.errors import CodingError

if TYPE_CHECKING:
    import numpy.typing as npt

_WINDOW = 64
_DENSE_ENTRIES = 250_000


class SoftDesign(GradientCode):
    """A near-design for any parameters: workers share as equally many chunks as can be arranged.

    Chunks choose their workers one after the other from a shuffled deck in which every worker is
    equally often (loads differ by at most one), each the one of the next few that has least in
    common with those chosen before.

    Args:
        workers: n.
        copies: Workers of each chunk, d.
        chunks: Number of chunks, k; as many as workers if None.
        seed: Of the shuffling.
        dtype: Type of the messages.

    Raises:
        CodingError: For copies that are not in [1, workers], or chunks below 1.
    """

    name: ClassVar[str] = "soft block design"
    source: ClassVar[str] = "Sakorikar and Wang 2021"

    def __init__(
        self,
        workers: int,
        copies: int,
        *,
        chunks: int | None = None,
        seed: int = 0,
        dtype: str = "float32",
    ) -> None:
        count = workers if chunks is None else chunks
        check_positive("workers", workers)
        if not 1 <= copies <= workers:
            raise CodingError(f"copies = {copies} is not in [1, {workers}]")
        check_positive("chunks", count)
        holders = _spread(workers, copies, count, np.random.default_rng(seed))
        places = (holders.ravel(), np.repeat(np.arange(count), copies))
        self.matrix = csr_array((np.ones(holders.size), places), shape=(workers, count))
        self.tolerance = 0
        self.copies = copies
        roundoff(dtype)
        self.dtype = dtype

    @functools.cached_property
    def most_shared(self) -> int:
        """Largest number of chunks that two workers share."""
        shared = (self.matrix @ self.matrix.T).tocoo()
        return int(shared.data[shared.row != shared.col].max(initial=0))

    @functools.cached_property
    def imbalance(self) -> float:
        """Largest ``|B^T v| / |v|`` of vectors v that sum to 0: the second singular value of B."""
        workers = self.workers
        if workers * self.chunks <= _DENSE_ENTRIES:
            dense = self.matrix.toarray()
            return float(np.linalg.norm(dense - dense.mean(axis=0), 2))

        def squared(vector: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
            image = self.matrix @ (self.matrix.T @ (vector - vector.mean()))
            return np.asarray(image - image.mean())

        operator = LinearOperator((workers, workers), matvec=squared, dtype=np.float64)
        start = np.random.default_rng(0).standard_normal(workers)
        top = eigsh(operator, k=1, which="LA", v0=start, tol=1e-6, return_eigenvectors=False)
        return float(np.sqrt(top[0]))

    def fixed_weights(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """(workers,) the equal weight whose mean error over random stragglers is least.

        That of a design with the mean overlap l: r / (r + l (u - 1)).
        """
        copies = self.assignment.copies
        return np.where(alive, best_equal_weight(copies, self.workers, int(alive.sum())), 0.0)

    def worst_error(self, stragglers: int) -> Bound:
        """The smaller of two bounds, each of equal weights for all survivors.

        k - u r^2 / (r + m (u - 1)), with r the least load and m the most chunks that two workers
        share: w = r / (r + m (u - 1)) leaves at most k - 2 w u r + w^2 u (r + m (u - 1)), and
        larger loads of some survivors only lessen it. It is sharp for dense near-designs.

        sigma^2 n s / (d^2 u), with sigma the second singular value of B, as for expanders: the
        weight n / (d u) is right for the part of the survivors' indicator that is constant, and
        the rest has the squared norm u s / n.
        """
        survivors = survivors_of(self.workers, stragglers)
        if stragglers == 0:
            return Bound(0.0, "exact", self.source)
        bounds = [Bound(float(self.chunks), "upper", "weights of zero")]
        if survivors:
            least = int(self.assignment.loads.min())
            weight = least / max(least + self.most_shared * (survivors - 1), 1)
            left = self.chunks - survivors * least * weight
            bounds.append(Bound(left, "upper", "equal weights, most shared chunks"))
            spectral = (self.imbalance / self.copies) ** 2 * self.workers * stragglers / survivors
            bounds.append(Bound(spectral, "upper", "equal weights, second singular value"))
        return min(bounds, key=lambda bound: bound.value)

    def expected_error(self, stragglers: int) -> Bound:
        """Mean error of the fixed decoder, exact for that one, so an upper bound here."""
        survivors = survivors_of(self.workers, stragglers)
        if stragglers == 0:
            return Bound(0.0, "exact", self.source)
        copies = self.assignment.copies
        weight = best_equal_weight(copies, self.workers, survivors)
        mean = equal_weight_error(copies, self.workers, survivors, weight)
        return Bound(mean, "upper", "equal weights, from the copies of each chunk")


def _spread(
    workers: int, copies: int, chunks: int, generator: np.random.Generator
) -> npt.NDArray[np.int64]:
    """(chunks, copies) workers of each chunk, see `SoftDesign`."""
    cards = chunks * copies
    deals = [generator.permutation(workers) for _ in range(-(-cards // workers))]
    deck = np.concatenate(deals)[:cards]
    holders = np.full((chunks, copies), -1, dtype=np.int64)
    held: list[list[int]] = [[] for _ in range(workers)]
    taken = chunks * copies + 1  # more than a worker can have in common with those of a chunk
    top = 0
    for chunk in range(chunks):
        common = np.zeros(workers, dtype=np.int64)
        for place in range(copies):
            best = top + int(np.argmin(common[deck[top : top + _WINDOW]]))
            if common[deck[best]] >= taken:
                best = top + int(np.argmin(common[deck[top:]]))
            worker = int(deck[best])
            deck[best], deck[top] = deck[top], worker
            if common[worker] >= taken:
                worker = _exchange(holders[: chunk + 1], held, deck[top:])
            top += 1
            holders[chunk, place] = worker
            if held[worker]:
                np.add.at(common, holders[held[worker]].ravel(), 1)
            common[worker] += taken
        for worker in holders[chunk].tolist():
            held[worker].append(chunk)
    return holders


def _exchange(
    holders: npt.NDArray[np.int64], held: list[list[int]], cards: npt.NDArray[np.int64]
) -> int:
    """A worker that the last chunk can still take, when it has all those on the cards left.

    The worker on some card takes the place of another in an earlier chunk, and that one is free.
    There is such a card: else the workers left would have more chunks to get than there are.
    """
    earlier, present = holders[:-1], holders[-1]
    for position, card in enumerate(cards.tolist()):
        without = ~np.any(earlier == card, axis=1)
        places = np.argwhere(without[:, None] & ~np.isin(earlier, present))
        if len(places):
            chunk, place = places[0].tolist()
            other = int(earlier[chunk, place])
            earlier[chunk, place] = card
            held[other].remove(chunk)
            held[card].append(chunk)
            cards[position], cards[0] = cards[0], card
            return other
    raise AssertionError("the cards left are more than chunks can take")
