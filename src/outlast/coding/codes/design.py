"""Block designs: any two workers share equally many chunks, so every set of survivors is alike."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.linalg import LinearOperator, eigsh

from outlast.coding.certificate import roundoff
from outlast.coding.code import (
    Bound,
    Decoder,
    GradientCode,
    check_decoder,
    check_positive,
    is_prime,
    survivors_of,
)
from outlast.coding.codes.bernoulli import best_equal_weight, equal_weight_error
from outlast.errors import CodingError

if TYPE_CHECKING:
    import numpy.typing as npt


DIFFERENCE_SETS = {
    7: (0, 1, 3),
    11: (1, 3, 4, 5, 9),
    13: (0, 1, 3, 9),
    21: (3, 6, 7, 12, 14),
    73: (1, 2, 4, 8, 16, 32, 37, 55, 64),
    91: (0, 1, 3, 9, 27, 49, 56, 61, 77, 81),
}
"""Sets D of residues mod v in which every non-zero difference occurs equally often."""

_CHECKS = 2
_WINDOW = 64
_DENSE_ENTRIES = 250_000


class BlockDesign(GradientCode):
    """Workers are the points of a balanced incomplete block design, chunks are its blocks.

    Every worker holds r chunks and any two share l, so A_S A_S^T = (r - l) I + l J for every set S
    of u survivors. Its optimal decoder is therefore one weight for all, r / (r + l (u - 1)), and
    its error is b - u r^2 / (r + l (u - 1)) whoever straggles: an adversary does no more than
    chance.

    Args:
        blocks: Points of each block.
        points: Number of points.
        dtype: Type of the messages.

    Raises:
        CodingError: For blocks that are not such a design.
    """

    name: ClassVar[str] = "block design"
    source: ClassVar[str] = "Kadhe, Koyluoglu and Ramchandran, ISIT 2019"

    def __init__(
        self,
        blocks: Sequence[Sequence[int]] | npt.NDArray[np.int64],
        points: int,
        *,
        dtype: str = "float32",
    ) -> None:
        holders = [np.asarray(block, dtype=np.int64) for block in blocks]
        if not holders or any(len(np.unique(block)) != len(block) for block in holders):
            raise CodingError("a block names a point twice, or there is no block")
        members = np.concatenate(holders)
        if not 0 <= int(members.min()) <= int(members.max()) < points:
            raise CodingError(f"blocks name points that are not in [0, {points})")
        columns = np.repeat(np.arange(len(holders)), [len(block) for block in holders])
        self.matrix = csr_array(
            (np.ones(len(members)), (members, columns)), shape=(points, len(holders))
        )
        self._set_design(dtype)

    @classmethod
    def affine_plane(cls, order: int, *, dtype: str = "float32") -> BlockDesign:
        """AG(2, q): q^2 workers, q^2 + q chunks (the lines), q + 1 chunks per worker, l = 1.

        Raises:
            CodingError: For an order that is not a prime.
        """
        _refuse_order(order)
        x, y = np.divmod(np.arange(order * order), order)
        slopes = np.arange(order)[:, None]
        # Line y = m x + c has number m q + c, line x = c has number q^2 + c.
        lines = slopes * order + (y - slopes * x) % order
        line_of = np.concatenate([lines, (order * order + x)[None]])
        points = np.tile(np.arange(order * order), order + 1)
        by_line = points[np.argsort(line_of.ravel(), kind="stable")]
        return cls(by_line.reshape(-1, order), order * order, dtype=dtype)

    @classmethod
    def all_pairs(cls, workers: int, *, dtype: str = "float32") -> BlockDesign:
        """A chunk for every two workers: r = workers - 1, l = 1, load 2.

        Raises:
            CodingError: For fewer than 3 workers.
        """
        if workers < 3:
            raise CodingError(f"workers = {workers} is below 3")
        return cls(np.stack(np.triu_indices(workers, 1), axis=1), workers, dtype=dtype)

    def _set_design(self, dtype: str) -> None:
        loads = np.diff(self.matrix.indptr)
        points, blocks = self.matrix.shape
        if points < 2 or int(loads.min()) != int(loads.max()):
            raise CodingError(
                f"points are in {int(loads.min())} to {int(loads.max())} blocks; a block design "
                "has each of at least 2 points in equally many"
            )
        self.replication = int(loads[0])
        copies = np.bincount(self.matrix.indices, minlength=blocks)
        shared, rest = divmod(int((copies * (copies - 1)).sum()), points * (points - 1))
        self.overlap = shared
        if rest or not self._balanced():
            raise CodingError("two points are not in equally many common blocks for all pairs")
        roundoff(dtype)
        self.dtype = dtype
        self.tolerance = 0 if self._error(points) < 1e-9 * blocks else -1

    def _balanced(self) -> bool:
        """Test A A^T = (r - l) I + l J on random vectors (Freivalds 1977).

        Exact integers below 2^53: a wrong design passes with probability below 2^-40.
        """
        generator = np.random.default_rng(0)
        for _ in range(_CHECKS):
            x = generator.integers(0, 2**20, self.matrix.shape[0]).astype(np.float64)
            product = self.matrix @ (self.matrix.T @ x)
            if np.any(product != (self.replication - self.overlap) * x + self.overlap * x.sum()):
                return False
        return True

    def _weight(self, survivors: int) -> float:
        return float(self.replication / (self.replication + self.overlap * (survivors - 1)))

    def _error(self, survivors: int) -> float:
        if not survivors:
            return float(self.chunks)
        left = self.chunks - survivors * self.replication * self._weight(survivors)
        return max(left, 0.0)

    def optimal_weights(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """(workers,) r / (r + l (u - 1)) for each of u survivors."""
        survivors = int(alive.sum())
        return np.where(alive, self._weight(survivors) if survivors else 0.0, 0.0)

    def fixed_weights(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """The optimal ones, which depend on the number of survivors only."""
        return self.optimal_weights(alive)

    def errors(
        self, alive: npt.NDArray[np.bool_], decoder: Decoder = "optimal"
    ) -> npt.NDArray[np.float64]:
        """(draws,) errors in closed form, the same for both decoders; takes (draws, workers)."""
        check_decoder(decoder)
        counts, inverse = np.unique(alive.sum(axis=1), return_inverse=True)
        return np.array([self._error(int(count)) for count in counts])[inverse]

    def worst_error(self, stragglers: int) -> Bound:
        """Exactly b - u r^2 / (r + l (u - 1)), which every set of so many stragglers has."""
        return Bound(self._error(survivors_of(self.workers, stragglers)), "exact", self.source)

    def expected_error(self, stragglers: int) -> Bound:
        """The same as the worst."""
        return self.worst_error(stragglers)


class SymmetricDesign(BlockDesign):
    """A block design with as many chunks as workers, from a difference set modulo their number.

    Worker w holds the chunks w + D (mod n). Known D: projective planes of prime order q (Singer
    1938; n = q^2 + q + 1 workers with load q + 1, the least), those of `DIFFERENCE_SETS`, and the
    quadratic residues of primes n = 3 mod 4 (Paley 1933; load (n - 1) / 2).

    Args:
        workers: n.
        difference_set: D; found for `workers` if None, with the least load known.
        dtype: Type of the messages.

    Raises:
        CodingError: Where no difference set is known, with the nearest numbers of workers that
            have one.
    """

    name: ClassVar[str] = "symmetric block design"

    def __init__(
        self, workers: int, *, difference_set: Sequence[int] | None = None, dtype: str = "float32"
    ) -> None:
        chosen = difference_set_of(workers) if difference_set is None else tuple(difference_set)
        if workers < 1 or not len(chosen):
            raise CodingError(
                f"workers = {workers} and a difference set of {len(chosen)} are not at least 1"
            )
        residues = np.unique(np.asarray(chosen, dtype=np.int64) % workers)
        columns = (np.arange(workers)[:, None] + residues) % workers
        pointers = np.arange(workers + 1) * len(residues)
        self.matrix = csr_array(
            (np.ones(columns.size), np.sort(columns, axis=1).ravel(), pointers),
            shape=(workers, workers),
        )
        self._set_design(dtype)


def difference_set_of(workers: int) -> tuple[int, ...]:
    """The known difference set of least size modulo `workers`.

    Raises:
        CodingError: Where none is known.
    """
    if workers in DIFFERENCE_SETS:
        return DIFFERENCE_SETS[workers]
    order = _plane_order(workers)
    if order:
        return singer_difference_set(order)
    if _has_difference_set(workers):
        return tuple(sorted({x * x % workers for x in range(1, workers)}))
    below = next((n for n in range(workers - 1, 6, -1) if _has_difference_set(n)), None)
    above = next(n for n in itertools.count(max(workers + 1, 7)) if _has_difference_set(n))
    near = f"{below} or {above}" if below else f"{above}"
    raise CodingError(f"workers = {workers} has no known difference set; take {near}")


def _plane_order(workers: int) -> int:
    """The prime q with q^2 + q + 1 = workers, else 0."""
    order = int((workers - 0.75) ** 0.5) if workers > 6 else 0
    return order if order * order + order + 1 == workers and is_prime(order) else 0


def _has_difference_set(workers: int) -> bool:
    paley = workers > 6 and workers % 4 == 3 and is_prime(workers)
    return workers in DIFFERENCE_SETS or bool(_plane_order(workers)) or paley


def singer_difference_set(order: int) -> tuple[int, ...]:
    """The q + 1 residues modulo q^2 + q + 1 whose differences are all different (Singer 1938).

    Powers x^0, x^1, ... of a root of a cubic over F_q run through the points of the projective
    plane, if the cubic is such that they return to a multiple of 1 after q^2 + q + 1 steps only.
    Those in the plane spanned by 1 and x are a line.

    Raises:
        CodingError: For an order that is not a prime.
    """
    _refuse_order(order)
    # c, the norm of the root, varies fastest: some norms belong to no such cubic.
    for a, b, c in itertools.product(range(order), range(order), range(1, order)):
        line = _powers_on_a_line(order, (c, b, a))
        if line is not None:
            return line
    raise AssertionError("every finite field has a primitive cubic")


def _powers_on_a_line(q: int, cubic: tuple[int, int, int]) -> tuple[int, ...] | None:
    """Exponents i with x^i in span(1, x), for x^3 = a x^2 + b x + c; None if they return early."""
    c, b, a = cubic
    points = q * q + q + 1
    line = []
    low, middle, high = 1, 0, 0
    for exponent in range(points):
        if not high:
            if not middle and exponent:
                return None
            line.append(exponent)
        low, middle, high = high * c % q, (low + high * b) % q, (middle + high * a) % q
    # A line has q + 1 points; after all powers the first one must come again.
    return tuple(line) if not (middle or high) and len(line) == q + 1 else None


def _refuse_order(order: int) -> None:
    if not is_prime(order):
        above = next(x for x in itertools.count(max(order, 2)) if is_prime(x))
        raise CodingError(f"order = {order} is not a prime; take {above}")


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
