"""Verdict on the end of a link: the chain is done, continues, or gives up.

A chain is done only where the exit code, the run's own record and Slurm agree: srun also ends with
0 when Slurm has lost a node in the middle of the run.

A link that ended without a word is judged by the next one. That also waits for the trainer's lock:
its owner cannot be examined from another host, so it counts as live for two minutes after its last
sign of life, unless Slurm has ended the job whose process it was.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.cluster.chain_files import entries, is_filler, note_or_print, of_kind, since_resumed
from outlast.cluster.slurm import IMPATIENT, Patience, has_ended, is_live, state_now
from outlast.errors import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_GIVE_UP,
    EXIT_TO_BE_CONTINUED,
    ClusterError,
)
from outlast.records.lock import OwnerLock
from outlast.records.process import boot_identity

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from outlast.cluster.chain_files import ChainFiles, ChainPlan, Entry


NOT_ITS_FAULT = frozenset(
    {"PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "CANCELLED", "REVOKED", "LAUNCH_FAILED"}
)
"""States of a job that ended for no reason of its own; without progress it counts as no attempt."""


@dataclass(frozen=True)
class Verdict:
    """Verdict on a link's end.

    Attributes:
        outcome: ``continue``, or what ends the chain: ``done``, ``gave_up``, ``cancelled`` or
            ``stopped``.
        reason: In one sentence or a few words.
    """

    outcome: str
    reason: str

    @property
    def ends_the_chain(self) -> bool:
        """True if no further link is to run."""
        return self.outcome != "continue"

    @property
    def code(self) -> int:
        """Exit code of the link."""
        return {"done": EXIT_DONE, "continue": EXIT_TO_BE_CONTINUED, "stopped": 3}.get(
            self.outcome, EXIT_GIVE_UP
        )


def verdict_of(
    code: int,
    *,
    progressed: bool,
    saved: bool,
    fruitless: int,
    attempts: int,
    state: str | None = None,
    signal: str = "",
    stop_asked: bool = False,
    failure: str = "",
    unfinished: str = "",
) -> Verdict:
    """Return the verdict for a link whose program has ended.

    Args:
        code: Its exit code.
        progressed: Whether this link has saved a step.
        saved: Whether it or any link before it has.
        fruitless: Links in a row before this one that have not, through their own fault.
        attempts: How many of these are allowed.
        state: What Slurm said of the job when it was told to end, or had ended with 0; None where
            it was not asked or does not know.
        signal: By which it was told, or an empty text.
        stop_asked: Whether `outlast cluster stop` was given.
        failure: Why its last checkpoint could not be written, or an empty text.
        unfinished: Why an exit code of 0 does not mean that all is done; empty where it does.
    """
    # Slurm says anything but that the job runs or has ended well.
    denied = state is not None and not is_live(state) and state != "COMPLETED"
    if code == EXIT_DONE and not unfinished and not denied:
        return Verdict("done", "all steps are done")
    if state == "CANCELLED":
        return Verdict("cancelled", "the job was cancelled (scancel)")
    if stop_asked:
        return Verdict("stopped", "outlast cluster stop was given")
    if code == EXIT_TO_BE_CONTINUED and progressed:
        return Verdict("continue", "saved, to be continued")
    doubts = [unfinished, f"Slurm says {state}" if denied else ""]
    but = f", but {' and '.join(filter(None, doubts))}" if code == EXIT_DONE else ""
    if state in NOT_ITS_FAULT:
        return Verdict("continue", f"Slurm ended the job ({state}){but}")
    if signal:
        how = f"ended after {signal} with code {code}"
    elif code < 0 or code > 128:
        how = f"killed by signal {-code if code < 0 else code - 128}"
    else:
        how = f"ended with code {code}"
    how += f": {failure}" if failure else but
    if progressed:
        return Verdict("continue", how)
    if code == EXIT_BAD_INPUT and not saved:
        return Verdict(
            "gave_up",
            f"{how} before any step was saved; mend what its log says, then `outlast cluster "
            "resume`",
        )
    if fruitless + 1 >= attempts:
        return Verdict(
            "gave_up",
            f"{fruitless + 1} links in a row have saved no step (slurm.attempts_without_progress "
            f"= {attempts}); the last one: {how}",
        )
    return Verdict("continue", f"{how}, no step saved ({fruitless + 1} of {attempts} attempts)")


def verdict_of_lost(state: str | None, signalled: Entry | None, *, preemptible: bool) -> Verdict:
    """Return the verdict, given by the next link, on a link that ended without one of its own.

    Args:
        state: Of its job as Slurm says; None where nobody knows it any more.
        signalled: What it wrote when it was told to end, if it could.
        preemptible: Whether its partition lets others push jobs out.
    """
    if state == "CANCELLED":
        return Verdict("cancelled", "the job was cancelled (scancel)")
    if state is None and signalled is not None:
        known, left = signalled.get("state"), signalled.get("left")
        early = left is None or left > 60.0
        told = signalled.get("signal") == "SIGTERM" and known is None and early
        if known == "CANCELLED" or (told and not preemptible):
            return Verdict(
                "cancelled",
                "the job was told to end long before its limit, and its partition pushes no jobs "
                "out: it was cancelled",
            )
    return Verdict("continue", f"the job ended as {state or 'nobody knows'}")


def fruitless_links(journal: Sequence[Entry], step: int) -> int:
    """Links in a row, up to the last that has ended, that saved no step through their own fault.

    Args:
        journal: Of the chain.
        step: Of the newest checkpoint now.
    """
    here = since_resumed(journal)
    told = of_kind(here, "lost", "judged", "signalled", "ended")
    excused = {str(entry["job"]) for entry in told if entry.get("state") in NOT_ITS_FAULT}
    count, after = 0, step
    for start in reversed(of_kind(here, "started")):
        if int(start["step"]) < after:
            break
        after = int(start["step"])
        if str(start["job"]) not in excused and not is_filler(start):
            count += 1
    return count


_LOOK_SECONDS = 1.0


def wait_for_lock(
    path: Path, dead_hosts: Sequence[str] = (), *, fence: Path | None = None
) -> float:
    """Wait until no owner on another host can be alive any more.

    A lock of this host, since it was booted, is left to the trainer, which can examine its owner.

    Args:
        path: The lock.
        dead_hosts: Hosts of a job that has ended for certain: a lock from there is removed.
        fence: Of the chain, which this link holds.

    Returns:
        Seconds that it took, at most `OwnerLock.stale_after_seconds`.
    """
    begun = time.monotonic()
    dead = {host.partition(".")[0] for host in dead_hosts}
    while time.monotonic() - begun < OwnerLock.stale_after_seconds:
        try:
            found = json.loads(path.read_bytes())
            owner, boot = str(found["host"]), str(found["boot"])
            age_seconds = time.time() - path.stat().st_mtime
        except (OSError, ValueError, KeyError, TypeError):
            break
        if fence is not None and str(fence) in (found.get("lease") or ()):
            # Of an earlier job of this chain: the trainer breaks it, by its lease.
            break
        here = (owner, boot) == (socket.gethostname(), boot_identity())
        if here or age_seconds > OwnerLock.stale_after_seconds:
            break
        if owner.partition(".")[0] in dead:
            with contextlib.suppress(OSError):
                path.unlink()
            break
        time.sleep(_LOOK_SECONDS)
    return time.monotonic() - begun


_PATIENCE = Patience(answer_seconds=10.0, total_seconds=20.0)
TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of a program that dies of SIGTERM, by itself and as a shell or srun says it."""


