"""The error of decoders that give every survivor the same weight, on average over stragglers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

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
