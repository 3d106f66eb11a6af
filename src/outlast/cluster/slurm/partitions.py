"""Partitions as sinfo and scontrol describe them, and the limits of a site.

sinfo alone is enough; where scontrol is there (it is missing in many containers), it adds what only
it knows.

`Limits` are those of a site on time, nodes, jobs at once and places in an array. A figure is None
where the site does not say, or has no command that would.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outlast.cluster.slurm.commands import (
    IMPATIENT,
    SlurmMissingError,
    SlurmRefusedError,
    SlurmUnreachableError,
    ask,
)
from outlast.durations import duration_text, shown_seconds
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outlast.cluster.slurm.commands import Patience


SEPARATOR = "\x1f"

# Partition, availability, time limit, nodes as allocated/idle/other/total, preemption, default.
FIELDS = ("%R", "%a", "%l", "%F", "%M", "%P")
TEXT_FORMAT = SEPARATOR.join(FIELDS)


@dataclass(frozen=True)
class Partition:
    """One partition.

    Attributes:
        name: As in ``--partition``.
        up: Whether it takes jobs.
        is_default: Whether jobs without a partition go there.
        limit_seconds: Longest time limit; infinity without one.
        default_seconds: Limit of a job that asks for none; None where it is not known.
        nodes: How many it has, and how many of them do nothing now.
        idle_nodes: See `nodes`.
        most_nodes: Most that one job may have.
        preempts: What happens to jobs that others push out: ``OFF``, ``CANCEL``, ``REQUEUE``, ...
        qos: The partition's own quality of service, or an empty text.
    """

    name: str
    up: bool
    is_default: bool
    limit_seconds: float
    nodes: int
    idle_nodes: int
    preempts: str = "OFF"
    default_seconds: float | None = None
    most_nodes: int | None = None
    qos: str = ""


def partitions_from_text(text: str) -> list[Partition]:
    """Partitions in the output of ``sinfo --noheader --format`` with `TEXT_FORMAT`.

    sinfo prints a line for each group of nodes that differ in what was asked for; groups of one
    partition are added up.
    """
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        fields = line.split(SEPARATOR)
        counts = fields[3].split("/") if len(fields) == len(FIELDS) else []
        if len(counts) != 4:
            continue
        name, availability, limit, _, preempts, marked = fields
        _, idle, _, total = (_count(count) for count in counts)
        here = Partition(
            name=name,
            up=availability.lower() == "up",
            is_default=marked.endswith("*"),
            limit_seconds=_limit(limit),
            nodes=total,
            idle_nodes=idle,
            preempts=preempts.upper(),
        )
        before = found.get(name)
        found[name] = (
            here
            if before is None
            else replace(
                before,
                nodes=before.nodes + here.nodes,
                idle_nodes=before.idle_nodes + here.idle_nodes,
            )
        )
    return list(found.values())


def partitions_with(partitions: list[Partition], text: str) -> list[Partition]:
    """The same with what ``scontrol --oneliner show partition`` adds."""
    tables = (
        dict(word.split("=", 1) for word in line.split() if "=" in word)
        for line in text.splitlines()
    )
    known = {table.get("PartitionName", ""): table for table in tables}
    return [
        _with(partition, known[partition.name]) if partition.name in known else partition
        for partition in partitions
    ]


def partitions_now(patience: Patience | None = None) -> list[Partition]:
    """All partitions that this user may see.

    Raises:
        ClusterError: sinfo is missing, refused or gives no answer.
    """
    # -e: groups by limit; -a would also show partitions that one may not use.
    text = ask(["sinfo", "--noheader", f"--format={TEXT_FORMAT}"], patience)
    found = partitions_from_text(text)
    try:
        return partitions_with(found, ask(["scontrol", "--oneliner", "show", "partition"]))
    except (SlurmMissingError, SlurmRefusedError, SlurmUnreachableError):
        return found


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
    ends = _expanded(tail) if tail else [""]
    return [f"{head}{index}{end}" for index in found for end in ends]


def _with(partition: Partition, table: Mapping[str, str]) -> Partition:
    most = table.get("MaxNodes", "")
    qos = table.get("QoS", "")
    modes = table.get("PreemptMode", partition.preempts).upper()
    return replace(
        partition,
        limit_seconds=_limit(table.get("MaxTime", ""), partition.limit_seconds),
        default_seconds=shown_seconds(table.get("DefaultTime", "")),
        most_nodes=int(most) if most.isdigit() else None,
        preempts=modes,
        qos="" if qos in ("N/A", "") else qos,
        is_default=table.get("Default", "").upper() == "YES" or partition.is_default,
    )


def _limit(text: str, default: float = float("inf")) -> float:
    found = shown_seconds(text)
    return default if found is None else found


def _count(text: str) -> int:
    """A count, which may be written as 4K for 4096."""
    text = text.strip()
    if text[-1:].upper() == "K":
        return round(float(text[:-1]) * 1024)
    return int(text) if text.isdigit() else 0


_QOS_FIELDS = ("Name", "MaxWall", "MaxJobsPU", "MaxSubmitPU", "MaxTRESPJ")


@dataclass(frozen=True)
class Quality:
    """A quality of service (QoS).

    Attributes:
        limit_seconds: Longest time limit.
        running_jobs: Most that a user may have running.
        submitted_jobs: Most that a user may have waiting and running.
        nodes: Most that one job may have.
    """

    name: str
    limit_seconds: float | None = None
    running_jobs: int | None = None
    submitted_jobs: int | None = None
    nodes: int | None = None


@dataclass(frozen=True)
class Limits:
    """Limits of a job in given partitions with a given QoS; None: no limit known.

    Attributes:
        limit_seconds: Longest time limit.
        default_seconds: Limit of a job that asks for none.
        nodes: Most nodes of one job.
        submitted_jobs: Most jobs of one user, waiting and running.
        array_size: Most places in an array (places are below it).
    """

    limit_seconds: float | None = None
    default_seconds: float | None = None
    nodes: int | None = None
    submitted_jobs: int | None = None
    array_size: int | None = None


def qualities_from_text(text: str) -> dict[str, Quality]:
    """QoS by name in the output of ``sacctmgr --parsable2 --noheader show qos``."""
    found = {}
    for line in text.splitlines():
        fields = line.split(SEPARATOR)
        if len(fields) == len(_QOS_FIELDS):
            name, wall, running, submitted, resources = fields
            nodes = re.search(r"(?:^|,)node=(\d+)", resources)
            found[name] = Quality(
                name,
                shown_seconds(wall),
                _whole(running),
                _whole(submitted),
                int(nodes[1]) if nodes else None,
            )
    return found


def array_size_from_text(text: str) -> int | None:
    """MaxArraySize in the output of ``scontrol show config``."""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else None


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


def limits_of(partitions: Sequence[Partition], quality: Quality | None = None) -> Limits:
    """The limits of a job that may start in any of `partitions`.

    A job is only taken if each of its partitions could hold it, so the smallest counts.
    """
    time_limits = [partition.limit_seconds for partition in partitions]
    nodes = [
        min(partition.most_nodes or partition.nodes, partition.nodes) for partition in partitions
    ]
    if quality is not None:
        time_limits += [] if quality.limit_seconds is None else [quality.limit_seconds]
        nodes += [] if quality.nodes is None else [quality.nodes]
    defaults = [
        partition.default_seconds
        for partition in partitions
        if partition.default_seconds is not None
    ]
    return Limits(
        limit_seconds=min(time_limits, default=None),
        default_seconds=min(defaults, default=None),
        nodes=min(nodes, default=None),
        submitted_jobs=None if quality is None else quality.submitted_jobs,
    )


def quality_now(name: str) -> Quality | None:
    """The QoS of this name; None where accounting cannot be asked or does not know it."""
    command = [
        "sacctmgr",
        "--parsable2",
        "--noheader",
        "show",
        "qos",
        name,
        f"format={','.join(_QOS_FIELDS)}",
    ]
    try:
        return qualities_from_text(ask(command, IMPATIENT).replace("|", SEPARATOR)).get(name)
    except (SlurmMissingError, SlurmRefusedError, SlurmUnreachableError):
        return None


def array_size_now() -> int | None:
    """The cluster's MaxArraySize; None where there is no scontrol."""
    try:
        return array_size_from_text(ask(["scontrol", "show", "config"], IMPATIENT))
    except (SlurmMissingError, SlurmRefusedError, SlurmUnreachableError):
        return None


