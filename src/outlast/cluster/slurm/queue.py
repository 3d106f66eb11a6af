"""The queue as squeue prints it, in fields that all its versions have.

Of other people's jobs only what a forecast needs is kept: no names, no users.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.cluster.durations import shown_seconds
from outlast.cluster.slurm.commands import IMPATIENT, Patience, SlurmRefusedError, ask
from outlast.cluster.slurm.states import state_of
from outlast.cluster.slurm.values import moment, number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Names and comments may hold any printable character.
SEPARATOR = "\x1f"
FIELDS = ("%i", "%T", "%D", "%l", "%L", "%V", "%S", "%e", "%Q", "%P", "%r", "%k")
TEXT_FORMAT = SEPARATOR.join(FIELDS)


@dataclass(frozen=True)
class QueuedJob:
    """One job that waits, runs or has just ended.

    Attributes:
        identity: Job number as squeue shows it, ``7`` or ``7_2`` or ``7_[3-9]``.
        state: One word, see `outlast.cluster.slurm.states`.
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
        if len(fields := line.split(SEPARATOR)) == len(FIELDS)
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
    return QueuedJob(
        identity=identity,
        state=state_of([state]),
        nodes=_first_whole(nodes),
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


def _first_whole(text: str) -> int:
    """Nodes of a waiting job may be a range, ``2-4``."""
    digits = "".join(_leading_digits(text.strip()))
    return int(digits) if digits else 0


def _leading_digits(text: str) -> Iterator[str]:
    for letter in text:
        if not letter.isdigit():
            return
        yield letter
