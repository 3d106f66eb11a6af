"""Partitions as sinfo and scontrol describe them.

sinfo alone is enough; where scontrol is there (it is missing in many containers), it adds what only
it knows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outlast.cluster.durations import shown_seconds
from outlast.cluster.slurm.commands import (
    SlurmMissingError,
    SlurmRefusedError,
    SlurmUnreachableError,
    ask,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        found[name] = here if before is None else _together(before, here)
    return list(found.values())


def partitions_with(partitions: list[Partition], text: str) -> list[Partition]:
    """The same with what ``scontrol --oneliner show partition`` adds."""
    known = {table.get("PartitionName", ""): table for table in _tables(text)}
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
    hosts: list[str] = []
    for part in _split_outside(node_list):
        hosts += _expanded(part)
    return hosts


def _split_outside(text: str) -> list[str]:
    """Split at commas that stand outside of brackets."""
    parts, depth, begin = [], 0, 0
    for index, letter in enumerate(text):
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append(text[begin:index])
            begin = index + 1
    return [part for part in [*parts, text[begin:]] if part]


def _expanded(part: str) -> list[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, tail = rest.partition("]")
    found = []
    for tensor in inside.split(","):
        first, dash, last = tensor.partition("-")
        numbers = range(int(first), int(last) + 1) if dash else ()
        found += [str(index).zfill(len(first)) for index in numbers] or [first]
    # A name may have several brackets, as in rack[1-2]n[1-4].
    ends = _expanded(tail) if tail else [""]
    return [f"{head}{index}{end}" for index in found for end in ends]


def _together(first: Partition, second: Partition) -> Partition:
    return replace(
        first,
        nodes=first.nodes + second.nodes,
        idle_nodes=first.idle_nodes + second.idle_nodes,
    )


def _tables(text: str) -> list[dict[str, str]]:
    return [
        dict(word.split("=", 1) for word in line.split() if "=" in word)
        for line in text.splitlines()
        if line.strip()
    ]


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
