"""Interface to the batch system Slurm: its commands, its jobs, its partitions.

Each command has a deadline and is repeated where a failure passes: a controller that restarts, a
socket that times out or a full queue of requests is nothing that a user did wrong, so such a
command is given again until `Patience` is over. What Slurm refuses is not asked again; its own
words are the error.

The queue is read from squeue in fields that all its versions have; of other people's jobs only what
a forecast needs is kept: no names, no users. The history of a job comes from squeue while it
remembers, then from accounting, then from scontrol. Accounting may be absent, switched off, or some
seconds late; none of that is an error here.

Of partitions, sinfo alone is enough; where scontrol is there (it is missing in many containers), it
adds what only it knows.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outlast.durations import shown_seconds
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

# As slurm_errno.c and the client commands word it, in lower case. "Slurm temporarily unable to
# accept job" is sbatch's own retry, which ends in one of the others.
_PASSING = (
    "unable to contact slurm controller",
    "connection refused",
    "connection timed out",
    "connection reset",
    "socket timed out",
    "zero bytes were transmitted",
    "unexpected message received",
    "transport endpoint",
    "resource temporarily unavailable",
    "temporarily unable to accept",
    "try again",
    "slurmctld is in standby",
    "protocol authentication error",
    "slurmdbd",
    "load error",
)
_NOT_PASSING = ("invalid", "disabled", "not supported", "denied")
# The settings of a job that submits the next one must not become those of that one.
_OF_THE_JOB = ("SLURM_", "OUTLAST_CHAIN", "OUTLAST_LINK", "PMI_", "PMIX_")
_OF_THE_SITE = ("SLURM_CONF", "SLURM_TIME_FORMAT", "SLURM_CLUSTERS")
# What a user may have set to see queues in another way than a program reads them.
_OF_THE_VIEW = ("SQUEUE_", "SINFO_", "SACCT_", "SCONTROL_")
# Between the fields of an answer: names and comments may hold any printable character.
SEPARATOR = "\x1f"


class SlurmMissingError(ClusterError):
    """The command is not installed here, as in a container."""


class SlurmUnreachableError(ClusterError):
    """The controller did not answer within the patience."""


class SlurmRefusedError(ClusterError):
    """Slurm said no."""

    @property
    def words(self) -> str:
        """Slurm's own words."""
        return str(self).partition(" was refused: ")[2]


NO_ANSWER = (SlurmMissingError, SlurmRefusedError, SlurmUnreachableError)
"""Errors of a command whose answer can be done without."""


@dataclass(frozen=True)
class Patience:
    """Deadline and retries of a command.

    Attributes:
        answer_seconds: Longest wait for one answer.
        total_seconds: From the first try to the last one's beginning; 0: one try.
        first_pause_seconds: Between the first two tries; doubled each time, up to 15 s.
    """

    answer_seconds: float = 30.0
    total_seconds: float = 60.0
    first_pause_seconds: float = 0.5


PATIENT = Patience()
IMPATIENT = Patience(answer_seconds=10.0, total_seconds=0.0)
_LONGEST_PAUSE_SECONDS = 15.0


def installed(command: str) -> bool:
    """True if the command is on this machine's path."""
    return shutil.which(command) is not None


def ask(
    command: Sequence[str],
    patience: Patience = PATIENT,
    *,
    before_retry: Callable[[], str | None] = lambda: None,
    without: Collection[str] = (),
) -> str:
    """Run the command and return its output.

    Args:
        command: Name and arguments, no shell.
        patience: Deadlines.
        before_retry: Called after a failure that may pass, the last one too; a text is taken as
            the answer, for commands that may have done their work although they failed.
        without: Names of environment variables that it shall not see.

    Raises:
        SlurmMissingError: The command is not installed.
        SlurmUnreachableError: Only passing failures until the patience was over.
        SlurmRefusedError: Any other failure.
    """
    begun, pause = time.monotonic(), patience.first_pause_seconds
    while True:
        try:
            return _ask_once(command, patience.answer_seconds, without)
        except SlurmUnreachableError:
            over = time.monotonic() + pause - begun > patience.total_seconds
            if not over:
                time.sleep(pause)
                pause = min(2.0 * pause, _LONGEST_PAUSE_SECONDS)
            if (answer := before_retry()) is not None:
                return answer
            if over:
                raise


