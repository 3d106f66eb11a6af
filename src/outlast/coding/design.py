"""0/1 codes with equal weights: symmetric and soft block designs, and random (Bernoulli) ones.

In a block design any two workers share equally many chunks, so every set of survivors is alike.
"""

from __future__ import annotations

import functools
import itertools
import math
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
    survivors_of,
)
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


def equal_weight_error(
    copies: npt.NDArray[np.int64], workers: int, survivors: int, weight: float
) -> float:
    """Mean of ``|weight B_S^T 1 - 1|^2`` over random sets S of survivors, for a 0/1 matrix B.

    With r = mean load and l = mean number of chunks that two workers share, which the copies give
    (sum_c d_c = n r and sum_c d_c (d_c - 1) = n (n - 1) l), u survivors have
    E = k - 2 w u r + w^2 u (r + l (u - 1)).

    Args:
        copies: (chunks,) workers that hold each chunk, d.
        workers: n.
        survivors: u.
        weight: w, of every survivor.
    """
    load, shared = mean_load_and_overlap(copies, workers)
    square = survivors * (load + shared * (survivors - 1))
    return float(len(copies) - 2.0 * weight * survivors * load + weight**2 * square)


def best_equal_weight(copies: npt.NDArray[np.int64], workers: int, survivors: int) -> float:
    """The weight that makes `equal_weight_error` least: r / (r + l (u - 1))."""
    load, shared = mean_load_and_overlap(copies, workers)
    return load / (load + shared * (survivors - 1)) if survivors else 0.0


def mean_load_and_overlap(copies: npt.NDArray[np.int64], workers: int) -> tuple[float, float]:
    """Mean number of chunks of a worker, and of chunks that two workers share."""
    held = copies.astype(np.float64)
    pairs = max(workers * (workers - 1), 1)
    return float(held.sum()) / workers, float((held * (held - 1.0)).sum()) / pairs


class SymmetricDesign(GradientCode):
    """A block design with as many chunks as workers, from a difference set modulo their number.

    Worker w holds the chunks w + D (mod n), r of them, and any two workers share l. So A_S A_S^T =
    (r - l) I + l J for every set S of u survivors. Its optimal decoder is therefore one weight for
    all, r / (r + l (u - 1)), and its error is n - u r^2 / (r + l (u - 1)) whoever straggles: an
    adversary does no more than chance.

    Known D: projective planes of prime order q (Singer 1938; n = q^2 + q + 1 workers with load
    q + 1, the least), those of `DIFFERENCE_SETS`, and the quadratic residues of primes n = 3 mod 4
    (Paley 1933; load (n - 1) / 2).

    Args:
        workers: n.
        difference_set: D; found for `workers` if None, with the least load known.
        dtype: Type of the messages.

    Raises:
        CodingError: Where no difference set is known, with the nearest numbers of workers that
            have one, and for a `difference_set` that is none.
    """

    name: ClassVar[str] = "symmetric block design"
    source: ClassVar[str] = "Kadhe, Koyluoglu and Ramchandran, ISIT 2019"

    def __init__(
        self, workers: int, *, difference_set: Sequence[int] | None = None, dtype: str = "float32"
    ) -> None:
        chosen = difference_set_of(workers) if difference_set is None else tuple(difference_set)
        if workers < 1 or not len(chosen):
            raise CodingError(
                f"workers = {workers} and a difference set of {len(chosen)} are not at least 1"
            )
        residues = np.unique(np.asarray(chosen, dtype=np.int64) % workers)
        if difference_set is not None:
            differences = (residues[:, None] - residues) % workers
            times = np.bincount(differences.ravel(), minlength=workers)[1:]
            if workers < 2 or times.min() != times.max():
                raise CodingError(
                    f"difference_set = {list(chosen)} has not every difference modulo {workers} "
                    "equally often, as workers that share equally many chunks need"
                )
        self.replication = len(residues)
        self.overlap = self.replication * (self.replication - 1) // (workers - 1)
        columns = (np.arange(workers)[:, None] + residues) % workers
        pointers = np.arange(workers + 1) * len(residues)
        self.matrix = csr_array(
            (np.ones(columns.size), np.sort(columns, axis=1).ravel(), pointers),
            shape=(workers, workers),
        )
        roundoff(dtype)
        self.dtype = dtype
        self.tolerance = 0 if self._error(workers) < 1e-9 * workers else -1

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
        """Exactly n - u r^2 / (r + l (u - 1)), which every set of so many stragglers has."""
        return Bound(self._error(survivors_of(self.workers, stragglers)), "exact", self.source)

    def expected_error(self, stragglers: int) -> Bound:
        """The same as the worst."""
        return self.worst_error(stragglers)


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


def is_prime(number: int) -> bool:
    """Test by trial division."""
    return number > 1 and all(number % x for x in range(2, math.isqrt(number) + 1))


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
    Those in the plane spanned by 1 and x are a line. `order` is a prime.
    """
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


class BernoulliCode(GradientCode):
    """Every worker holds every chunk with probability mean_copies / workers (BGC).

    The one-step decoder's error is n (n - d) / (u d) on average over codes and sets of u survivors,
    for as many chunks as workers. Random codes promise nothing: a chunk may be held by nobody. So
    `tolerance` is -1.

    Args:
        workers: n; chunks are as many.
        mean_copies: Workers of a chunk on average, and chunks of a worker, d.
        seed: Of the draw.
        dtype: Type of the messages.

    Raises:
        CodingError: For mean copies that are not in (0, workers].
    """

    name: ClassVar[str] = "Bernoulli gradient code"
    source: ClassVar[str] = "Charles, Papailiopoulos and Ellenberg 2017"

    def __init__(
        self, workers: int, mean_copies: float, *, seed: int = 0, dtype: str = "float32"
    ) -> None:
        check_positive("workers", workers)
        if not 0.0 < mean_copies <= workers:
            raise CodingError(f"mean_copies = {mean_copies:g} is not in (0, {workers}]")
        roundoff(dtype)
        generator = np.random.default_rng(seed)
        # Places of the ones, whose entries are 1 independently, in O(ones).
        entries = workers * workers
        count = int(generator.binomial(entries, min(mean_copies / workers, 1.0)))
        found = np.sort(generator.choice(entries, size=count, replace=False, shuffle=False))
        places = np.divmod(found, workers)
        self.matrix = csr_array((np.ones(count), places), shape=(workers, workers))
        self.mean_copies = mean_copies
        self.tolerance = -1
        self.dtype = dtype

    def fixed_weights(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """(workers,) n / (u d) for each of u survivors, d the copies that were asked for."""
        weight = self.workers / (max(int(alive.sum()), 1) * self.mean_copies)
        return np.where(alive, weight, 0.0)

    def expected_error(self, stragglers: int) -> Bound:
        """The smaller of the fixed decoder's mean error for this draw, and that of weights of zero.

        The former is exact for the fixed decoder, and so an upper bound of the optimal one's.
        """
        survivors = survivors_of(self.workers, stragglers)
        if not survivors:
            return Bound(float(self.chunks), "exact", "weights of zero")
        weight = self.workers / (survivors * self.mean_copies)
        mean = equal_weight_error(self.assignment.copies, self.workers, survivors, weight)
        if mean > self.chunks:
            return Bound(float(self.chunks), "upper", "weights of zero")
        return Bound(mean, "upper", "one-step decoder, from the copies of each chunk")
