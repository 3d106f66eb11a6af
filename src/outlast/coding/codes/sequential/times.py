"""How long the rounds of a sequential scheme take on a trace of delays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outlast.errors import CodingError

if TYPE_CHECKING:
    import numpy.typing as npt

    from outlast.coding.codes.sequential.scheduler import Scheduler


@dataclass(frozen=True, eq=False)
class RoundTimes:
    """A simulated run.

    Attributes:
        seconds: (rounds,) of each round.
        stragglers: (rounds, workers) whom the master did not wait for; the scheme admits it.
    """

    seconds: npt.NDArray[np.float64]
    stragglers: npt.NDArray[np.bool_]

    @property
    def total_seconds(self) -> float:
        """Of the whole run."""
        return float(self.seconds.sum())


def round_seconds(
    scheduler: Scheduler,
    start_seconds: npt.NDArray[np.float64],
    *,
    seconds_per_job: float,
    patience: float = 1.0,
) -> RoundTimes:
    """Simulate a master and its workers; J jobs take J + delay rounds.

    A worker delivers after its start delay + job_share x seconds_per_job. The master's rule is that
    of the paper's experiments (section 4): whoever is later than (1 + patience) times the fastest
    straggles, except that the master goes on waiting, worker by worker, until the stragglers so far
    are admitted (`Scheduler.admits`), so that every job is complete in time. Stragglers are told to
    stop and begin the next round with the others. A scheme without delay does not gain from
    patience: its round ends as soon as it can be decoded. Hence sequential schemes win where load
    takes long or many straggle at once, and lose where a round is little more than its start.

    Args:
        scheduler: The scheme; only its `Scheduler.job_share` and its promise are used.
        start_seconds: (rounds, workers) delays that do not depend on the load.
        seconds_per_job: Time to process all the data of a job.
        patience: Mu, see above.

    Raises:
        CodingError: For a trace of another number of workers, or negative times.
    """
    if start_seconds.ndim != 2 or start_seconds.shape[1] != scheduler.workers:
        raise CodingError(
            f"start_seconds has shape {start_seconds.shape}, but the scheme has "
            f"{scheduler.workers} workers; (rounds, {scheduler.workers}) would do"
        )
    if seconds_per_job < 0 or patience < 0 or start_seconds.min(initial=0.0) < 0:
        raise CodingError(
            f"seconds_per_job = {seconds_per_job}, patience = {patience} and all start_seconds "
            "must be 0 or more"
        )
    times = start_seconds + scheduler.job_share * seconds_per_job
    stragglers = np.zeros(times.shape, dtype=bool)
    seconds = np.empty(len(times))
    for number, row in enumerate(times):
        order = np.argsort(row, kind="stable")
        limit = (1.0 + patience) * row[order[0]] if scheduler.delay else 0.0
        recent = stragglers[max(number - scheduler.memory, 0) : number + 1]
        # Fewer stragglers are always admitted if more are: bisect how many to wait for.
        low, high = max(int(np.sum(row <= limit)), 1), scheduler.workers
        while low < high:
            middle = (low + high) // 2
            recent[-1] = False
            recent[-1, order[middle:]] = True
            low, high = (low, middle) if scheduler.admits(recent) else (middle + 1, high)
        recent[-1] = False
        recent[-1, order[low:]] = True
        slowest = float(row[order[low - 1]])
        seconds[number] = slowest if low == scheduler.workers else max(slowest, limit)
    return RoundTimes(seconds, stragglers)
