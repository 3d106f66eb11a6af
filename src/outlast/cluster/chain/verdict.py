"""What the end of a link means for its chain: done, go on, or give up.

A chain is done only where the exit code, the run's own record and Slurm agree: srun also ends with
0 when Slurm has lost a node in the middle of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.cluster.chain.journal import is_filler, of_kind, since_resumed
from outlast.cluster.slurm.states import is_live
from outlast.errors import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_GIVE_UP,
    EXIT_TO_BE_CONTINUED,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.cluster.chain.journal import Entry

OUTCOMES = ("done", "gave_up", "cancelled", "stopped")
NOT_ITS_FAULT = frozenset(
    {"PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "CANCELLED", "REVOKED", "LAUNCH_FAILED"}
)
"""States of a job that ended for no reason of its own; without progress it counts as no attempt."""


@dataclass(frozen=True)
class Verdict:
    """What follows from a link's end.

    Attributes:
        outcome: ``continue``, or one of `OUTCOMES`, which end the chain.
        reason: In one sentence or a few words.
    """

    outcome: str
    reason: str

    @property
    def ends_the_chain(self) -> bool:
        """Whether no further link is to run."""
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
    """What follows when the program of a link has ended.

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
    if code == EXIT_DONE and not unfinished and not _denies(state):
        return Verdict("done", "all steps are done")
    if state == "CANCELLED":
        return Verdict("cancelled", "the job was cancelled (scancel)")
    if stop_asked:
        return Verdict("stopped", "outlast cluster stop was given")
    if code == EXIT_TO_BE_CONTINUED and progressed:
        return Verdict("continue", "saved, to be continued")
    doubts = [*([unfinished] if unfinished else []), *([f"Slurm says {state}"] * _denies(state))]
    but = f", but {' and '.join(doubts)}" if code == EXIT_DONE else ""
    if state in NOT_ITS_FAULT:
        return Verdict("continue", f"Slurm ended the job ({state}){but}")
    how = f"{_how(code, signal)}: {failure}" if failure else f"{_how(code, signal)}{but}"
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
    """What follows from a link that ended without a word of its own, seen by the next one.

    Args:
        state: Of its job as Slurm says; None where nobody knows it any more.
        signalled: What it wrote when it was told to end, if it could.
        preemptible: Whether its partition lets others push jobs out.
    """
    if state == "CANCELLED":
        return Verdict("cancelled", "the job was cancelled (scancel)")
    if state is None and signalled is not None:
        known = signalled.get("state")
        left = signalled.get("left")
        early = left is None or left > 60.0
        if known == "CANCELLED" or (
            signalled.get("signal") == "SIGTERM" and known is None and early and not preemptible
        ):
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
    excused = {
        str(entry["job"])
        for kind in ("lost", "judged", "signalled", "ended")
        for entry in of_kind(here, kind)
        if entry.get("state") in NOT_ITS_FAULT
    }
    count, after = 0, step
    for start in reversed(of_kind(here, "started")):
        if int(start["step"]) < after:
            break
        after = int(start["step"])
        if str(start["job"]) not in excused and not is_filler(start):
            count += 1
    return count


def _denies(state: str | None) -> bool:
    """Whether Slurm says of a job anything but that it runs or has ended well."""
    return state is not None and not is_live(state) and state != "COMPLETED"


def _how(code: int, signal: str) -> str:
    if signal:
        return f"ended after {signal} with code {code}"
    if code < 0 or code > 128:
        return f"killed by signal {-code if code < 0 else code - 128}"
    return f"ended with code {code}"
