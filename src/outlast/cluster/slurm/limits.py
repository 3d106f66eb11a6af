"""What a site allows: of time, of nodes, of jobs at once, of places in an array.

Each figure is None where the site does not say, or has no command that would.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.cluster.durations import duration_text, shown_seconds
from outlast.cluster.slurm.commands import (
    IMPATIENT,
    SlurmMissingError,
    SlurmRefusedError,
    SlurmUnreachableError,
    ask,
)
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.cluster.slurm.nodes import Partition

SEPARATOR = "\x1f"
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
    """What a job in given partitions with a given QoS may ask for; None: no limit known.

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
