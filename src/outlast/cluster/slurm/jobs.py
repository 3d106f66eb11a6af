"""Jobs of Slurm: states, queue, history of ended jobs, and the values that Slurm writes.

The queue is read from squeue in fields that all its versions have; of other people's jobs only what
a forecast needs is kept: no names, no users. The history of a job comes from squeue while it
remembers, then from accounting, then from scontrol. Accounting may be absent, switched off, or some
seconds late; none of that is an error here.

Values as Slurm writes them in JSON, which differs between its versions.

Up to 22.05 a number is a number, with 0 or 2**32 - 2 for "not set"; from 23.02 it is a table
``{"set": true, "infinite": false, "number": 60}``. A state is a text, or from 23.11 a list of one
state and its flags.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outlast.cluster.slurm.commands import (
    IMPATIENT,
    Patience,
    SlurmMissingError,
    SlurmRefusedError,
    SlurmUnreachableError,
    ask,
    installed,
)
from outlast.durations import shown_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence


_NO_VALUE = 2**32 - 2


_INFINITE = 2**32 - 1


_NO_VALUE_64 = 2**64 - 2


def number(value: Any) -> float | None:
    """The number, infinity, or None where it is not set."""
    if isinstance(value, dict):
        if value.get("infinite"):
            return math.inf
        return number(value.get("number")) if value.get("set", True) else None
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str):
        try:
            return number(float(value))
        except ValueError:
            return None
    if value in (_NO_VALUE, _NO_VALUE_64):
        return None
    return math.inf if value == _INFINITE else float(value)


def whole(value: Any, default: int = 0) -> int:
    """The number as an integer; `default` where it is not set or has no end."""
    found = number(value)
    return default if found is None or math.isinf(found) else int(found)


def moment(value: Any) -> float | None:
    """Seconds since the epoch; None for 0, which Slurm writes for "not known"."""
    found = number(value)
    return None if not found or math.isinf(found) else found


def words(value: Any) -> list[str]:
    """A text or a list of texts as a list of upper-case words."""
    items = value if isinstance(value, list) else [value]
    return [str(item).upper() for item in items if item not in (None, "")]


def document(text: str) -> dict[str, Any] | None:
    """The JSON object in `text`, or None where there is none.

    Some versions print a warning line before it.
    """
    begin = text.find("{")
    if begin < 0:
        return None
    try:
        found = json.loads(text[begin:])
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


PENDING = frozenset(
    [
        "PENDING",
        "CONFIGURING",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "RESV_DEL_HOLD",
        "SPECIAL_EXIT",
    ]
)


RUNNING = frozenset(
    ["RUNNING", "COMPLETING", "SUSPENDED", "SIGNALING", "STAGE_OUT", "STOPPED", "RESIZING"]
)


ENDED = frozenset(
    [
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "LAUNCH_FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "RECONFIG_FAIL",
        "TIMEOUT",
        "REVOKED",
    ]
)


_FLAGS = ("COMPLETING", "CONFIGURING", "STAGE_OUT", "RESIZING", "REQUEUED", "SIGNALING")


def state_of(words: Iterable[str]) -> str:
    """One word for a state with flags, such as ``CANCELLED by 1000`` or ``CANCELLED COMPLETING``.

    A job that is being taken down is in the state that it will end in.
    """
    found = [part for word in words for part in word.upper().replace("+", " ").split()]
    base = [part for part in found if part in PENDING | RUNNING | ENDED and part not in _FLAGS]
    if base:
        return base[0]
    return next((part for part in found if part in _FLAGS), found[0] if found else "")


def is_live(state: str) -> bool:
    """True if a job in this state has processes, or may still have some."""
    return state in RUNNING


def is_waiting(state: str) -> bool:
    """True if it has yet to start."""
    return state in PENDING


def has_ended(state: str) -> bool:
    """True if it will never run again."""
    return state in ENDED


# Names and comments may hold any printable character.
_QUEUE_SEPARATOR = "\x1f"


_QUEUE_FIELDS = ("%i", "%T", "%D", "%l", "%L", "%V", "%S", "%e", "%Q", "%P", "%r", "%k")


TEXT_FORMAT = _QUEUE_SEPARATOR.join(_QUEUE_FIELDS)


@dataclass(frozen=True)
class QueuedJob:
    """One job that waits, runs or has just ended.

    Attributes:
        identity: Job number as squeue shows it, ``7`` or ``7_2`` or ``7_[3-9]``.
        state: One word, see `outlast.cluster.slurm.jobs`.
        nodes: Allocated, or asked for.
        limit_seconds: Its time limit; infinity without one, None where it is not known.
        left_seconds: Of the limit; None before it starts.
        submitted: Seconds since the epoch, like `starts` and `ends`; None where not known.
        starts: When it started, or Slurm's own guess.
        ends: By its limit.
        priority: Slurm's figure; higher goes first.
        partition: Its partition, or several separated by commas.
        reason: Why it waits.
        comment: What it was submitted with.
    """

    identity: str
    state: str
    nodes: int
    limit_seconds: float | None = None
    left_seconds: float | None = None
    submitted: float | None = None
    starts: float | None = None
    ends: float | None = None
    priority: float | None = None
    partition: str = ""
    reason: str = ""
    comment: str = ""

    @property
    def number(self) -> str:
        """The job number without a place in an array."""
        return self.identity.partition("_")[0]


_NODES = "`sinfo -R` says why nodes are down or drained, and `sinfo` which ones are free"


_WAITS = (
    ("dependencyneversatisfied", "it waits for a job that did not end as it asked", "cancel it"),
    ("dependency", "it waits for the end of the job before it", ""),
    ("jobhelduser", "you hold it", "`scontrol release {job}` lets it start"),
    ("jobheldadmin", "an administrator holds it", "ask them, or `scontrol release {job}`"),
    ("requeued held", "it was requeued and is held", "`scontrol release {job}` lets it start"),
    ("reqnodenotavail", "nodes that it needs are down, drained or reserved", _NODES),
    ("down, drained", "nodes that it needs are down, drained or reserved", _NODES),
    ("nodedown", "a node that it needs is down", _NODES),
    ("partitiondown", "its partition is down", "`sinfo` says more; or ask for slurm.partition=..."),
    ("partitioninactive", "its partition is inactive", "ask for slurm.partition=..."),
    ("partitiontimelimit", "it asks for more time than its partition allows", "{time}"),
    ("partitionnodelimit", "it asks for more nodes than its partition allows", "{nodes}"),
    ("badconstraints", "no nodes have what it asks for", "see slurm.directives, slurm.nodes"),
    ("invalidaccount", "its account may not run jobs", "set slurm.account=..."),
    ("invalidqos", "its quality of service is not allowed", "set slurm.qos=..."),
    ("timelimit", "it asks for more time than is allowed", "{time}"),
    ("walldurationperjob", "it asks for more time than your account or QOS allows", "{time}"),
    ("maxjob", "you run as many jobs as your account or QOS allows", "it starts as others end"),
    ("qos", "a limit of its quality of service is reached", "`sacctmgr show qos` lists them"),
    ("assoc", "a limit of its account is reached", "`sacctmgr show assoc user=$USER` lists them"),
    ("reservation", "it waits for a reservation", "`scontrol show reservation` says when"),
    ("begintime", "it is not to start yet", "`scontrol show job {job}` says when"),
    ("licenses", "licences are in use by others", ""),
    ("arraytasklimit", "the place of the array before it runs", ""),
    ("priority", "jobs of higher priority are before it", ""),
    ("resources", "it is next, when enough nodes are free", ""),
)


"""Part of Slurm's reason, in lower case -> what it means, what can be done; the first counts."""


