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

_MOST_SETS = 400_000
_BATCH = 4096
_STARTS = 50


def needed_copies(replication: int) -> int:
    """Wrong copies of a chunk that keep the right one from a majority: half of all, rounded up."""
    return (replication + 1) // 2


def worst_distortion(assignment: Assignment, replication: int, adversaries: int) -> Bound:
    """Share of chunks of which the worst `adversaries` workers hold half of the copies or more.

    All sets are tried where there are at most 400,000; otherwise the result is the worst that
    single exchanges of workers lead to from some random sets.
    """
    incidence = assignment.incidence.toarray().astype(np.int16)
    needed = needed_copies(replication)
    if math.comb(assignment.workers, adversaries) <= _MOST_SETS:
        most = _exhaustive(incidence, needed, adversaries)
        return Bound(most / assignment.chunks, "exact", "all sets of adversaries")
    most = _searched(incidence, needed, adversaries)
    return Bound(most / assignment.chunks, "lower", "exchanges of single workers")


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
    generator = np.random.default_rng(0)
    most = 0
    for _ in range(_STARTS):
        chosen = generator.choice(len(incidence), adversaries, replace=False)
        most = max(most, _exchanged(incidence, needed, chosen))
    return most


def _exchanged(incidence: npt.NDArray[np.int16], needed: int, chosen: npt.NDArray[np.int64]) -> int:
    """Chunks that a set of adversaries distorts when single exchanges no longer help."""

    def score(held: npt.NDArray[np.int16]) -> npt.NDArray[np.float64]:
        # Copies short of a majority count, the more the closer: else exchanges would be blind.
        reached = np.minimum(held, needed)
        short = 1e-4 * np.sum(reached.astype(np.float64) ** 3, axis=-1)
        return np.asarray(np.sum(reached == needed, axis=-1) + short)

    chosen = chosen.copy()
    held = incidence[chosen].sum(axis=0, dtype=np.int16)
    value, improved = float(score(held)), True
    while improved:
        improved = False
        for place in range(len(chosen)):
            without = held - incidence[chosen[place]]
            scores = score(without + incidence)
            scores[np.delete(chosen, place)] = -1.0
            worker = int(scores.argmax())
            if scores[worker] > value + 1e-9:
                value, improved = float(scores[worker]), True
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
