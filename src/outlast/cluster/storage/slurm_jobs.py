"""Whether the Slurm job of a silent owner has ended, asked without anybody waiting for the answer.

A process on another node that says nothing may be dead, or its file server slow. Slurm knows which
long before 90 s are over. Its answer may take seconds too, so it is asked in a thread, and whoever
looks at the turns meanwhile gets what is known so far.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from outlast.cluster.slurm.history import state_now
from outlast.cluster.slurm.states import has_ended, is_live, is_waiting
from outlast.cluster.storage.identity import this_process
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.cluster.storage.identity import Owner

ASK_AGAIN_SECONDS = 15.0


def job_state(job: str) -> str | None:
    """The state of a job that counts its processes; None where nobody knows."""
    try:
        return state_now(job, of_processes=True)
    except ClusterError:
        return None


class SlurmJobs:
    """Answers whether an owner's job still runs; what `outlast.cluster.storage.ask` may be given.

    Args:
        state_of_job: Asks for a state; may take long.
        ask_again_seconds: From one answer about a job to the next question.
    """

    def __init__(
        self,
        state_of_job: Callable[[str], str | None] = job_state,
        ask_again_seconds: float = ASK_AGAIN_SECONDS,
    ) -> None:
        self._state_of_job = state_of_job
        self._ask_again_seconds = ask_again_seconds
        self._lock = threading.Lock()
        self._known: dict[str, bool | None] = {}
        self._ended: set[str] = set()
        self._asked: dict[str, float] = {}

    def __call__(self, owner: Owner) -> bool | None:
        """False: its job has no processes any more; None: not known, or not yet."""
        # Another cluster on the same file system has jobs of the same numbers.
        if not owner.job or owner.cluster != this_process().cluster:
            return None
        with self._lock:
            known = self._known.get(owner.job)
            now = time.monotonic()
            if owner.job not in self._ended and now >= self._asked.get(owner.job, 0.0):
                # Until it has answered; a command that hangs must not be given twice.
                self._asked[owner.job] = float("inf")
                threading.Thread(
                    target=self._ask, args=(owner.job,), name="turn-slurm", daemon=True
                ).start()
        return known

    def _ask(self, job: str) -> None:
        state = self._state_of_job(job)
        runs = None
        ended = state is not None and has_ended(state)
        if ended or (state is not None and is_waiting(state)):
            # A job that waits again was requeued: its processes are gone, and others will come.
            runs = False
        elif state is not None and is_live(state):
            runs = True
        with self._lock:
            self._known[job] = runs
            if ended:
                self._ended.add(job)
            self._asked[job] = time.monotonic() + self._ask_again_seconds


still_runs = SlurmJobs()
"""Of this process."""