def _ask_once(command: Sequence[str], deadline_seconds: float, without: Collection[str]) -> str:
    name = command[0]
    seen = {key: value for key, value in os.environ.items() if key not in without}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline_seconds,
            check=False,
            env=environment_for(name, seen),
        )
    except FileNotFoundError:
        raise SlurmMissingError(
            f"`{name}` is not installed here: run this where Slurm's commands are, e.g. on a login "
            "node, or make them visible inside the container"
        ) from None
    except OSError as error:
        raise SlurmMissingError(f"`{name}` cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise SlurmUnreachableError(
            f"`{name}` gave no answer in {deadline_seconds:g} s; Slurm's controller may be busy or "
            "down"
        ) from None
    if done.returncode == 0:
        return done.stdout
    words = said(done.stderr or done.stdout) or f"exit code {done.returncode}"
    if passes(words):
        raise SlurmUnreachableError(f"`{name}` could not reach Slurm's controller: {words}")
    raise SlurmRefusedError(f"`{name}` was refused: {words}")


def passes(words: str) -> bool:
    """True if a failure with these words may be over in a moment."""
    plain = words.lower()
    return any(item in plain for item in _PASSING) and not any(
        item in plain for item in _NOT_PASSING
    )


def said(errors: str) -> str:
    """Slurm's own words in one line, without the names of programs and the word "error"."""
    # "sbatch: error: Batch job submission failed: Invalid partition name specified"
    lines = [re.sub(r"^(?:[\w.]+: \s*)+", "", line.strip()) for line in errors.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line))


