"""The Standard Workload Format of the Parallel Workloads Archive, version 2.2.

Chapin et al., "Benchmarks and standards for the evaluation of parallel job schedulers" (JSSPP
1999). A line has 18 numbers, -1 for "not known"; comments begin with a semicolon and some of them
say what the machine was. Users, groups and programs are not read.
"""

from __future__ import annotations

import gzip
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from outlast.cluster.workload.jobs import Workload
from outlast.cluster.workload.records import Record, workload_of
from outlast.errors import ClusterError

_FIELDS = 18
_SUBMIT, _WAIT, _RUN, _PROCESSORS, _ASKED_PROCESSORS, _ASKED_SECONDS, _STATUS = 1, 2, 3, 4, 7, 8, 10
_PARTIAL = {2, 3, 4}
"""Status of a piece of a job that was swapped out; the whole job has a line of its own."""
_HEADER = re.compile(r";\s*(MaxNodes|MaxProcs)\s*:\s*(\d+)")


def read_swf(
    path: str | Path, *, processors_per_node: int | None = None, nodes: int | None = None
) -> Workload:
    """The jobs of a log that ran, also those that failed or were cancelled while they ran.

    Args:
        path: The file, as text or gzip.
        processors_per_node: A job holds its processors, rounded up to whole nodes of so many; None
            for the header's MaxProcs / MaxNodes, 1 without them.
        nodes: Of the machine; None for the header's.

    Raises:
        ClusterError: The file cannot be read, or a line is no job.
    """
    path = Path(path)
    header: dict[str, int] = {}
    skipped: Counter[str] = Counter()
    jobs = list(_jobs(path, header, skipped))
    per_node = processors_per_node or _per_node(header)
    if per_node < 1:
        raise ClusterError(f"processors_per_node = {per_node} must be at least 1")
    if nodes is None and header:
        nodes = header["MaxProcs"] // per_node if "MaxProcs" in header else header["MaxNodes"]
    records = (
        Record(
            submitted=fields[_SUBMIT],
            started=fields[_SUBMIT] + max(0.0, fields[_WAIT]),
            nodes=-(-_processors(fields) // per_node) or None,
            limit_seconds=fields[_ASKED_SECONDS] if fields[_ASKED_SECONDS] > 0 else None,
            run_seconds=fields[_RUN],
        )
        for fields in jobs
    )
    return workload_of(records, machine_nodes=nodes, name=path.name, skipped=skipped)


def _jobs(path: Path, header: dict[str, int], skipped: Counter[str]) -> Iterator[list[float]]:
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            for number, line in enumerate(lines, 1):
                if found := _HEADER.match(line):
                    header[found[1]] = int(found[2])
                text = line.partition(";")[0].split()
                if not text:
                    continue
                fields = _numbers(text, path, number)
                if fields[_STATUS] in _PARTIAL:
                    skipped["that are pieces of others"] += 1
                else:
                    yield fields
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"{path} cannot be read as a log: {error}") from None


def _numbers(text: list[str], path: Path, number: int) -> list[float]:
    try:
        fields = [float(character) for character in text]
    except ValueError:
        fields = []
    if len(fields) < _FIELDS:
        raise ClusterError(
            f"{path}, line {number}: a job in the Standard Workload Format has {_FIELDS} numbers"
        )
    return fields


def _processors(fields: list[float]) -> int:
    held = fields[_PROCESSORS] if fields[_PROCESSORS] > 0 else fields[_ASKED_PROCESSORS]
    return max(0, int(held))


def _per_node(header: dict[str, int]) -> int:
    if "MaxProcs" in header and header.get("MaxNodes"):
        return max(1, header["MaxProcs"] // header["MaxNodes"])
    return 1
