"""Save periods of several jobs that share one file system.

Young/Daly's period per job is not the best when the file system is shared (Herault, Robert,
Bouteiller, Arnold, Ferreira, Bosilca and Dongarra 2018, Optimal cooperative checkpointing for
shared high-performance computing platforms). Minimise the node-time that saves and failures waste,

    sum_i n_i (C_i / P_i + P_i / (2 mu_i))   with   sum_i C_i / P_i <= budget,

over the periods P_i. With the multiplier lambda of the budget,

    P_i = sqrt(2 mu_i C_i (1 + lambda / n_i)),

and lambda = 0, Young/Daly's periods, where these keep the budget; else it is found by bisection. A
save in the background costs its job less than it costs the file system, say o_i in place of C_i in
the first sum; then P_i = sqrt(2 mu_i (o_i + lambda C_i / n_i)).

    saver = Saver("/scratch/project/.turns", load=0.6)
    saver.least_seconds(nodes=8, save_seconds=40.0, overhead_seconds=2.0, mtbf_seconds=90_000)
    saver.close()

Each job keeps a small file in the folder, `saver-<name>.json`, with what its saves cost it and the
file system. From the files of all that live, each one finds its own period: the same sum for all,
so nobody has to decide for the others. Files of dead jobs are removed by whoever sees them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.cluster.storage.identity import lives, owner_of, this_process
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outlast.cluster.storage.identity import Owner


_ROUNDS = 200


@dataclass(frozen=True, slots=True)
class SavingJob:
    """Parameters of a job that saves to a shared file system.

    Attributes:
        nodes: How many wait while it saves.
        save_seconds: What a save takes with the whole bandwidth.
        mtbf_seconds: Mean time between failures of the whole job.
        overhead_seconds: By which a save lengthens the run; None: the whole time of the save.
    """

    nodes: float
    save_seconds: float
    mtbf_seconds: float
    overhead_seconds: float | None = None

    @property
    def cost_seconds(self) -> float:
        """Cost of a save to the job itself."""
        return self.save_seconds if self.overhead_seconds is None else self.overhead_seconds

    def __post_init__(self) -> None:
        """Refuse figures without a meaning."""
        for name in ("nodes", "save_seconds", "mtbf_seconds", "overhead_seconds"):
            value = getattr(self, name)
            if value is None:
                continue
            if not (value > 0 and math.isfinite(value)):
                raise ClusterError(f"{name} = {value} of a job: give a finite number above 0")


@dataclass(frozen=True)
class Periods:
    """Periods of jobs that share a file system.

    Attributes:
        seconds: From one save to the next, by job.
        multiplier: Lambda; 0 where every job has Young/Daly's period.
        load: Share of the time for which the file system is busy with saves.
        waste: Expected share of all node-time that saves and what is lost at failures take, when
            no save waits for another.
    """

    seconds: tuple[float, ...]
    multiplier: float
    load: float
    waste: float


def young_daly(job: SavingJob) -> float:
    """The period that is best for a job alone: ``sqrt(2 mu o)``, in seconds."""
    return _period(job, 0.0)


def shared_periods(jobs: Sequence[SavingJob], budget: float = 1.0) -> Periods:
    """The periods that waste the least node-time within a budget of bandwidth.

    Args:
        jobs: All that save to the file system, or all of one project.
        budget: Share of the time for which saves may keep the file system busy; above 0.

    Raises:
        ClusterError: For a budget that is not above 0, or no jobs.
    """
    if not (budget > 0 and math.isfinite(budget)):
        raise ClusterError(f"budget = {budget}: give a share of the time above 0, as 0.5")
    if not jobs:
        raise ClusterError("there are no jobs to find periods for: give one or more")
    multiplier = 0.0
    if _load(jobs, 0.0) > budget:
        low, high = 0.0, 1.0
        while _load(jobs, high) > budget:
            low, high = high, 4.0 * high
        for _ in range(_ROUNDS):
            middle = 0.5 * (low + high)
            if middle in (low, high):
                break
            if _load(jobs, middle) > budget:
                low = middle
            else:
                high = middle
        # The upper end keeps the budget.
        multiplier = high
    seconds = tuple(_period(job, multiplier) for job in jobs)
    return Periods(seconds, multiplier, _load(jobs, multiplier), waste_of(jobs, seconds))


def waste_of(jobs: Sequence[SavingJob], seconds: Sequence[float]) -> float:
    """The expected share of node-time that is wasted with given periods, when no save waits."""
    wasted = math.fsum(
        job.nodes * (job.cost_seconds / period + period / (2.0 * job.mtbf_seconds))
        for job, period in zip(jobs, seconds, strict=True)
    )
    return wasted / math.fsum(job.nodes for job in jobs)


def _period(job: SavingJob, multiplier: float) -> float:
    cost = job.cost_seconds + multiplier * job.save_seconds / job.nodes
    return math.sqrt(2.0 * job.mtbf_seconds * cost)


def _load(jobs: Sequence[SavingJob], multiplier: float) -> float:
    return math.fsum(job.save_seconds / _period(job, multiplier) for job in jobs)


_PREFIX = "saver-"
_LEAST_LEFT = 0.05
"""Share of the budget that is left to those who can choose, whatever the others take."""


@dataclass(frozen=True, slots=True)
class Saving:
    """Statement of a job about its saves.

    Attributes:
        nodes: Of the job.
        save_seconds: For which the file system is busy with one of them.
        overhead_seconds: By which one of them lengthens the run.
        mtbf_seconds: Between failures of the whole job.
        period_seconds: From one to the next where that is fixed; 0: the job makes way for others.
    """

    nodes: float
    save_seconds: float
    overhead_seconds: float
    mtbf_seconds: float
    period_seconds: float = 0.0

    def job(self) -> SavingJob:
        """As `shared_periods` needs it."""
        # Saves in the background may cost the run next to nothing, but not the file system.
        overhead = max(self.overhead_seconds, 1e-3 * self.save_seconds)
        return SavingJob(self.nodes, self.save_seconds, self.mtbf_seconds, overhead)


def least_period_seconds(own: Saving, others: list[Saving], load: float) -> float:
    """The shortest period of a job with which all together keep to a share of the time.

    Args:
        own: The job that asks.
        others: All other jobs.
        load: Largest share of the time for which the file system may be busy with saves.

    Returns:
        Seconds; 0 where the best period of each job alone keeps the load, or `own` is fixed.
    """
    if own.period_seconds:
        return 0.0
    fixed = sum(
        other.save_seconds / other.period_seconds for other in others if other.period_seconds
    )
    free = [own, *(other for other in others if not other.period_seconds)]
    budget = max(load - fixed, _LEAST_LEFT * load)
    periods = shared_periods([saving.job() for saving in free], budget)
    return periods.seconds[0] if periods.multiplier else 0.0


class Saver:
    """One job among those that save to a file system; used by one process of the job.

    Args:
        directory: Of the turns; made if missing. One that cannot be used hinders nobody.
        load: As for `least_period_seconds`.
        stale_after_seconds: Others on other nodes that say nothing for so long count as dead.
        heartbeat_seconds: How often this one says that it lives.
        ask_alive: As for `outlast.cluster.storage.ask`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        load: float,
        *,
        stale_after_seconds: float,
        heartbeat_seconds: float,
        ask_alive: Callable[[Owner], bool | None] | None = None,
    ) -> None:
        self._directory = Path(directory)
        self._file = self._directory / f"{_PREFIX}{uuid.uuid4().hex}.json"
        self._load = load
        self._stale_after_seconds = stale_after_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._ask_alive = ask_alive
        self._ended = threading.Event()
        self._beating = False

    def least_seconds(
        self,
        *,
        nodes: float,
        save_seconds: float,
        overhead_seconds: float,
        mtbf_seconds: float,
        period_seconds: float = 0.0,
    ) -> float:
        """Tell the others of this job's saves; returns how far apart they should be at least.

        Args:
            nodes: Of the job.
            save_seconds: As of `Saving`.
            overhead_seconds: As of `Saving`.
            mtbf_seconds: As of `Saving`.
            period_seconds: As of `Saving`.

        Returns:
            Seconds; 0: as often as is best for the job alone, also where nothing can be said.
        """
        own = Saving(nodes, save_seconds, overhead_seconds, mtbf_seconds, period_seconds)
        try:
            # Write the file of this job; returns the file server's time.
            self._directory.mkdir(parents=True, exist_ok=True)
            draft = self._file.with_name(f".draft-{self._file.stem}")
            try:
                draft.write_text(json.dumps({**asdict(own), "owner": asdict(this_process())}))
                draft.replace(self._file)
            except BaseException:
                draft.unlink(missing_ok=True)
                raise
            if not self._beating:
                self._beating = True
                threading.Thread(target=self._beat, name="saver", daemon=True).start()
            now = self._file.stat().st_mtime
            found = []
            for path in self._directory.glob(f"{_PREFIX}*.json"):
                if path == self._file:
                    continue
                with contextlib.suppress(OSError):
                    age = now - path.stat().st_mtime
                    saving, owner = _saving_of(path.read_text())
                    if owner is not None and lives(
                        owner, age, self._stale_after_seconds, self._ask_alive
                    ):
                        found += [] if saving is None else [saving]
                    elif owner is not None or age > self._stale_after_seconds:
                        path.unlink()
            return least_period_seconds(own, found, self._load)
        except (OSError, ClusterError):
            return 0.0

    def close(self) -> None:
        """This job makes no more saves that others should make way for."""
        self._ended.set()
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._ended.wait(self._heartbeat_seconds):
            with contextlib.suppress(OSError):
                os.utime(self._file)


def _saving_of(text: str) -> tuple[Saving | None, Owner | None]:
    """Statement and owner in a file; None for each that cannot be understood."""
    try:
        content = json.loads(text)
        owner = owner_of(content["owner"])
        saving = Saving(**{name: float(content[name]) for name in Saving.__slots__})
        saving.job()
    except (ValueError, TypeError, KeyError, ClusterError):
        return None, None
    return (saving if saving.period_seconds >= 0 else None), owner
