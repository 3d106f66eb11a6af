"""How many chunks the worst set of adversaries can distort by outvoting the others."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import numpy as np

from outlast.coding.code import Bound

if TYPE_CHECKING:
    import numpy.typing as npt

    from outlast.coding.assignment import Assignment

_MOST_SETS = 200_000
_BATCH = 4096


def needed_copies(replication: int) -> int:
    """Wrong copies of a chunk that keep the right one from a majority: half of all, rounded up."""
    return (replication + 1) // 2


def worst_distortion(assignment: Assignment, replication: int, adversaries: int) -> Bound:
    """Share of chunks of which the worst `adversaries` workers hold half of the copies or more.

    All sets are tried where there are at most 200,000; otherwise the result is what single
    exchanges cannot improve, beginning with the workers that a greedy choice adds.
    """
    incidence = assignment.incidence.toarray().astype(np.int16)
    needed = needed_copies(replication)
    if math.comb(assignment.workers, adversaries) <= _MOST_SETS:
        most = _exhaustive(incidence, needed, adversaries)
        return Bound(most / assignment.chunks, "exact", "all sets of adversaries")
    most = _searched(incidence, needed, adversaries)
    return Bound(most / assignment.chunks, "lower", "greedy choice and exchanges")


def _exhaustive(incidence: npt.NDArray[np.int16], needed: int, adversaries: int) -> int:
    most = 0
    sets = itertools.combinations(range(len(incidence)), adversaries)
    while batch := list(itertools.islice(sets, _BATCH)):
        chosen = np.array(batch, dtype=np.int64).reshape(len(batch), adversaries)
        held = np.zeros((len(batch), incidence.shape[1]), dtype=np.int16)
        for column in chosen.T:
            held += incidence[column]
        most = max(most, int((held >= needed).sum(axis=1).max()))
    return most


def _searched(incidence: npt.NDArray[np.int16], needed: int, adversaries: int) -> int:
    chosen: list[int] = []
    held = np.zeros(incidence.shape[1], dtype=np.int16)

    def best_addition(held: npt.NDArray[np.int16], taken: list[int]) -> tuple[float, int]:
        # Copies short of a majority count a little, so that the first choices are not blind.
        after = np.minimum(held + incidence, needed)
        score = (after == needed).sum(axis=1) + after.sum(axis=1) * 1e-6
        score[taken] = -1.0
        best = int(score.argmax())
        return float(score[best]), best

    value = 0.0
    for _ in range(adversaries):
        value, worker = best_addition(held, chosen)
        chosen.append(worker)
        held = held + incidence[worker]
    improved = True
    while improved:
        improved = False
        for place in range(adversaries):
            without = held - incidence[chosen[place]]
            others = chosen[:place] + chosen[place + 1 :]
            score, worker = best_addition(without, others)
            if score > value + 1e-9:
                value, improved = score, True
                chosen[place] = worker
                held = without + incidence[worker]
    return int((held >= needed).sum())


def spectral_distortion(assignment: Assignment, replication: int, adversaries: int) -> Bound:
    """An upper bound of `worst_distortion` for workers that all compute equally many chunks.

    q adversaries hold q l copies, of at least N chunks (Tanner's bound on the neighbours of a set
    of vertices, with mu the second eigenvalue of A A^T / (l r)):
    N >= (q l / r) / (mu + (1 - mu) q / n). Each distorted chunk takes needed copies, every other
    one at least 1, so c (needed - 1) <= q l - N. Konstantinidis and Ramamoorthy (MLSys 2021).
    """
    source = "Tanner's bound, as used by Konstantinidis and Ramamoorthy (MLSys 2021)"
    needed = needed_copies(replication)
    load = int(assignment.loads.max())
    chunks = assignment.chunks
    copies = adversaries * load
    counted = copies // needed
    if adversaries and needed > 1:
        values = np.linalg.svd(assignment.incidence.toarray(), compute_uv=False)
        second = float(values[1]) ** 2 / (load * replication) if len(values) > 1 else 0.0
        spread = second + (1.0 - second) * adversaries / assignment.workers
        neighbours = copies / replication / spread
        # The count is whole; rounding of the singular values must not take one away.
        counted = min(counted, math.floor((copies - neighbours) / (needed - 1) + 1e-6))
    return Bound(min(counted / chunks, 1.0), "upper", source)
