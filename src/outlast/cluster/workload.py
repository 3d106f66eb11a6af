"""Jobs of a log or of a generator, as arrays sorted by submission.

Logs come from Slurm's accounting (asked now, or a file of ``sacct --parsable2`` or ``--json``)

    sacct -a -X -P -S 2026-01-01 -o JobID,Submit,Start,End,ElapsedRaw,TimelimitRaw,NNodes,State

or from the Parallel Workloads Archive, in the Standard Workload Format 2.2 (Chapin et al.,
"Benchmarks and standards for the evaluation of parallel job schedulers", JSSPP 1999): a line has 18
numbers, -1 for "not known"; comments begin with a semicolon and some of them say what the machine
was. Names of users, accounts, programs and jobs may be in the files; they are not read.

For machines whose logs cannot be had there is a published model (Lublin and Feitelson, "The
workload on parallel supercomputers: modeling the characteristics of rigid jobs", J. Parallel
Distrib. Comput. 63, 2003). Sizes: serial, a power of two or neither, with two-stage uniform
logarithms. Run times: hyper-gamma logarithms, whose mixture leans to the longer part for larger
jobs. Arrivals: gamma logarithms of the gaps at rush hours, stretched by a daily cycle. Requested
times are no part of that model; here they over-estimate as users do (Tsafrir, Etsion and Feitelson,
"Modeling user runtime estimates using scheduling simulations", JSSPP 2005): run time over request
is uniform, some jobs run into their limit, and requests are round figures.
"""

from __future__ import annotations

import gzip
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outlast.cluster.slurm import Patience, ask, moment, number
from outlast.durations import shown_seconds
from outlast.errors import ClusterError
from outlast.extras import require
from outlast.paths import check_regular, read_text
from outlast.records.lease import json_object

Array = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Workload:
    """Jobs submitted to a machine, with their real run times.

    Attributes:
        submit_seconds: (jobs,) when each was submitted; the origin is the log's own. Given in any
            order, all columns are sorted by it; jobs of one second keep their order.
        nodes: (jobs,) whole nodes that each held.
        limit_seconds: (jobs,) the wall time that its user asked for.
        run_seconds: (jobs,) how long its program runs if nothing stops it; beyond the limit where
            the log says that the limit ended it.
        machine_nodes: Size of the machine that the log is of.
        priority: (jobs,) what the site adds to each job's priority; None means 0.
        tier: (jobs,) priority tier of each job's partition; None means 0.
        start_seconds: (jobs,) when each really started; None where the log does not say, and for
            jobs whose arrivals were moved.
        name: Of the log, for tables.
        notes: What was left out or assumed when the log was read, one sentence each.
    """

    submit_seconds: Array
    nodes: Integers
    limit_seconds: Array
    run_seconds: Array
    machine_nodes: int
    priority: Array | None = None
    tier: Integers | None = None
    start_seconds: Array | None = None
    name: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Make arrays of plain sequences, sort them, and refuse what no machine could run."""
        columns = {
            name: np.asarray(value, kind)
            for name, kind in _COLUMN_TYPES.items()
            if (value := getattr(self, name)) is not None
        }
        problems = list(self._problems(columns))
        if problems:
            raise ClusterError(f"workload {self.name!r}: " + "; ".join(problems))
        submits = columns["submit_seconds"]
        order: Integers | slice = slice(None)
        if np.any(np.diff(submits) < 0):
            order = np.argsort(submits, kind="stable")
        for name, column in columns.items():
            object.__setattr__(self, name, column[order])

    def _problems(self, columns: dict[str, npt.NDArray[Any]]) -> Iterator[str]:
        if len({len(column) for column in columns.values()}) > 1:
            yield "its arrays differ in length"
            return
        if self.machine_nodes < 1:
            yield f"machine_nodes = {self.machine_nodes} must be at least 1"
            return
        if not np.all(np.isfinite(columns["submit_seconds"])):
            yield "submit_seconds must be finite"
        if np.any(columns["nodes"] < 1) or np.any(columns["nodes"] > self.machine_nodes):
            yield f"nodes must lie in 1 to machine_nodes = {self.machine_nodes}"
        if not np.all(columns["limit_seconds"] > 0):
            yield "limit_seconds must be above 0"
        if not np.all(columns["run_seconds"] >= 0):
            yield "run_seconds must not be below 0"

    def __len__(self) -> int:
        return len(self.submit_seconds)

    @property
    def node_seconds(self) -> float:
        """Work in the log: nodes times the seconds that each job held them."""
        return float(np.sum(self.nodes * np.minimum(self.run_seconds, self.limit_seconds)))

    @property
    def load(self) -> float:
        """Work submitted per second of arrivals and node: 1 is all that the machine can do."""
        span = float(self.submit_seconds[-1] - self.submit_seconds[0]) if len(self) else 0.0
        return self.node_seconds / (span * self.machine_nodes) if span > 0 else 0.0

    def at_load(self, load: float) -> Workload:
        """The same jobs with arrivals stretched or compressed to a load."""
        if not load > 0:
            raise ClusterError(f"load = {load:g} must be above 0")
        if self.load == 0:
            raise ClusterError(f"workload {self.name!r} has no load to scale: it needs two jobs")
        first = self.submit_seconds[0]
        stretched = first + (self.submit_seconds - first) * (self.load / load)
        return replace(self, submit_seconds=stretched, start_seconds=None)

    def chosen(self, jobs: npt.NDArray[np.bool_] | Integers | slice) -> Workload:
        """Some of the jobs, by a mask, by ascending indices or by a slice."""
        columns: dict[str, Any] = {name: getattr(self, name) for name in _COLUMN_TYPES}
        taken = {name: column[jobs] for name, column in columns.items() if column is not None}
        return replace(self, **taken)


_COLUMN_TYPES = {
    "submit_seconds": np.float64,
    "nodes": np.int64,
    "limit_seconds": np.float64,
    "run_seconds": np.float64,
    "priority": np.float64,
    "tier": np.int64,
    "start_seconds": np.float64,
}


def busiest(starts: Array, runs: Array, nodes: Integers) -> int:
    """Most nodes that were in use at once, by start times: the least size of the log's machine."""
    times = np.concatenate((starts, starts + runs))
    changes = np.concatenate((nodes, -nodes))
    # What ends at one second gives its nodes to what starts at it.
    order = np.lexsort((changes, times))
    return int(np.cumsum(changes[order]).max(initial=0))


