"""Random codes: Bernoulli, stochastic block model, and stochastic gradient coding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from scipy.sparse import csr_array

from outlast.coding.certificate import roundoff
from outlast.coding.code import Bound, GradientCode, check_positive, survivors_of
from outlast.errors import CodingError

if TYPE_CHECKING:
    import numpy.typing as npt


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


def one_step_error(workers: int, copies: int, survivors: int, chunks: int | None = None) -> float:
    """Mean error of the one-step decoder over random survivors: k (n - u)(n - d) / ((n - 1) u d).

    Holds for every 0/1 code in which each of k chunks (as many as workers if None) has d copies,
    decoded with n / (u d) for each of u survivors (Charles, Papailiopoulos and Ellenberg 2017, who
    state it for k = n).

    Raises:
        CodingError: For copies or survivors that are not in [1, workers].
    """
    for name, value in (("copies", copies), ("survivors", survivors)):
        if not 1 <= value <= workers:
            raise CodingError(f"{name} = {value} is not in [1, {workers}]")
    if survivors == workers:
        return 0.0
    count = workers if chunks is None else chunks
    above = count * (workers - survivors) * (workers - copies)
    return above / ((workers - 1) * survivors * copies)


def bernoulli_one_step_error(workers: int, mean_copies: float, survivors: int) -> float:
    """The same for Bernoulli(d / n) codes, on average also over these codes: n (n - d) / (u d).

    Charles, Papailiopoulos and Ellenberg (2017), for as many chunks as workers.
    """
    if not survivors:
        return float(workers)
    return workers * (workers - mean_copies) / (survivors * mean_copies)


class StochasticBlock(GradientCode):
    """A 0/1 code drawn from the stochastic block model.

    Workers and chunks (as many) are divided into blocks. A worker holds a chunk of its own block
    with one probability and any other one with a smaller one, so that chunks have `mean_copies`
    holders on average and workers as many chunks, the share `inside` of them in their own block.
    One block is a Bernoulli code; inside = 1 with blocks of `mean_copies` workers is fractional
    repetition. Between them the code loses little to random stragglers and hides its blocks from an
    adversary.

    Random codes promise nothing: a chunk may be held by nobody. So `tolerance` is -1.

    Args:
        workers: n; chunks are as many.
        mean_copies: Workers of a chunk on average, and chunks of a worker, d.
        blocks: Number of blocks; sizes differ by at most one.
        inside: Share of a worker's chunks in its own block, from 1 / blocks to 1.
        seed: Of the draw.
        dtype: Type of the messages.

    Raises:
        CodingError: For settings that are out of range.
    """

    name: ClassVar[str] = "stochastic block code"
    source: ClassVar[str] = "Charles and Papailiopoulos, ISIT 2018"

    def __init__(
        self,
        workers: int,
        mean_copies: float,
        *,
        blocks: int,
        inside: float,
        seed: int = 0,
        dtype: str = "float32",
    ) -> None:
        check_positive("workers", workers)
        if not 0.0 < mean_copies <= workers:
            raise CodingError(f"mean_copies = {mean_copies:g} is not in (0, {workers}]")
        if not 1 <= blocks <= workers:
            raise CodingError(f"blocks = {blocks} is not in [1, {workers}]")
        most = min(1.0, workers // blocks / mean_copies)
        if not 1.0 / blocks <= inside <= most + 1e-12:
            if most * blocks < 1.0 - 1e-12:
                raise CodingError(
                    f"mean_copies = {mean_copies:g} does not fit {blocks} blocks of {workers} "
                    "chunks"
                )
            raise CodingError(
                f"inside = {inside:g} is not in [{1.0 / blocks:g}, {most:g}], as blocks of "
                f"{workers // blocks} chunks allow"
            )
        generator = np.random.default_rng(seed)
        bounds = np.linspace(0, workers, blocks + 1).round().astype(np.int64)
        rows, columns = [], []
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            size = stop - start
            own = _bernoulli(size, size, inside * mean_copies / size, generator)
            rest = workers - size
            outside = (1 - inside) * mean_copies
            other = _bernoulli(size, rest, outside / max(rest, 1), generator)
            rows += [start + own[0], start + other[0]]
            # Columns of other blocks are counted without the block's own.
            columns += [start + own[1], np.where(other[1] < start, other[1], other[1] + size)]
        places = (np.concatenate(rows), np.concatenate(columns))
        self.matrix = csr_array((np.ones(len(places[0])), places), shape=(workers, workers))
        self.mean_copies = mean_copies
        self.tolerance = -1
        roundoff(dtype)
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


class BernoulliCode(StochasticBlock):
    """Every worker holds every chunk with probability mean_copies / workers (BGC).

    The one-step decoder's error is n (n - d) / (u d) on average over codes and stragglers, see
    `outlast.coding.codes.bernoulli.bernoulli_one_step_error`.

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
        super().__init__(workers, mean_copies, blocks=1, inside=1.0, seed=seed, dtype=dtype)


