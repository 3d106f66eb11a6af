"""The link after this one: submitted once, beside the training or when this link ends."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outlast.cluster.chain.ending import is_last
from outlast.cluster.chain.submission import submit_link
from outlast.cluster.slurm.commands import Patience
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.cluster.chain.plan import ChainFiles, ChainPlan

_PATIENCE_SECONDS = 600.0
_ANSWER_SECONDS = 30.0
_SHORTEST_ANSWER_SECONDS = 5.0
_JOIN_SECONDS = 30.0
# For what a link writes down at its end.
_KEPT_SECONDS = 5.0


def _never() -> float:
    return math.inf


@dataclass
class Succession:
    """Submits the link after `number`, to start when job `after` has ended.

    Attributes:
        lead_seconds: How long before its end that link's last save should begin, by what is known
            when it is submitted.
        left_seconds: Until Slurm ends this link; nothing is waited for any longer.
    """

    files: ChainFiles
    plan: ChainPlan
    number: int
    after: str
    lead_seconds: float = 0.0
    left_seconds: Callable[[], float] = _never
    _job: str = ""
    _problem: str = ""
    _thread: threading.Thread | None = None
    _submitting: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """Submit in a thread where links submit each other: sbatch may wait, training need not."""
        if self.plan.kind == "dependent" and not is_last(self.plan, self.number):
            self._thread = threading.Thread(target=self.submit, daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Wait a while for that thread."""
        if self._thread is not None:
            self._thread.join(timeout=min(_JOIN_SECONDS, self._spare_seconds()))

    def submit(self) -> tuple[str, str]:
        """Submit, unless that is done; returns the job's number, or why there is none."""
        # The thread that does so first may still be waiting for the controller.
        longest = _PATIENCE_SECONDS + _ANSWER_SECONDS + _JOIN_SECONDS
        if not self._submitting.acquire(timeout=min(longest, self._spare_seconds())):
            return "", "Slurm has not answered sbatch, and this link must end"
        try:
            if not self._job:
                try:
                    self._job = self._submitted()
                except ClusterError as error:
                    self._problem = str(error)
                    print(f"the next link could not be submitted: {error}", flush=True)
            return self._job, self._problem
        finally:
            self._submitting.release()

    def _spare_seconds(self) -> float:
        return max(self.left_seconds() - _KEPT_SECONDS, 0.0)

    def _patience(self) -> Patience:
        spare = self._spare_seconds()
        return Patience(
            answer_seconds=min(_ANSWER_SECONDS, max(spare, _SHORTEST_ANSWER_SECONDS)),
            total_seconds=min(_PATIENCE_SECONDS, spare),
        )

    def _submitted(self) -> str:
        number = self.number + 1
        if not self.plan.chooses:
            return submit_link(
                self.files,
                self.plan,
                number,
                after=self.after,
                lead_seconds=self.lead_seconds,
                patience=self._patience(),
            )
        # Needs NumPy, which other links do not wait for.
        from outlast.cluster.chain.choosing import choose_next, submit_chosen

        chosen = choose_next(self.files, self.plan, number, self.after)
        job = submit_chosen(self.files, chosen, number, after=self.after, patience=self._patience())
        print(f"link {number} is job {job}: {chosen.reason}", flush=True)
        return job
