"""The link after this one: submitted once, beside the training or when this link ends."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outlast.cluster.chain.ending import is_last
from outlast.cluster.chain.submission import submit_link
from outlast.cluster.slurm.commands import Patience
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from outlast.cluster.chain.plan import ChainFiles, ChainPlan

_PATIENCE = Patience(total_seconds=600.0)
_JOIN_SECONDS = 30.0


@dataclass
class Succession:
    """Submits the link after `number`, to start when job `after` has ended.

    Attributes:
        lead_seconds: How long before its end that link's last save should begin, by what is known
            when it is submitted.
    """

    files: ChainFiles
    plan: ChainPlan
    number: int
    after: str
    lead_seconds: float = 0.0
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
            self._thread.join(timeout=_JOIN_SECONDS)

    def submit(self) -> tuple[str, str]:
        """Submit, unless that is done; returns the job's number, or why there is none."""
        # The thread that does so first may still be waiting for the controller.
        with self._submitting:
            if not self._job:
                try:
                    self._job = self._submitted()
                except ClusterError as error:
                    self._problem = str(error)
                    print(f"the next link could not be submitted: {error}", flush=True)
            return self._job, self._problem

    def _submitted(self) -> str:
        number = self.number + 1
        if not self.plan.chooses:
            return submit_link(
                self.files,
                self.plan,
                number,
                after=self.after,
                lead_seconds=self.lead_seconds,
                patience=_PATIENCE,
            )
        # Needs NumPy, which other links do not wait for.
        from outlast.cluster.chain.choosing import choose_next, submit_chosen

        chosen = choose_next(self.files, self.plan, number, self.after)
        job = submit_chosen(self.files, chosen, number, after=self.after, patience=_PATIENCE)
        print(f"link {number} is job {job}: {chosen.reason}", flush=True)
        return job
