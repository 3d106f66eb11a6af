"""Exact codes with short messages: more chunks per worker buy fewer numbers per message.

Any s stragglers and messages of length p / m need s + m chunks per worker, and no fewer will do:
Ye and Abbe, "Communication-computation efficient gradient coding" (ICML 2018).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from outlast.coding.certificate import roundoff
from outlast.coding.code import TOLERANCE, Survivors, check_positive, check_workers
from outlast.coding.codes.blocks import BlockCode, refuse_ill_conditioned_blocks
from outlast.coding.codes.partial import PartialCode, PartialDecoding, assignment_of, cyclic_orders
from outlast.errors import CodingError

if TYPE_CHECKING:
    import numpy.typing as npt

    from outlast.coding.codes.partial import Recombination

_MOST_WORKERS = 500
"""The encoding takes a system of n - s equations for every chunk: ten seconds for so many."""

Columns = Literal["random", "vandermonde"]


class YeAbbe(BlockCode):
    """The code of Ye and Abbe on a cyclic assignment of s + m chunks per worker.

    With a matrix V of n - s rows and a column for every worker, chunk c has a matrix
    B_c = [B'_c | I_m] with B'_c = -V_bottom V_top^-1, taken at the columns of the workers that do
    not hold it (V_bottom: the last m rows), so that B_c V is 0 there. Worker w sends
    sum_c (B_c V_w) . blocks(g_c), which is V_w . z for z = sum_c B_c^T blocks(g_c); the last m
    coordinates of z are the blocks of g, and any n - s messages give z.

    Args:
        workers: Number of workers and of chunks, n.
        stragglers: Workers whose messages may be missing, s.
        parts: Blocks of a gradient, m.
        kind: ``random`` for Gaussian V, ``vandermonde`` for powers of Chebyshev points, as in
            the paper's deterministic construction; that is ill-conditioned beyond a few workers.
        seed: Of the random kind.
        dtype: Type of the messages.
        tolerance: Largest relative rounding error over the examined sets of survivors.

    Raises:
        CodingError: Where s + m exceeds n, for more than 500 workers, and where rounding could
            exceed `tolerance`.
    """

    name = "Ye-Abbe code"
    source = 'Ye and Abbe, "Communication-computation efficient gradient coding", ICML 2018'

    def __init__(
        self,
        workers: int,
        stragglers: int,
        parts: int,
        *,
        kind: Columns = "random",
        seed: int = 0,
        dtype: str = "float32",
        tolerance: float = TOLERANCE,
    ) -> None:
        _check(workers, stragglers, parts)
        if workers > _MOST_WORKERS:
            raise CodingError(
                f"workers = {workers} is above {_MOST_WORKERS}: the Ye-Abbe code solves "
                f"{workers - stragglers} equations for each of its chunks; take StableBlocks, "
                "whose systems are as small as parts"
            )
        if kind not in get_args(Columns):
            raise CodingError(f"kind = {kind!r} is not one of {', '.join(get_args(Columns))}")
        roundoff(dtype)
        self.parts, self.tolerance, self.dtype = parts, stragglers, dtype
        self.assignment = assignment_of(cyclic_orders(workers, stragglers + parts))
        self._columns = _columns(workers, workers - stragglers, kind, seed)
        self.entries = self._encoding()
        if tolerance < math.inf:
            refuse_ill_conditioned_blocks(
                self,
                tolerance,
                advice="take StableBlocks, whose workers encode once the survivors are known, "
                "another seed, fewer parts or messages of a wider type",
            )

    @classmethod
    def of_load(cls, workers: int, load: int, parts: int, **settings: Any) -> YeAbbe:
        """The code for `load` chunks per worker: it tolerates load - parts stragglers.

        Raises:
            CodingError: When the load is below the number of parts, or above that of workers.
        """
        if not parts <= load <= workers:
            raise CodingError(
                f"load = {load} is not in [parts, workers] = [{parts}, {workers}]: a worker "
                f"computes stragglers + parts chunks"
            )
        return cls(workers, load - parts, parts, **settings)

    def decoding_weights(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
        """(parts, workers): the last rows of the inverse of the survivors' columns of V.

        More survivors than needed give the weights of least norm, fewer those of least error.
        """
        dimension = len(self._columns)
        survivors = int(alive.sum())
        if survivors < dimension:
            return super().decoding_weights(alive)
        target = np.eye(dimension)[:, -self.parts :]
        weights = np.zeros((self.parts, self.workers))
        columns = self._columns[:, alive]
        # Solving keeps digits of an ill-conditioned square system that least squares cuts off.
        if survivors == dimension:
            weights[:, alive] = np.linalg.solve(columns, target).T
        else:
            weights[:, alive] = np.linalg.lstsq(columns, target, rcond=None)[0].T
        return weights

    def _encoding(self) -> npt.NDArray[np.float64]:
        """(workers x load, parts) coefficients B_c V_w of all workers and their chunks."""
        load = self.tolerance + self.parts
        chunks = self.assignment.incidence.indices.reshape(self.workers, load)
        encoded = np.zeros((self.workers, self.chunks, self.parts))
        top, bottom = self._columns[: -self.parts], self._columns[-self.parts :]
        for chunk in range(self.chunks):
            idle = np.ones(self.workers, dtype=bool)
            idle[(chunk - np.arange(load)) % self.workers] = False
            # B' V_top = -V_bottom at the idle workers, solved from the right.
            left = -np.linalg.solve(top[:, idle].T, bottom[:, idle].T).T
            encoded[:, chunk] = (left @ top + bottom).T
        rows = np.arange(self.workers)[:, None]
        entries: npt.NDArray[np.float64] = encoded[rows, chunks].reshape(-1, self.parts)
        return entries


class StableBlocks:
    """The same loads and message lengths without the ill-conditioned inverse.

    Workers encode once they know who survives (`outlast.coding.codes.partial`), so a chunk's blocks
    are made from its own surviving holders, at least m of s + m: rounding is amplified by the
    inverse of an m x m matrix in place of one of n - s. The set of survivors must be known to all
    before they encode; who is lost after that leaves an error, which `PartialDecoding.decode`
    certifies.

    Args:
        workers: Number of workers and of chunks, n.
        stragglers: Workers whose messages may be missing, s.
        parts: Blocks of a gradient, m.
        seed: Of random matrices.
        kind: How the matrix is made; see `outlast.coding.codes.partial`.
        dtype: Type of the messages.
        tolerance: Largest rounding error of a chunk's blocks, as a share of them.

    Attributes:
        code: The partial-straggler code that does the work.
        tolerance: Any so many stragglers leave the gradient exact.

    Raises:
        CodingError: Where s + m exceeds n, and where rounding could exceed `tolerance`.
    """

    name = "stable block code"
    source = f"loads of {YeAbbe.source}; encoding of {PartialCode.source}"

    def __init__(
        self,
        workers: int,
        stragglers: int,
        parts: int,
        *,
        seed: int = 0,
        kind: Recombination = "best",
        dtype: str = "float32",
        tolerance: float = TOLERANCE,
    ) -> None:
        _check(workers, stragglers, parts)
        self.code = PartialCode(
            workers,
            stragglers + parts,
            parts,
            seed=seed,
            kind=kind,
            dtype=dtype,
            tolerance=tolerance,
        )
        self.tolerance = stragglers

    def __repr__(self) -> str:
        return (
            f"StableBlocks(workers={self.code.workers}, stragglers={self.tolerance}, "
            f"parts={self.code.parts})"
        )

    def agreed(self, survivors: Survivors) -> PartialDecoding:
        """The block code that workers encode with when exactly these survive.

        Args:
            survivors: Their numbers, or a (workers,) mask.

        Raises:
            CodingError: For workers that do not exist.
        """
        everybody = self.code.plan(self.code.assignment.incidence)
        done = np.where(everybody.mask(survivors), self.code.copies, 0)
        return self.code.plan(self.code.status(done))


def _columns(workers: int, rows: int, kind: Columns, seed: int) -> npt.NDArray[np.float64]:
    """(rows, workers) matrix V."""
    if kind == "random":
        return np.random.default_rng(seed).standard_normal((rows, workers))
    points = np.cos((np.arange(workers) + 0.5) * math.pi / workers)
    return np.vander(points, rows, increasing=True).T


def _check(workers: int, stragglers: int, parts: int) -> None:
    check_workers(workers, stragglers)
    check_positive("parts", parts)
    if stragglers + parts > workers:
        fewer = f" or stragglers = {workers - parts}" if parts <= workers else ""
        raise CodingError(
            f"stragglers = {stragglers} and parts = {parts} need stragglers + parts = "
            f"{stragglers + parts} chunks per worker, more than the {workers} that there are; take "
            f"parts = {workers - stragglers}{fewer}"
        )