_REMEDIES = {
    "time": "`outlast cluster stop`, then `outlast cluster resume RUN slurm.wall_time=...`",
    "nodes": "`outlast cluster stop`, then `outlast cluster resume RUN slurm.nodes=[...]`",
}


def waiting_words(job: QueuedJob) -> str:
    """Why a job waits, in plain words with what can be done; Slurm's own word in brackets."""
    reason = job.reason.strip("() ")
    if reason.lower() in ("", "none", "null"):
        return "Slurm has not looked at it yet"
    for part, meaning, remedy in _WAITS:
        if part in reason.lower().replace("_", " " if " " in part else "_"):
            then = remedy.format(job=job.identity, **_REMEDIES)
            return f"{meaning} ({reason}){f'; {then}' if then else ''}"
    return f"Slurm says: {reason}; `scontrol show job {job.identity}` says more"


def queue_from_text(text: str) -> list[QueuedJob]:
    """Jobs in the output of ``squeue --noheader --format`` with `TEXT_FORMAT`.

    Lines of another form are left out.
    """
    return [
        _from_fields(fields)
        for line in text.splitlines()
        if len(fields := line.split(_QUEUE_SEPARATOR)) == len(_QUEUE_FIELDS)
    ]


def queued(
    jobs: Sequence[str] = (),
    *,
    partitions: Sequence[str] = (),
    everyone: bool = False,
    ended_too: bool = True,
    patience: Patience | None = None,
) -> list[QueuedJob]:
    """The queue now.

    Args:
        jobs: Only these numbers; those that Slurm has forgotten are missing in the answer.
        partitions: Only these.
        everyone: Also jobs of others, without `jobs`.
        ended_too: Also those that ended so shortly ago that Slurm still knows them.
        patience: Deadlines of the command.

    Raises:
        SlurmMissingError: There is no squeue.
        SlurmUnreachableError: The controller does not answer.
        SlurmRefusedError: For anything but a job that is forgotten.
    """
    command = ["squeue", "--noheader", f"--format={TEXT_FORMAT}"]
    command += ["--states=all"] if ended_too else []
    command += [f"--jobs={','.join(jobs)}"] if jobs else []
    command += [f"--partition={','.join(partitions)}"] if partitions else []
    command += [] if jobs or everyone else ["--me"]
    try:
        return queue_from_text(ask(command, patience))
    except SlurmRefusedError as error:
        # squeue fails for one number that is not known, and knows nothing of ended jobs later on.
        if "invalid job id" in error.words.lower():
            return []
        raise