@dataclass(frozen=True, slots=True)
class Record:
    """One job of a log; None where the log does not say.

    Attributes:
        submitted, started: Seconds.
        nodes: That it held.
        limit_seconds: Asked for; infinity without a limit.
        run_seconds: That it held them.
    """

    submitted: float | None
    started: float | None
    nodes: int | None
    limit_seconds: float | None
    run_seconds: float | None


def workload_of(
    records: Iterable[Record], *, machine_nodes: int | None, name: str, skipped: Counter[str]
) -> Workload:
    """The jobs that ran, as a workload.

    Args:
        records: In any order.
        machine_nodes: Size of the machine; None for the most nodes that the log shows in use.
        name: Of the log.
        skipped: Jobs that the reader left out, by reason.

    Raises:
        ClusterError: No job is left.
    """
    kept: list[tuple[float, float, int, float, float]] = []
    no_limit, starts_known = 0, True
    for record in records:
        if record.submitted is None or not record.nodes or record.nodes < 1:
            skipped["without submission or nodes"] += 1
        elif record.run_seconds is None or record.run_seconds <= 0:
            skipped["that never ran, or still do"] += 1
        elif machine_nodes is not None and record.nodes > machine_nodes:
            skipped[f"larger than the machine's {machine_nodes} nodes"] += 1
        else:
            limit = record.limit_seconds
            if limit is None or limit <= 0 or limit == np.inf:
                no_limit += 1
                limit = 0.0
            starts_known = starts_known and record.started is not None
            started = record.submitted if record.started is None else record.started
            kept.append((record.submitted, started, record.nodes, limit, record.run_seconds))
    if not kept:
        raise ClusterError(f"{name}: no job in it ran" + "".join(_words(skipped)))
    submits, starts, nodes, limits, runs = map(np.array, zip(*kept, strict=True))
    notes = [sentence.strip() for sentence in _words(skipped)]
    if no_limit:
        longest = float(max(limits.max(), runs.max()))
        limits = np.where(limits > 0, limits, longest)
        notes.append(
            f"{no_limit} jobs without a limit count as if they had asked for {longest:.0f} s, the "
            "longest in the log"
        )
    if machine_nodes is None:
        machine_nodes = max(busiest(starts, runs, nodes), int(nodes.max()))
        notes.append(f"the machine counts as {machine_nodes} nodes, the most in use at once")
    return Workload(
        submits,
        nodes,
        limits,
        runs,
        machine_nodes,
        start_seconds=starts if starts_known else None,
        name=name,
        notes=tuple(notes),
    )