class StochasticCode(GradientCode):
    """Stochastic gradient coding: workers send unbiased sums, nobody decodes.

    Chunk i is given to d_i random workers, so two chunks share d_i d_j / n workers on average
    (pair-wise balanced). A worker sends the sum of g_i / (d_i (1 - p)) over its chunks, and the
    plain sum of the messages that arrive has the gradient as its mean when each worker straggles
    with probability p, whichever they are.

    Args:
        workers: n.
        copies: d_i, one number for all chunks or one for each.
        straggler_probability: p.
        chunks: Number of chunks, as many as workers if None; only where `copies` is one number.
        seed: Of the draw.
        dtype: Type of the messages.

    Raises:
        CodingError: For copies that are not in [1, workers] or a probability not in [0, 1).
    """

    name: ClassVar[str] = "stochastic gradient code"
    source: ClassVar[str] = "Bitar, Wootters and El Rouayheb, JSAIT 2020"

    def __init__(
        self,
        workers: int,
        copies: int | Sequence[int],
        straggler_probability: float,
        *,
        chunks: int | None = None,
        seed: int = 0,
        dtype: str = "float32",
    ) -> None:
        check_positive("workers", workers)
        if isinstance(copies, int | np.integer):
            held = np.full(workers if chunks is None else chunks, copies, dtype=np.int64)
        elif chunks in (None, len(copies)):
            held = np.asarray(copies, dtype=np.int64)
        else:
            raise CodingError(f"chunks = {chunks}, but copies are given for {len(copies)}")
        if not len(held) or not 1 <= int(held.min()) <= int(held.max()) <= workers:
            raise CodingError(f"copies = {copies} are not all in [1, {workers}]")
        if not 0.0 <= straggler_probability < 1.0:
            raise CodingError(f"straggler_probability = {straggler_probability} is not in [0, 1)")
        generator = np.random.default_rng(seed)
        draws = [generator.choice(workers, size=d, replace=False) for d in held.tolist()]
        values = np.repeat(1.0 / (held * (1.0 - straggler_probability)), held)
        places = (np.concatenate(draws), np.repeat(np.arange(len(held)), held))
        self.matrix = csr_array((values, places), shape=(workers, len(held)))
        self.straggler_probability = straggler_probability
        self.tolerance = 0
        roundoff(dtype)
        self.dtype = dtype

    def fixed_weights(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """(workers,) 1 for each survivor: the weights are in the messages already."""
        return alive.astype(np.float64)

    @property
    def mean_error(self) -> float:
        """E of the fixed decoder's error when each worker straggles with probability p.

        Coefficient i is a binomial share of d_i (1 - p), with variance p / (d_i (1 - p)); the
        error is the sum of these variances.
        """
        p = self.straggler_probability
        return float(np.sum(p / (self.assignment.copies * (1.0 - p))))

    def expected_error(self, stragglers: int) -> Bound:
        """Mean error with unbiased equal weights for so many stragglers, or with weights of zero.

        The smaller of the two; both are upper bounds of the optimal decoder's.
        """
        survivors = survivors_of(self.workers, stragglers)
        if stragglers == 0:
            return Bound(0.0, "exact", self.source)
        if not survivors:
            return Bound(float(self.chunks), "exact", "weights of zero")
        # With h of d copies left, h / d is hypergeometric: mean u / n, variance
        # u s (n - d) / (n^2 (n - 1) d). Weights n (1 - p) / u are unbiased.
        workers = self.workers
        copies = self.assignment.copies
        spread = stragglers * (workers - copies) / ((workers - 1) * copies * survivors)
        if spread.sum() > self.chunks:
            return Bound(float(self.chunks), "upper", "weights of zero")
        return Bound(float(spread.sum()), "upper", "unbiased equal weights for so many stragglers")


def _bernoulli(
    rows: int, columns: int, probability: float, generator: np.random.Generator
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Places of the ones in a 0/1 matrix whose entries are 1 independently, in O(ones)."""
    entries = rows * columns
    count = int(generator.binomial(entries, min(probability, 1.0)))
    if not count:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    found = np.sort(generator.choice(entries, size=count, replace=False, shuffle=False))
    return found // columns, found % columns