def environment_for(command: str, environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without what would change the meaning of the command or its output.

    Times are asked for as seconds since the epoch, and messages in English.
    """
    submits = command == "sbatch"
    kept = {
        name: value
        for name, value in environment.items()
        if not name.startswith(_OF_THE_VIEW)
        and not (submits and name.startswith(_OF_THE_JOB) and name not in _OF_THE_SITE)
    }
    kept |= {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
    if submits:
        del kept["SLURM_TIME_FORMAT"]
    return kept


_NO_VALUES = (float(2**32 - 2), float(2**64 - 2))
_INFINITE = 2**32 - 1


def number(value: Any) -> float | None:
    """A number as Slurm writes it in text and JSON: infinity, or None where it is not set.

    Up to 22.05 a number in JSON is a number, with 0 or 2**32 - 2 for "not set"; from 23.02 it is a
    table ``{"set": true, "infinite": false, "number": 60}``.
    """
    if isinstance(value, dict):
        if value.get("infinite"):
            return math.inf
        return number(value.get("number")) if value.get("set", True) else None
    try:
        found = None if value is None or isinstance(value, bool) else float(value)
    except ValueError:
        return None
    if found is None or found in _NO_VALUES:
        return None
    return math.inf if found == _INFINITE else found


def moment(value: Any) -> float | None:
    """Seconds since the epoch; None for 0, which Slurm writes for "not known"."""
    found = number(value)
    return None if not found or math.isinf(found) else found


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
_FLAGS = {"COMPLETING", "CONFIGURING", "STAGE_OUT", "RESIZING", "REQUEUED", "SIGNALING"}


def state_of(words: Iterable[str]) -> str:
    """One word for a state with flags, such as ``CANCELLED by 1000`` or ``CANCELLED COMPLETING``.

    A job that is being taken down is in the state that it will end in.
    """
    found = [part for word in words for part in word.upper().replace("+", " ").split()]
    base = [part for part in found if part in (PENDING | RUNNING | ENDED) - _FLAGS]
    flags = [part for part in found if part in _FLAGS]
    return next(iter([*base, *flags, *found]), "")


def is_live(state: str) -> bool:
    """True if a job in this state has processes, or may still have some."""
    return state in RUNNING


def is_waiting(state: str) -> bool:
    """True if it has yet to start."""
    return state in PENDING


def has_ended(state: str) -> bool:
    """True if it will never run again."""
    return state in ENDED


_QUEUE_FIELDS = ("%i", "%T", "%D", "%l", "%V", "%S", "%e", "%Q", "%r", "%k")


@dataclass(frozen=True)
class QueuedJob:
    """One job that waits, runs or has just ended.

    Attributes:
        identity: Job number as squeue shows it, ``7`` or ``7_2`` or ``7_[3-9]``.
        state: One word, see `state_of`.
        nodes: Allocated, or asked for.
        limit_seconds: Its time limit; infinity without one, None where it is not known.
        submitted: Seconds since the epoch, like `starts` and `ends`; None where not known.
        starts: When it started, or Slurm's own guess.
        ends: By its limit.
        priority: Slurm's figure; higher goes first.
        reason: Why it waits.
        comment: What it was submitted with.
    """

    identity: str
    state: str
    nodes: int
    limit_seconds: float | None = None
    submitted: float | None = None
    starts: float | None = None
    ends: float | None = None
    priority: float | None = None
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
    """Jobs in the output of ``squeue --noheader`` with `_QUEUE_FIELDS`; no other lines."""
    found = []
    for line in text.splitlines():
        fields = line.split(SEPARATOR)
        if len(fields) != len(_QUEUE_FIELDS):
            continue
        identity, state, nodes, limit, *times, priority, reason, comment = fields
        digits = re.match(r"\d*", nodes.strip())
        asked = (state_of([state]), int((digits and digits[0]) or 0), shown_seconds(limit))
        submitted, starts, ends = map(moment, times)
        why = (reason, "" if comment == "(null)" else comment)
        found.append(QueuedJob(identity, *asked, submitted, starts, ends, number(priority), *why))
    return found


def queued(
    jobs: Sequence[str] = (),
    *,
    partitions: Sequence[str] = (),
    ended_too: bool = True,
    patience: Patience = PATIENT,
) -> list[QueuedJob]:
    """The queue now: this user's jobs, those of some numbers, or everybody's in some partitions.

    Args:
        jobs: Only these numbers; those that Slurm has forgotten are missing in the answer.
        partitions: Everybody's jobs in these.
        ended_too: Also those that ended so shortly ago that Slurm still knows them.
        patience: Deadlines of the command.

    Raises:
        SlurmMissingError: There is no squeue.
        SlurmUnreachableError: The controller does not answer.
        SlurmRefusedError: For anything but a job that is forgotten.
    """
    command = ["squeue", "--noheader", f"--format={SEPARATOR.join(_QUEUE_FIELDS)}"]
    command += ["--states=all"] if ended_too else []
    command += [f"--jobs={','.join(jobs)}"] if jobs else []
    command += [f"--partition={','.join(partitions)}"] if partitions else []
    command += [] if jobs or partitions else ["--me"]
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


@dataclass(frozen=True)
class EndedJob:
    """One record of accounting; a requeued job has several.

    Attributes:
        identity: Job number, with its place in an array.
        state: One word, see `state_of`.
        elapsed_seconds: From its start; None where not known.
    """

    identity: str
    state: str
    elapsed_seconds: float | None


_HISTORY_FIELDS = ("JobID", "State", "Elapsed")


def history_from_text(text: str) -> list[EndedJob]:
    """Records in the output of ``sacct --noheader`` with `_HISTORY_FIELDS`."""
    rows = [line.split(SEPARATOR) for line in text.splitlines()]
    return [
        EndedJob(row[0], state_of(row[1].split()), shown_seconds(row[2]))
        for row in rows
        if len(row) == len(_HISTORY_FIELDS)
    ]


def history_of(jobs: Sequence[str]) -> list[EndedJob]:
    """Accounting records of these jobs; none where there is no accounting or it is late."""
    command = ["sacct", "--allocations", "--duplicates", "--noheader", "--parsable2"]
    command += [f"--delimiter={SEPARATOR}", f"--format={','.join(_HISTORY_FIELDS)}"]
    try:
        return history_from_text(ask([*command, f"--jobs={','.join(jobs)}"], IMPATIENT))
    except NO_ANSWER:
        return []


def state_now(job: str, patience: Patience = PATIENT, *, of_processes: bool = False) -> str | None:
    """The state of one job, as one word; None where nobody knows.

    A job that is being taken down counts as what it will end in, as far as Slurm says so.

    Args:
        job: Its number.
        patience: Deadlines of squeue.
        of_processes: Whether such a job is COMPLETING instead, since it may have processes still.

    Raises:
        SlurmUnreachableError: The controller does not answer, so nothing can be said.
    """

    def says(state: str) -> bool:
        return bool(state) and (of_processes or state != "COMPLETING")

    state = ""
    try:
        states = [item.state for item in queued([job], patience=patience)]
        state = states[-1] if states else ""
    except SlurmMissingError:
        pass
    if says(state):
        return state
    try:
        text = ask(["scontrol", "--oneliner", "show", "job", job], IMPATIENT)
    except NO_ANSWER:
        text = ""
    shown = [word.partition("=")[2] for word in text.split() if word.startswith("JobState=")]
    if says(last := state_of(shown[-1:])):
        return last
    records = history_of([job])
    if records and (has_ended(records[-1].state) or not state):
        return records[-1].state
    return state or None


# Partition, availability, time limit, nodes as allocated/idle/other/total, preemption, default.
_PARTITION_FIELDS = ("%R", "%a", "%l", "%F", "%M", "%P")


@dataclass(frozen=True)
class Partition:
    """One partition.

    Attributes:
        name: As in ``--partition``.
        is_default: Whether jobs without a partition go there.
        limit_seconds: Longest time limit; infinity without one.
        nodes: How many it has, and how many of them do nothing now.
        idle_nodes: See `nodes`.
        preempts: What happens to jobs that others push out: ``OFF``, ``CANCEL``, ``REQUEUE``, ...
        most_nodes: Most that one job may have.
        qos: The partition's own quality of service, or an empty text.
    """

    name: str
    is_default: bool
    limit_seconds: float
    nodes: int
    idle_nodes: int
    preempts: str = "OFF"
    most_nodes: int | None = None
    qos: str = ""


def partitions_from_text(sinfo: str, scontrol: str = "") -> list[Partition]:
    """Partitions as two commands print them.

    Args:
        sinfo: Output of ``sinfo --noheader`` with `_PARTITION_FIELDS`. It has a line for each group
            of nodes that differ in what was asked for; groups of one partition are added up.
        scontrol: Output of ``scontrol --oneliner show partition``.
    """
    found: dict[str, Partition] = {}
    for line in sinfo.splitlines():
        fields = line.split(SEPARATOR)
        counts = fields[3].split("/") if len(fields) == len(_PARTITION_FIELDS) else []
        if len(counts) != 4:
            continue
        name, _, limit, _, preempts, marked = fields
        _, idle, _, total = map(_count, counts)
        before = found.get(name)
        if before is not None:
            idle, total = before.idle_nodes + idle, before.nodes + total
            found[name] = replace(before, nodes=total, idle_nodes=idle)
            continue
        seconds = shown_seconds(limit)
        longest = math.inf if seconds is None else seconds
        default = marked.endswith("*")
        found[name] = Partition(name, default, longest, total, idle, preempts.upper())
    for line in scontrol.splitlines():
        table = dict(word.split("=", 1) for word in line.split() if "=" in word)
        before = found.get(table.get("PartitionName", ""))
        if before is None:
            continue
        limited, most, qos = (table.get(key, "") for key in ("MaxTime", "MaxNodes", "QoS"))
        seconds = shown_seconds(limited)
        found[before.name] = replace(
            before,
            limit_seconds=before.limit_seconds if seconds is None else seconds,
            most_nodes=_whole(most),
            preempts=table.get("PreemptMode", before.preempts).upper(),
            qos="" if qos == "N/A" else qos,
            is_default=table.get("Default", "").upper() == "YES" or before.is_default,
        )
    return list(found.values())


def _count(text: str) -> int:
    """A count, which may be written as 4K for 4096."""
    text = text.strip()
    if text[-1:].upper() == "K":
        return round(float(text[:-1]) * 1024)
    return _whole(text) or 0


def _whole(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def partitions_now() -> list[Partition]:
    """All partitions that this user may see.

    Raises:
        ClusterError: sinfo is missing, refused or gives no answer.
    """
    # -e: groups by limit; -a would also show partitions that one may not use.
    sinfo = ask(["sinfo", "--noheader", f"--format={SEPARATOR.join(_PARTITION_FIELDS)}"])
    try:
        scontrol = ask(["scontrol", "--oneliner", "show", "partition"])
    except NO_ANSWER:
        scontrol = ""
    return partitions_from_text(sinfo, scontrol)


def chosen_partitions(partitions: Sequence[Partition], wanted: str) -> list[Partition]:
    """Those named in `wanted` (separated by commas), or the default one.

    Raises:
        ClusterError: A name is unknown, or no partition is the default.
    """
    known = {partition.name: partition for partition in partitions}
    if not wanted:
        found = [partition for partition in partitions if partition.is_default]
        if not found:
            raise ClusterError(
                f"slurm.partition is empty and this cluster has no default partition: name one of "
                f"{', '.join(known)}"
            )
        return found
    missing = [name for name in wanted.split(",") if name not in known]
    if missing:
        raise ClusterError(
            f'slurm.partition = "{wanted}" names {missing[0]}, which is not among the partitions '
            f"of this cluster: {', '.join(known)}"
        )
    return [known[name] for name in wanted.split(",")]


_QOS_FIELDS = ("Name", "MaxWall", "MaxSubmitPU", "MaxTRESPJ")


@dataclass(frozen=True)
class SiteLimits:
    """Limits of a site, or of a quality of service (QoS), on a job; None: no limit known.

    Attributes:
        limit_seconds: Longest time limit.
        nodes: Most nodes of one job.
        submitted_jobs: Most jobs of one user, waiting and running.
        array_size: Most places in an array (places are below it).
        preemptible: Whether others can push jobs out there.
        known: Whether the cluster could be asked at all.
    """

    limit_seconds: float | None = None
    nodes: int | None = None
    submitted_jobs: int | None = None
    array_size: int | None = None
    preemptible: bool = False
    known: bool = True


UNKNOWN_SITE = SiteLimits(known=False)


def qualities_from_text(text: str) -> dict[str, SiteLimits]:
    """QoS by name in the output of ``sacctmgr --parsable2 --noheader show qos``."""
    found = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) == len(_QOS_FIELDS):
            name, wall, submitted, resources = fields
            nodes = re.search(r"(?:^|,)node=(\d+)", resources)
            most = int(nodes[1]) if nodes else None
            found[name] = SiteLimits(shown_seconds(wall), most, _whole(submitted))
    return found


def limits_of(
    partitions: Sequence[Partition], quality: SiteLimits | None, array_size: int | None = None
) -> SiteLimits:
    """The limits of a job that may start in any of `partitions`, with a given QoS.

    A job is only taken if each of its partitions could hold it, so the smallest counts.
    """
    quality = quality or SiteLimits()
    times = [*(partition.limit_seconds for partition in partitions), quality.limit_seconds]
    sizes = (min(item.most_nodes or item.nodes, item.nodes) for item in partitions)
    nodes = [*sizes, quality.nodes]
    return SiteLimits(
        min((seconds for seconds in times if seconds is not None), default=None),
        min((count for count in nodes if count is not None), default=None),
        quality.submitted_jobs,
        array_size,
        preemptible=any(partition.preempts not in ("OFF", "") for partition in partitions),
    )


def quality_now(name: str) -> SiteLimits | None:
    """The QoS of this name; None where accounting cannot be asked or does not know it."""
    command = ["sacctmgr", "--parsable2", "--noheader", "show", "qos", name]
    try:
        text = ask([*command, f"format={','.join(_QOS_FIELDS)}"], IMPATIENT)
    except NO_ANSWER:
        return None
    return qualities_from_text(text).get(name)


def array_size_now() -> int | None:
    """The cluster's MaxArraySize; None where there is no scontrol."""
    try:
        text = ask(["scontrol", "show", "config"], IMPATIENT)
    except NO_ANSWER:
        return None
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else None


def site_of(partition: str, qos: str, *, array: bool = False) -> SiteLimits:
    """Ask the cluster for its limits; a machine without sinfo gives `UNKNOWN_SITE`.

    Args:
        partition: One, several separated by commas, or empty for the default.
        qos: Empty for the partition's own.
        array: Whether the size of arrays matters.

    Raises:
        ClusterError: The partition is unknown, or the controller does not answer.
    """
    try:
        partitions = chosen_partitions(partitions_now(), partition)
    except (SlurmMissingError, SlurmRefusedError):
        return UNKNOWN_SITE
    name = qos or next((partition.qos for partition in partitions if partition.qos), "")
    quality = quality_now(name) if name else None
    return limits_of(partitions, quality, array_size_now() if array else None)


def hosts_in(node_list: str) -> list[str]:
    """Names in a node list such as ``gpu[03-05,7],login``, without asking scontrol."""
    # Commas inside of brackets separate numbers.
    parts = re.split(r",(?![^\[]*\])", node_list)
    return [host for part in parts if part for host in _expanded(part)]


def _expanded(part: str) -> list[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, tail = rest.partition("]")
    found = []
    for span in inside.split(","):
        first, dash, last = span.partition("-")
        numbers = range(int(first), int(last) + 1) if dash else ()
        found += [str(index).zfill(len(first)) for index in numbers] or [first]
    # A name may have several brackets, as in rack[1-2]n[1-4].
    return [f"{head}{index}{end}" for index in found for end in _expanded(tail)]
