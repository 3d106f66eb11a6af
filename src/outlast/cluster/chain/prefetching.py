"""What a link's nodes lack of the job's data is copied beside training, for the links after it.

While a link waits in the queue no node is its own. Those of the link before are, and those of a
filler that trains in the meantime, and the next link may well get them again.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.cluster.chain import stopping
from outlast.cluster.chain.journal import note_or_print
from outlast.cluster.slurm.commands import installed
from outlast.errors import OutlastError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from outlast.cluster.chain.plan import ChainFiles, ChainPlan

_PATIENCE_SECONDS = 5.0


@dataclass
class Prefetching:
    """The copying beside the training of link `number`, which is job `job`."""

    files: ChainFiles
    plan: ChainPlan
    number: int
    job: str
    _begun: bool = False
    _kill_at: float = math.inf
    _process: subprocess.Popen[bytes] | None = None

    def look(self, *, under_way: bool, ending: bool = False) -> None:
        """Begin once training is under way; write down how it went when it has ended.

        Args:
            under_way: Whether the link trains.
            ending: Whether its last save may be under way, which is to have the file system.
        """
        if ending:
            self._ask_to_end()
        elif under_way and not self._begun:
            self._begun = True
            # A program of one's own has data of its own.
            if not self.plan.command and wants_prefetch(self.files.job):
                self._start()
        if self._process is not None and self._process.poll() is not None:
            self._note()

    def end(self) -> None:
        """End it with the link; what was copied by then is gone on with later."""
        if self._process is not None:
            # srun takes its tasks on other nodes with it only where it is asked to end.
            self._ask_to_end()
            try:
                self._process.wait(_PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                # The next link waits for this job's end; what is half copied does no harm.
                self._process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_PATIENCE_SECONDS)
            self._note()

    def _ask_to_end(self) -> None:
        """Ask once, and end it if it does not do so soon; waits for nothing."""
        if self._process is None:
            return
        if math.isinf(self._kill_at):
            self._process.terminate()
            self._kill_at = time.monotonic() + _PATIENCE_SECONDS
        elif time.monotonic() > self._kill_at:
            self._process.kill()

    def _start(self) -> None:
        nodes = self.plan.nodes_of(self.number)
        known = {stopping.CHAIN, stopping.JOB}
        try:
            self._process = subprocess.Popen(
                prefetch_words(self.plan.python, self.files.job, nodes),
                env={name: value for name, value in os.environ.items() if name not in known},
            )
        except OSError as error:
            print(f"data are not prefetched for the next link: {error}", flush=True)

    def _note(self) -> None:
        assert self._process is not None
        note_or_print(self.files, "prefetched", job=self.job, code=self._process.returncode)
        self._process = None


def wants_prefetch(job_file: Path) -> bool:
    """Whether a job leaves copying to the prefetch, instead of waiting for it at the start."""
    # Half a second's imports, which no link needs before it trains.
    from outlast.job import load_job

    with contextlib.suppress(OutlastError):
        staging = load_job(job_file, []).staging
        return bool(staging.directory) and staging.prefetch and not staging.wait
    return False


def prefetch_words(python: str, job_file: Path, nodes: int) -> Sequence[str]:
    """What prefetches on all nodes of this job; one node needs no srun, which may be missing."""
    from outlast.cluster.staging.job import prefetch_command

    words = prefetch_command(python, job_file, nodes, beside_training=True)
    if nodes == 1 and not installed("srun"):
        return words[words.index(python) :]
    return words