def left_seconds_now(job: str) -> float | None:
    """Seconds that Slurm leaves to a running job by its limit; infinity without one.

    Returns:
        None where squeue does not know.

    Raises:
        SlurmMissingError: There is no squeue.
        SlurmUnreachableError: It gave no answer; one try is made.
    """
    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%L"]
    try:
        lines = ask(command, IMPATIENT).split()
    except SlurmRefusedError:
        return None
    return shown_seconds(lines[0]) if lines else None


def _from_fields(fields: list[str]) -> QueuedJob:
    identity, state, nodes, limit, left, submitted, starts, ends, priority, *rest = fields
    partition, reason, comment = rest
    digits = re.match(r"\d*", nodes.strip())
    return QueuedJob(
        identity=identity,
        state=state_of([state]),
        nodes=int((digits and digits[0]) or 0),
        limit_seconds=shown_seconds(limit),
        left_seconds=shown_seconds(left),
        submitted=moment(submitted),
        starts=moment(starts),
        ends=moment(ends),
        priority=number(priority),
        partition=partition,
        reason=reason,
        comment="" if comment == "(null)" else comment,
    )


_HISTORY_SEPARATOR = "\x1f"


_HISTORY_FIELDS = [
    "JobID",
    "State",
    "ExitCode",
    "NNodes",
    "Timelimit",
    "Submit",
    "Start",
    "End",
    "Elapsed",
]


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
        fields = line.split(_HISTORY_SEPARATOR)
        if len(fields) != len(_HISTORY_FIELDS):
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
        f"--delimiter={_HISTORY_SEPARATOR}",
        f"--format={','.join(_HISTORY_FIELDS)}",
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
    if state and (of_processes or state != "COMPLETING"):
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
    told = code.get("signal") or {}
    signal = whole(told.get("signal_id", told.get("id")))
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
