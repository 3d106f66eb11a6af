"""ByzShield: assignments in which any two workers share at most one chunk.

Konstantinidis and Ramamoorthy, "ByzShield: An Efficient and Robust System for Distributed Training"
(MLSys 2021). Adversaries distort a chunk only where (r + 1) / 2 of them hold it; the fewer chunks
workers share, the fewer chunks a given set of adversaries can distort.
"""

from __future__ import annotations

import numpy as np

from outlast.coding.assignment import Assignment
from outlast.coding.codes.byzantine.vote import Aggregate, ReplicatedVote
from outlast.coding.codes.primes import is_prime
from outlast.errors import CodingError


class ByzShield(ReplicatedVote):
    """Latin squares or a Ramanujan bigraph, majority for each chunk, and the median of chunks.

    For a prime number l of chunks per worker, above the replication r: r mutually orthogonal Latin
    squares of order l, the a-th with a i + j mod l in row i and column j (a = 1 .. r; r <= l - 1).
    The l^2 cells are the chunks, and worker (a, v) holds those where the a-th square has v: n = r l
    workers. For an l that is a multiple of a prime replication: the bigraph of array codes
    (Burnwal, Sinha and Vidyasagar), worker (i, j) of n = r^2 holds chunk (b, i + b j mod r) for
    each b = 0 .. l - 1, of l r chunks; two workers with l = r share at most one chunk, with l = m r
    at most m.

    Args:
        chunks_per_worker: Chunks that each worker computes, l.
        replication: Workers that compute each chunk, r; odd.
        aggregate: See `ReplicatedVote`; the paper takes the median.

    Raises:
        CodingError: For numbers that neither construction has.
    """

    name = "ByzShield"
    source = "Konstantinidis and Ramamoorthy (MLSys 2021)"

    def __init__(
        self, chunks_per_worker: int, replication: int, *, aggregate: Aggregate = "median"
    ) -> None:
        load = chunks_per_worker
        if replication < 1 or replication % 2 == 0:
            nearest = max(replication - replication % 2 - 1, 1)
            raise CodingError(
                f"replication = {replication} is not an odd number above 0; {nearest} or "
                f"{nearest + 2} would do"
            )
        self.replication, self.aggregate = replication, aggregate
        if is_prime(load) and replication < load:
            self.assignment = _latin_squares(load, replication)
        elif is_prime(replication) and load > 0 and load % replication == 0:
            self.assignment = _bigraph(load, replication)
        else:
            raise CodingError(
                f"chunks_per_worker = {load} is neither a prime above replication = {replication} "
                f"nor a multiple of a prime replication; {_nearest(load, replication)} would do"
            )


def _latin_squares(order: int, squares: int) -> Assignment:
    row = np.arange(order)
    square = np.arange(1, squares + 1)[:, None, None]
    # (squares, values, rows) of cells, ascending in each row of the squares.
    cells = row * order + (row[:, None] - square * row) % order
    return Assignment.of(cells.reshape(-1, order), order * order)


def _bigraph(load: int, prime: int) -> Assignment:
    block = np.arange(load)
    place = np.arange(prime)
    held = block * prime + (place[:, None, None] + block * place[:, None]) % prime
    return Assignment.of(held.reshape(-1, load), load * prime)


def _nearest(load: int, replication: int) -> str:
    """The loads around `load` that there is a construction for."""

    def fits(value: int) -> bool:
        squares = is_prime(value) and replication < value
        return squares or (is_prime(replication) and value > 0 and value % replication == 0)

    below = next((value for value in range(load - 1, 0, -1) if fits(value)), None)
    above = next(
        value for value in range(max(load + 1, 1), 4 * max(load, replication, 2)) if fits(value)
    )
    return f"{above}" if below is None else f"{below} or {above}"
