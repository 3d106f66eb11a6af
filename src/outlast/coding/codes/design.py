"""Block designs: any two workers share equally many chunks, so every set of survivors is alike."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from scipy.sparse import csr_array

from outlast.coding.certificate import roundoff
from outlast.coding.code import Bound, Decoder, GradientCode, check_decoder, survivors_of
from outlast.coding.codes.primes import is_prime
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
        """Whether A A^T = (r - l) I + l J, tested on random vectors (Freivalds 1977).

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
        self,
        workers: int,
        *,
        difference_set: Sequence[int] | None = None,
        dtype: str = "float32",
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
