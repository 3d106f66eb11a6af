"""What a link finds of the one before it, which may have had no time for a last word."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING

from outlast.cluster.chain.journal import entries, is_filler, note_or_print, of_kind
from outlast.cluster.chain.runlock import wait_for_lock
from outlast.cluster.chain.verdict import verdict_of_lost
from outlast.cluster.slurm.commands import IMPATIENT, Patience
from outlast.cluster.slurm.history import state_now
from outlast.cluster.slurm.states import has_ended
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.cluster.chain.journal import Entry
    from outlast.cluster.chain.plan import ChainFiles, ChainPlan
    from outlast.cluster.chain.verdict import Verdict

_PATIENCE = Patience(answer_seconds=10.0, total_seconds=20.0)
TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of a program that dies of SIGTERM, by itself and as a shell or srun says it."""


def judge_previous(files: ChainFiles, plan: ChainPlan, job: str) -> Verdict | None:
    """Find out how the link before `job` ended, and wait until nothing of it can write.

    Returns:
        A verdict if the chain ends with it, because its job was cancelled; else None.
    """
    journal = entries(files)
    # A job that was adopted is the only one that starts without a word.
    before = [
        entry
        for entry in journal
        if (entry["kind"] == "started" or entry.get("adopted")) and str(entry["job"]) != job
    ]
    _wait_for_lock(files, before[-1] if before else None)
    if not before:
        return None
    # Whatever became of a filler, the link in whose place it trained goes on.
    if is_filler(before[-1]) or plan.kind == "filler":
        return None
    resumed = of_kind(journal, "resumed")
    if resumed and resumed[-1]["time"] > before[-1]["time"]:
        return None
    return _judge(files, plan, journal, before[-1])


def _wait_for_lock(files: ChainFiles, last: Entry | None) -> None:
    """Wait for the trainer's lock, which may be of any program; a dead job's is removed."""
    lock = files.run / "lock"
    dead: list[str] = []
    if last is not None and lock.exists():
        with contextlib.suppress(ClusterError):
            state = state_now(str(last["job"]), IMPATIENT, of_processes=True)
            dead = last.get("hosts", []) if has_ended(state or "") else []
    wait_for_lock(lock, dead_hosts=dead, fence=files.fence)


def _judge(
    files: ChainFiles, plan: ChainPlan, journal: Sequence[Entry], last: Entry
) -> Verdict | None:
    job = str(last["job"])
    told = [entry for entry in of_kind(journal, "ended") if entry["job"] == job]
    signals = [entry for entry in of_kind(journal, "signalled") if entry["job"] == job]
    terminated = any(entry["signal"] == "SIGTERM" for entry in signals)
    if told and not terminated and told[-1].get("code") not in TERMINATED:
        return None
    try:
        state = state_now(job, _PATIENCE)
    except ClusterError:
        # That Slurm is silent does not mean that it has forgotten the job.
        state = str((signals[-1].get("state") if signals else None) or "UNKNOWN")
    kind = "judged" if told or last.get("adopted") else "lost"
    note_or_print(files, kind, job=job, state=state)
    verdict = verdict_of_lost(state, signals[-1] if signals else None, preemptible=plan.preemptible)
    return verdict if verdict.ends_the_chain else None
