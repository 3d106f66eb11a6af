"""Who saves to a shared file system, and how seldom each of them should.

    saver = Saver("/scratch/project/.turns", load=0.6)
    saver.least_seconds(nodes=8, save_seconds=40.0, overhead_seconds=2.0, mtbf_seconds=90_000)
    saver.close()

Each job keeps a small file in the folder, `saver-<name>.json`, with what its saves cost it and the
file system. From the files of all that live, each one finds its own period (see `periods`): the
same sum for all, so nobody has to decide for the others. Files of dead jobs are removed by whoever
sees them.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.cluster.storage.identity import lives, owner_of, this_process
from outlast.cluster.storage.periods import SavingJob, shared_periods
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.cluster.storage.identity import Owner

_PREFIX = "saver-"
_LEAST_LEFT = 0.05
"""Share of the budget that is left to those who can choose, whatever the others take."""


@dataclass(frozen=True, slots=True)
class Saving:
    """What a job says of its saves.

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
            now = self._tell(own)
            return least_period_seconds(own, self._others(now), self._load)
        except (OSError, ClusterError):
            return 0.0

    def close(self) -> None:
        """This job makes no more saves that others should make way for."""
        self._ended.set()
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)

    def _tell(self, own: Saving) -> float:
        """Write the file of this job; returns the file server's time."""
        self._directory.mkdir(parents=True, exist_ok=True)
        draft = self._file.with_name(f".draft-{self._file.stem}")
        try:
            draft.write_text(json.dumps({**asdict(own), "owner": this_process().to_dict()}))
            draft.replace(self._file)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        if not self._beating:
            self._beating = True
            threading.Thread(target=self._beat, name="saver", daemon=True).start()
        return self._file.stat().st_mtime

    def _others(self, now_seconds: float) -> list[Saving]:
        found = []
        for path in self._directory.glob(f"{_PREFIX}*.json"):
            if path == self._file:
                continue
            with contextlib.suppress(OSError):
                age = now_seconds - path.stat().st_mtime
                saving, owner = _saving_of(path.read_text())
                if owner is not None and lives(
                    owner, age, self._stale_after_seconds, self._ask_alive
                ):
                    found += [] if saving is None else [saving]
                elif owner is not None or age > self._stale_after_seconds:
                    path.unlink()
        return found

    def _beat(self) -> None:
        while not self._ended.wait(self._heartbeat_seconds):
            with contextlib.suppress(OSError):
                os.utime(self._file)


def _saving_of(text: str) -> tuple[Saving | None, Owner | None]:
    """What a file says, and whose it is; None for what cannot be understood."""
    try:
        content = json.loads(text)
        owner = owner_of(content["owner"])
        saving = Saving(**{name: float(content[name]) for name in Saving.__slots__})
        saving.job()
    except (ValueError, TypeError, KeyError, ClusterError):
        return None, None
    return (saving if saving.period_seconds >= 0 else None), owner
