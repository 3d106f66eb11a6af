"""Jobs out of Slurm's accounting: asked now, or a file of ``sacct --parsable2`` or ``--json``.

    sacct -a -X -P -S 2026-01-01 -o JobID,Submit,Start,End,ElapsedRaw,TimelimitRaw,NNodes,State

Names of users, accounts and jobs may be in the file; they are not read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from outlast.cluster.durations import shown_seconds
from outlast.cluster.slurm.commands import Patience, ask
from outlast.cluster.slurm.history import history_from_json
from outlast.cluster.workload.jobs import Workload
from outlast.cluster.workload.records import Record, workload_of
from outlast.errors import ClusterError

_NEEDED = ("JobID", "Submit")
_FIELDS = "JobID,Submit,Start,End,ElapsedRaw,TimelimitRaw,NNodes,State"
RECENT_DAYS = 2
"""Of accounting that is asked now: enough jobs of a busy partition, and little work for it."""
_PATIENCE = Patience(answer_seconds=30.0, total_seconds=0.0)


def read_sacct(
    path: str | Path, *, nodes: int | None = None, partition: str | None = None
) -> Workload:
    """The jobs of an accounting file that ran, also those that failed while they ran.

    A requeued job has a record for each time that it ran, and counts as so many jobs.

    Args:
        path: Output of ``sacct --parsable2`` with its line of headings, or of ``sacct --json``.
        nodes: Of the machine; None for the most that were in use at once.
        partition: Only its jobs; needs the column Partition, so only text has it.

    Raises:
        ClusterError: The file cannot be read, lacks a column or has no job that ran.
    """
    path = Path(path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"{path} cannot be read as a log: {error}") from None
    return _read(text, path.name, nodes=nodes, partition=partition)


def recent_jobs(partitions: Sequence[str]) -> Workload | None:
    """Jobs of these partitions that ended in the last `RECENT_DAYS`, of all that one may see.

    Returns:
        None where accounting is missing, switched off, refused, slow, or has no job that ran.
    """
    command = ["sacct", "--allusers", "--allocations", "--duplicates", "--parsable2"]
    command += [f"--starttime=now-{RECENT_DAYS}days", f"--partition={','.join(partitions)}"]
    try:
        return _read(ask([*command, f"--format={_FIELDS}"], _PATIENCE), "accounting")
    except ClusterError:
        return None


def _read(
    text: str, name: str, *, nodes: int | None = None, partition: str | None = None
) -> Workload:
    skipped: Counter[str] = Counter()
    if text.lstrip().startswith("{"):
        if partition is not None:
            raise ClusterError("partition is read from sacct's text only, not from its JSON")
        records = _from_json(text)
    else:
        records = _from_text(text, name, partition, skipped)
    return workload_of(records, machine_nodes=nodes, name=name, skipped=skipped)


def _from_json(text: str) -> Iterator[Record]:
    for job in history_from_json(text):
        run = job.elapsed_seconds
        if run is None and job.started is not None and job.ended is not None:
            run = job.ended - job.started
        yield Record(
            submitted=job.submitted,
            started=job.started,
            nodes=job.nodes,
            limit_seconds=job.limit_seconds,
            run_seconds=run if job.ended else None,
        )


def _from_text(
    text: str, source: str, partition: str | None, skipped: Counter[str]
) -> Iterator[Record]:
    lines = iter(text.splitlines())
    names = next(lines, "").split("|")
    missing = [name for name in _needed(partition) if name not in names]
    missing += [
        " or ".join(group)
        for group in (("NNodes", "AllocNodes"), ("ElapsedRaw", "Elapsed"))
        if not any(member in names for member in group)
    ]
    if missing:
        raise ClusterError(
            f"{source}: its first line must name sacct's columns, parted by |; it lacks "
            f"{', '.join(missing)}"
        )
    for line in lines:
        if not line.strip():
            continue
        fields = dict(zip(names, line.split("|"), strict=False))
        if "." in fields["JobID"]:  # a step, part of its job's record
            continue
        if partition is not None and fields.get("Partition") != partition:
            skipped["of other partitions"] += 1
            continue
        yield _record(fields)


def _needed(partition: str | None) -> tuple[str, ...]:
    return _NEEDED if partition is None else (*_NEEDED, "Partition")


def _record(fields: dict[str, str]) -> Record:
    ended = _moment(fields.get("End"))
    run = _number(fields.get("ElapsedRaw"))
    if run is None:
        run = shown_seconds(fields.get("Elapsed", ""))
    minutes = _number(fields.get("TimelimitRaw"))
    limit = shown_seconds(fields.get("Timelimit", "")) if minutes is None else 60.0 * minutes
    nodes = _number(fields.get("AllocNodes")) or _number(fields.get("NNodes"))
    return Record(
        submitted=_moment(fields.get("Submit")),
        started=_moment(fields.get("Start")),
        nodes=None if nodes is None else int(nodes),
        limit_seconds=limit,
        run_seconds=None if "End" in fields and ended is None else run,
    )


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _moment(text: str | None) -> float | None:
    """Seconds; local times count as UTC, since only differences matter."""
    if text is None:
        return None
    if (seconds := _number(text)) is not None:
        return seconds
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