def _words(skipped: Counter[str]) -> list[str]:
    return [f" {count} jobs {why} are left out" for why, count in sorted(skipped.items()) if count]


_NEEDED = (("JobID",), ("Submit",), ("NNodes", "AllocNodes"), ("ElapsedRaw", "Elapsed"))
_SACCT_FIELDS = "JobID,Submit,Start,End,ElapsedRaw,TimelimitRaw,NNodes,State"
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
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ClusterError(f"{path} cannot be read as a log: {reason}; give another") from None
    return _read(text, path.name, nodes=nodes, partition=partition)


def recent_jobs(partitions: Sequence[str]) -> Workload | None:
    """Jobs of these partitions that ended in the last `RECENT_DAYS`, of all that one may see.

    Returns:
        None where accounting is missing, switched off, refused, slow, or has no job that ran.
    """
    command = ["sacct", "--allusers", "--allocations", "--duplicates", "--parsable2"]
    command += [f"--starttime=now-{RECENT_DAYS}days", f"--partition={','.join(partitions)}"]
    try:
        return _read(ask([*command, f"--format={_SACCT_FIELDS}"], _PATIENCE), "accounting")
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
    """Jobs of ``sacct --json``, which differs between Slurm's versions; see `number`."""
    jobs = json_object(text.encode()).get("jobs")
    for job in (job for job in jobs or () if isinstance(job, dict)):
        times = job.get("time") or {}
        started, ended = moment(times.get("start")), moment(times.get("end"))
        run, minutes = number(times.get("elapsed")), number(times.get("limit"))
        if run is None and started is not None and ended is not None:
            run = ended - started
        yield Record(
            submitted=moment(times.get("submission")),
            started=started,
            nodes=int(number(job.get("allocation_nodes")) or 0),
            limit_seconds=None if minutes is None else 60.0 * minutes,
            run_seconds=run if ended else None,
        )


def _from_text(
    text: str, source: str, partition: str | None, skipped: Counter[str]
) -> Iterator[Record]:
    lines = iter(text.splitlines())
    names = next(lines, "").split("|")
    own = [] if partition is None else [("Partition",)]
    needed = [*_NEEDED[:2], *own, *_NEEDED[2:]]
    if missing := [" or ".join(group) for group in needed if not set(group) & set(names)]:
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
        ended = _moment(fields.get("End"))
        run, minutes = number(fields.get("ElapsedRaw")), number(fields.get("TimelimitRaw"))
        if run is None:
            run = shown_seconds(fields.get("Elapsed", ""))
        limit = shown_seconds(fields.get("Timelimit", "")) if minutes is None else 60.0 * minutes
        nodes = number(fields.get("AllocNodes")) or number(fields.get("NNodes"))
        yield Record(
            submitted=_moment(fields.get("Submit")),
            started=_moment(fields.get("Start")),
            nodes=None if nodes is None else int(nodes),
            limit_seconds=limit,
            run_seconds=None if "End" in fields and ended is None else run,
        )


def _moment(text: str | None) -> float | None:
    """Seconds; local times count as UTC, since only differences matter."""
    if text is None or (seconds := number(text)) is not None:
        return None if text is None else seconds
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


