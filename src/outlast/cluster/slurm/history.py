"""What became of a job: from squeue while it remembers, from accounting, from scontrol.

Accounting may be absent, switched off, or some seconds late; none of that is an error here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outlast.cluster.durations import shown_seconds
from outlast.cluster.slurm.commands import (
    IMPATIENT,
    Patience,
    SlurmMissingError,
    SlurmRefusedError,
    SlurmUnreachableError,
    ask,
    installed,
)
from outlast.cluster.slurm.queue import queued
from outlast.cluster.slurm.states import has_ended, state_of
from outlast.cluster.slurm.values import document, moment, number, whole, words

SEPARATOR = "\x1f"
FIELDS = ("JobID", "State", "ExitCode", "NNodes", "Timelimit", "Submit", "Start", "End", "Elapsed")


@dataclass(frozen=True)
class EndedJob:
    """One record of accounting; a requeued job has several.

    Attributes:
        identity: Job number, with its place in an array.
        state: One word.
        exit_code: Of the batch script; 128 + the signal where one ended it.
        nodes: That it had.
        limit_seconds: Asked for; infinity without a limit, None where not known.
        submitted: Seconds since the epoch, like `started` and `ended`; None where not known.
        started: See `submitted`.
        ended: See `submitted`.
        elapsed_seconds: From its start.
    """

    identity: str
    state: str
    exit_code: int
    nodes: int
    limit_seconds: float | None
    submitted: float | None
    started: float | None
    ended: float | None
    elapsed_seconds: float | None


def history_from_text(text: str) -> list[EndedJob]:
    """Records in the output of ``sacct --parsable2 --noheader``, its fields being `FIELDS`."""
    found = []
    for line in text.splitlines():
        fields = line.split(SEPARATOR)
        if len(fields) != len(FIELDS):
            continue
        identity, state, code, nodes, limit, submitted, started, ended, elapsed = fields
        found.append(
            EndedJob(
                identity,
                state_of(state.split()),
                _code(code),
                int(nodes) if nodes.isdigit() else 0,
                shown_seconds(limit),
                moment(submitted),
                moment(started),
                moment(ended),
                shown_seconds(elapsed),
            )
        )
    return found


def history_from_json(text: str) -> list[EndedJob]:
    """Records in the output of ``sacct --json`` of any version."""
    jobs = (document(text) or {}).get("jobs")
    return [_from_table(job) for job in jobs if isinstance(job, dict)] if jobs else []


def history_of(jobs: list[str], patience: Patience = IMPATIENT) -> list[EndedJob]:
    """Accounting records of these jobs; none where there is no accounting or it is late."""
    command = [
        "sacct",
        "--allocations",
        "--duplicates",
        "--noheader",
        "--parsable2",
        f"--delimiter={SEPARATOR}",
        f"--format={','.join(FIELDS)}",
        f"--jobs={','.join(jobs)}",
    ]
    try:
        return history_from_text(ask(command, patience))
    except (SlurmMissingError, SlurmRefusedError, SlurmUnreachableError):
        return []


def state_now(
    job: str, patience: Patience | None = None, *, of_processes: bool = False
) -> str | None:
    """The state of one job, as one word; None where nobody knows.

    A job that is being taken down counts as what it will end in, as far as Slurm says so.

    Args:
        job: Its number.
        patience: Deadlines of squeue.
        of_processes: Whether such a job is COMPLETING instead, since it may have processes still.

    Raises:
        SlurmUnreachableError: The controller does not answer, so nothing can be said.
    """
    state = ""
    try:
        states = [item.state for item in queued([job], patience=patience)]
        state = states[-1] if states else ""
    except SlurmMissingError:
        pass
    if state and state != "COMPLETING":
        return state
    if state and of_processes:
        return state
    shown = _shown_by_scontrol(job)
    if shown and (of_processes or shown != "COMPLETING"):
        return shown
    records = history_of([job])
    if records and (has_ended(records[-1].state) or not state):
        return records[-1].state
    return state or None


def _shown_by_scontrol(job: str) -> str:
    if not installed("scontrol"):
        return ""
    try:
        text = ask(["scontrol", "--oneliner", "show", "job", job], IMPATIENT)
    except (SlurmMissingError, SlurmRefusedError, SlurmUnreachableError):
        return ""
    found = [word.partition("=")[2] for word in text.split() if word.startswith("JobState=")]
    return state_of(found[-1:])


def _code(text: str) -> int:
    """Exit code from CODE:SIGNAL."""
    code, _, signal = text.partition(":")
    if signal.isdigit() and int(signal):
        return 128 + int(signal)
    return int(code) if code.isdigit() else 0


def _from_table(table: dict[str, Any]) -> EndedJob:
    times = table.get("time") or {}
    state = table.get("state") or {}
    limit = number(times.get("limit"))
    code = table.get("exit_code") or {}
    returned = whole(code.get("return_code"))
    signal = whole(
        (code.get("signal") or {}).get("signal_id", (code.get("signal") or {}).get("id"))
    )
    array = table.get("array") or {}
    first, place = whole(array.get("job_id")), number(array.get("task_id"))
    identity = str(table.get("job_id", ""))
    return EndedJob(
        # As the text has it: a place of an array has a job number of its own besides.
        identity=f"{first}_{int(place)}" if first and place is not None else identity,
        state=state_of(words(state.get("current"))),
        exit_code=128 + signal if signal else returned,
        nodes=whole(table.get("allocation_nodes")),
        limit_seconds=None if limit is None else 60.0 * limit,
        submitted=moment(times.get("submission")),
        started=moment(times.get("start")),
        ended=moment(times.get("end")),
        elapsed_seconds=number(times.get("elapsed")),
    )