def check_request(
    limits: Limits, *, limit_seconds: float, nodes: Sequence[int], jobs: int, kind: str
) -> None:
    """Refuse what Slurm would refuse, or leave waiting for ever.

    Args:
        limits: Of the job's partitions and QoS.
        limit_seconds: Time limit of a link.
        nodes: Of each kind of link.
        jobs: How many are in the queue at once.
        kind: Of the chain.

    Raises:
        ClusterError: With the setting, its value and the limit.
    """
    if limits.limit_seconds is not None and limit_seconds > limits.limit_seconds:
        raise ClusterError(
            f"slurm.wall_time = {duration_text(limit_seconds)} is more than the "
            f"{duration_text(limits.limit_seconds)} that the partition or QoS allows: ask for no "
            "more, the chain goes on with another link"
        )
    if limits.nodes is not None and max(nodes) > limits.nodes:
        raise ClusterError(
            f"slurm.nodes = {max(nodes)} is more than the {limits.nodes} nodes that one job may "
            "have there"
        )
    if limits.submitted_jobs is not None and jobs > limits.submitted_jobs:
        remedy = (
            "choose another slurm.qos, or set slurm.links = 1 and submit again after each link"
            if kind == "dependent"
            else 'lower slurm.links, or set slurm.chain = "dependent", which needs two'
        )
        raise ClusterError(
            f"{jobs} jobs at once are more than the {limits.submitted_jobs} that the QoS lets a "
            f"user submit: {remedy}"
        )
    if kind == "array" and limits.array_size is not None and jobs > limits.array_size:
        raise ClusterError(
            f"slurm.links = {jobs} is more than the {limits.array_size} places of an array here "
            "(MaxArraySize): lower it"
        )


def _whole(text: str) -> int | None:
    return int(text) if text.isdigit() else None