_COLUMNS = 18
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
    per_node = 1 if processors_per_node is None else processors_per_node
    if processors_per_node is None and "MaxProcs" in header and header.get("MaxNodes"):
        per_node = max(1, header["MaxProcs"] // header["MaxNodes"])
    if per_node < 1:
        raise ClusterError(f"processors_per_node = {per_node} must be at least 1")
    if nodes is None and header:
        nodes = header["MaxProcs"] // per_node if "MaxProcs" in header else header["MaxNodes"]
    records = (
        Record(
            submitted=fields[_SUBMIT],
            started=fields[_SUBMIT] + max(0.0, fields[_WAIT]),
            nodes=-(-int(max(fields[_PROCESSORS], 0) or fields[_ASKED_PROCESSORS]) // per_node),
            limit_seconds=fields[_ASKED_SECONDS] if fields[_ASKED_SECONDS] > 0 else None,
            run_seconds=fields[_RUN],
        )
        for fields in jobs
    )
    return workload_of(records, machine_nodes=nodes, name=path.name, skipped=skipped)


def _jobs(path: Path, header: dict[str, int], skipped: Counter[str]) -> Iterator[list[float]]:
    try:
        check_regular(path)
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            for number, line in enumerate(lines, 1):
                if found := _HEADER.match(line):
                    header[found[1]] = int(found[2])
                text = line.partition(";")[0].split()
                if not text:
                    continue
                try:
                    fields = [float(word) for word in text]
                except ValueError:
                    fields = []
                if len(fields) < _COLUMNS:
                    raise ClusterError(
                        f"{path}, line {number}: a job in the Standard Workload Format has "
                        f"{_COLUMNS} numbers"
                    )
                if fields[_STATUS] in _PARTIAL:
                    skipped["that are pieces of others"] += 1
                else:
                    yield fields
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ClusterError(f"{path} cannot be read as a log: {reason}; give another") from None


_BUCKETS = 48
_BUCKET_SECONDS = 1800.0
_DAY_STARTS = 11
"""First bucket of the fitted day: its quietest hour, half past five in the morning."""
_LONGEST_GAP = 13.0
"""Logarithm of the longest gap at rush hours that the model draws."""
_FITTED_NODES = 128
_ROUNDS = 4
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0
ROUND_LIMITS = np.array(
    [5 * _MINUTE, 10 * _MINUTE, 15 * _MINUTE, 20 * _MINUTE, 30 * _MINUTE, 45 * _MINUTE]
    + [hours * _HOUR for hours in (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 15, 18)]
    + [days * _DAY for days in (1, 1.5, 2, 3, 4, 5, 7, 10, 14)]
)
"""Wall times that users ask for, in seconds; a request is rounded up to one of them."""


@dataclass(frozen=True, kw_only=True)
class LublinModel:
    """Constants of the model; the defaults are the published fit to all jobs of four machines.

    Attributes:
        serial: Share of jobs on one node.
        power_of_two: Share of jobs whose size is a power of two above one.
        smallest: Logarithm (base 2) of the smallest parallel job; its 0.2 below 1 give the
            smallest size its full share after rounding.
        middle_below_largest: Where the two uniform stages meet, below log2 of the machine.
        lower_stage: Share of parallel jobs in the lower stage.
        short: Shape and scale of the logarithm of short run times.
        long: Shape and scale of the logarithm of long run times.
        short_share: Slope per node (of a machine of 128) and intercept of the share of short jobs.
        longest: Logarithm of the longest run time, 45 h.
        gap: Shape and scale of the logarithm of the gap between arrivals at rush hours.
        cycle: Shape and scale of the day's arrivals, in half hours.
        all_day: Factor on the gap's shape, from rush hours to the whole day.
    """

    serial: float = 0.244
    power_of_two: float = 0.576
    smallest: float = 0.8
    middle_below_largest: float = 2.5
    lower_stage: float = 0.86
    short: tuple[float, float] = (4.2, 0.94)
    long: tuple[float, float] = (312.0, 0.03)
    short_share: tuple[float, float] = (-0.0054, 0.78)
    longest: float = 12.0
    gap: tuple[float, float] = (10.2303, 0.4871)
    cycle: tuple[float, float] = (8.1737, 3.9631)
    all_day: float = 1.0225


def lublin(
    jobs: int,
    nodes: int,
    *,
    load: float | None = None,
    seed: int = 0,
    longest_limit_seconds: float = math.inf,
    at_limit: float = 0.1,
) -> Workload:
    """A workload for a machine.

    Args:
        jobs: How many.
        nodes: Of the machine.
        load: Work per second and node, reached by stretching the gaps between arrivals (within a
            few per cent where the workload is but some days long); None for the model's own.
        seed: The same jobs for the same seed.
        longest_limit_seconds: The queue's MaxTime; longer jobs are cut to it.
        at_limit: Share of jobs that are ended by their limit.

    Raises:
        ClusterError: `jobs` or `nodes` below 1, or shares outside 0 to 1.
    """
    if jobs < 1 or nodes < 1:
        raise ClusterError(f"jobs = {jobs} and nodes = {nodes} must be at least 1")
    if not 0 <= at_limit <= 1:
        raise ClusterError(f"at_limit = {at_limit:g} must lie in 0 to 1")
    if not longest_limit_seconds > 0:
        raise ClusterError(f"longest_limit_seconds = {longest_limit_seconds:g} must be above 0")
    model = LublinModel()
    source = np.random.default_rng(seed)
    # Sum of all gaps up to each arrival, in mean half hours.
    shape, scale = model.gap
    logarithm = source.gamma(shape * model.all_day, scale, jobs)
    while np.any(again := logarithm > _LONGEST_GAP):
        logarithm[again] = source.gamma(shape * model.all_day, scale, int(again.sum()))
    paid = np.cumsum(np.exp(logarithm)) / _BUCKET_SECONDS
    sizes = _sizes(jobs, nodes, model, source)
    runs = np.minimum(_run_seconds(sizes, nodes, model, source), longest_limit_seconds)
    limits, runs = _requests(runs, longest_limit_seconds, at_limit, source)
    arrivals = _arrivals(paid, model)
    found = Workload(arrivals, sizes, limits, runs, nodes, name=f"lublin-{seed}")
    if load is None:
        return found
    for _ in range(_ROUNDS):  # the budget is stretched, not the clock: the daily cycle stays
        paid = paid * (found.at_load(load).submit_seconds[-1] / found.submit_seconds[-1])
        found = replace(found, submit_seconds=_arrivals(paid, model))
    return found


def _sizes(jobs: int, nodes: int, model: LublinModel, source: np.random.Generator) -> Integers:
    largest = math.log2(nodes)
    smallest = min(model.smallest, largest)
    middle = max(smallest, largest - model.middle_below_largest)
    kind = source.random(jobs)
    lower = source.random(jobs) < model.lower_stage
    low, high = np.where(lower, smallest, middle), np.where(lower, middle, largest)
    logarithm = source.uniform(low, high)
    round_sizes = kind <= model.serial + model.power_of_two
    logarithm = np.where(round_sizes, np.floor(logarithm + 0.5), logarithm)
    sizes = np.floor(2.0**logarithm + 0.5).astype(np.int64)
    return np.where(kind <= model.serial, 1, np.clip(sizes, 1, nodes))


def _run_seconds(
    sizes: Integers, nodes: int, model: LublinModel, source: np.random.Generator
) -> Array:
    slope, intercept = model.short_share
    # The fit is to machines of about 128 nodes: what matters is a job's part of its machine.
    fitted = sizes * min(1.0, _FITTED_NODES / nodes)
    short = source.random(len(sizes)) < np.clip(slope * fitted + intercept, 0.0, 1.0)
    shape = np.where(short, model.short[0], model.long[0])
    scale = np.where(short, model.short[1], model.long[1])
    logarithm = source.gamma(shape, scale)
    while np.any(again := logarithm > model.longest):
        logarithm[again] = source.gamma(shape[again], scale[again])
    return np.maximum(1.0, np.floor(np.exp(logarithm)))


def _arrivals(paid: Array, model: LublinModel) -> Array:
    """Gaps are paid out of a day's budget: half hours with more arrivals pass more slowly."""
    require("plan", "a workload of the Lublin model", "scipy")
    from scipy.special import gammainc

    numbers, spread = model.cycle
    edges = np.arange(_DAY_STARTS, _BUCKETS + _DAY_STARTS + 1) - 0.5
    share = np.diff(gammainc(numbers, edges / spread))
    budget = np.empty(_BUCKETS)
    budget[(np.arange(_DAY_STARTS, _BUCKETS + _DAY_STARTS) - 1) % _BUCKETS] = share / share.mean()
    spent = np.concatenate(([0.0], np.cumsum(budget)))
    days, rest = np.divmod(paid, _BUCKETS)
    within = np.interp(rest, spent, np.arange(_BUCKETS + 1) * _BUCKET_SECONDS)
    found: Array = days * _DAY + within
    return np.maximum.accumulate(found)


def _requests(
    runs: Array, longest: float, at_limit: float, source: np.random.Generator
) -> tuple[Array, Array]:
    """Requested times, and run times of which some continue beyond them."""
    used = 1.0 - source.random(len(runs))
    asked = np.where(source.random(len(runs)) < at_limit, runs, runs / used)
    place = np.minimum(np.searchsorted(ROUND_LIMITS, asked), len(ROUND_LIMITS) - 1)
    limits = np.minimum(ROUND_LIMITS[place], longest)
    ended = asked == runs
    return limits, np.where(ended, np.maximum(limits, runs), runs)