def verdict_on_previous(files: ChainFiles, plan: ChainPlan, job: str) -> Verdict | None:
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
    last = before[-1] if before else None
    # Wait for the trainer's lock, which may be of any program; a dead job's is removed.
    lock = files.run / "lock"
    dead: list[str] = []
    if last is not None and lock.exists():
        with contextlib.suppress(ClusterError):
            state = state_now(str(last["job"]), IMPATIENT, of_processes=True)
            dead = last.get("hosts", []) if has_ended(state or "") else []
    wait_for_lock(lock, dead_hosts=dead, fence=files.fence)
    # Whatever became of a filler, the link in whose place it trained continues.
    if last is None or is_filler(last) or plan.kind == "filler":
        return None
    resumed = of_kind(journal, "resumed")
    if resumed and resumed[-1]["time"] > last["time"]:
        return None
    about = [entry for entry in journal if entry.get("job") == last["job"]]
    told, signals = of_kind(about, "ended"), of_kind(about, "signalled")
    terminated = any(entry["signal"] == "SIGTERM" for entry in signals)
    if told and not terminated and told[-1].get("code") not in TERMINATED:
        return None
    signalled = signals[-1] if signals else None
    try:
        ended = state_now(str(last["job"]), _PATIENCE)
    except ClusterError:
        # That Slurm is silent does not mean that it has forgotten the job.
        ended = str((signalled or {}).get("state") or "UNKNOWN")
    kind = "judged" if told or last.get("adopted") else "lost"
    note_or_print(files, kind, job=str(last["job"]), state=ended)
    verdict = verdict_of_lost(ended, signalled, preemptible=plan.preemptible)
    return verdict if verdict.ends_the_chain else None
