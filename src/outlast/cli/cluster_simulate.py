"""``outlast cluster simulate``: what each policy would have done on a cluster's own log."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli.console import Column, output, print_json, print_table
from outlast.cli.options import with_options
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from outlast.cluster.policies.decision import Limits, MalleableJob, Policy
    from outlast.cluster.policies.forecast import Backfill
    from outlast.cluster.policies.replay import PolicyResult
    from outlast.cluster.workload import Workload

POLICIES = ("long", "links", "filler", "planned", "automatic")
HOUR = 3600.0
_GENERATED_JOBS = 3000


@dataclass(frozen=True, kw_only=True)
class AskedLog:
    """Whose jobs the others' are."""

    swf: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A log in the Standard Workload Format.")
    ] = None
    sacct: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Output of sacct --allusers --parsable2, or --json."),
    ] = None
    generated: Annotated[
        int | None,
        typer.Option(min=2, metavar="NODES", help="Without a log: generated jobs on a machine."),
    ] = None
    partition: Annotated[
        str | None, typer.Option(help="Of sacct's text: only this partition's jobs.")
    ] = None
    machine_nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes of the log's machine; default: as it shows.")
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Of the random numbers.")] = 0


@dataclass(frozen=True, kw_only=True)
class AskedRun:
    """The run that is submitted, and what it may ask for."""

    nodes: Annotated[
        int | None, typer.Option(min=1, help="Of the run; default: an eighth of the machine.")
    ] = None
    hours: Annotated[float, typer.Option(min=0.01, help="Of the run on these nodes.")] = 24.0
    size: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Other node counts it can run on; default: 1/4 to 4 times."),
    ] = None
    exponent: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Speed grows as nodes to this power.")
    ] = 0.9
    restart: Annotated[float, typer.Option(min=0.0, help="Seconds to a link's first step.")] = 300
    save: Annotated[float, typer.Option(min=0.0, help="Seconds of a link's last save.")] = 60.0
    max_time: Annotated[
        str, typer.Option(help="Longest wall time, as Slurm writes it: 24:00:00, 2-00:00:00.")
    ] = "UNLIMITED"


@dataclass(frozen=True, kw_only=True)
class AskedComparison:
    """Arguments of ``outlast plan compare``."""

    links: Annotated[float, typer.Option(min=0.1, help="Hours of a link of policy links.")] = 8.0
    policy: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(POLICIES)}; default: all.")
    ] = None
    load: Annotated[
        list[float] | None,
        typer.Option(min=0.01, help="Stretch the arrivals to this load; default: the log's own."),
    ] = None
    runs: Annotated[int, typer.Option(min=1, help="Moments at which the run is submitted.")] = 10
    backfill: Annotated[
        str, typer.Option(help="easy, or conservative: as Slurm's with a deep queue.")
    ] = "easy"


@with_options
def simulate(
    asked_log: AskedLog,
    asked_run: AskedRun,
    comparison: AskedComparison,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of tables.")
    ] = False,
) -> None:
    """Say what each policy would have done on a cluster's own log.

    The log's jobs run on a simulated scheduler; one run of yours is added at several moments of it,
    under one policy after the other. All figures are simulated. The log's users appear nowhere.

    Example: outlast cluster simulate --swf log.swf --nodes 16 --hours 48 --load 0.85

    Example: sacct --allusers --parsable2 --starttime now-60days
    --format JobID,Submit,Start,End,ElapsedRaw,TimelimitRaw,NNodes,State,Partition > log.txt;
    outlast cluster simulate --sacct log.txt --partition gpu

    --json: {"log", "jobs", "machine_nodes", "run", "notes", "rows"}, times in seconds.
    """
    log = _log(asked_log)
    job, limits = _run(log, asked_run)
    rows = _rows(log, job, limits, comparison, asked_log.seed)
    if json:
        _print_json(log, job, rows)
    else:
        _print(log, job, rows)


def _rows(
    log: Workload, job: MalleableJob, limits: Limits, asked: AskedComparison, seed: int
) -> list[PolicyResult]:
    """One row for each load and policy."""
    from outlast.cluster.policies.replay import replay

    kind = _backfill(asked.backfill)
    chosen = _policies(asked.policy, asked.links * HOUR, kind)
    rows: list[PolicyResult] = []
    for item in asked.load or [log.load]:
        stretched = log.at_load(item) if asked.load else log
        rows += replay(stretched, chosen, job, limits, runs=asked.runs, seed=seed, backfill=kind)
    return rows


def _log(asked: AskedLog) -> Workload:
    from outlast.cluster.workload import lublin, read_sacct, read_swf

    if sum(item is not None for item in (asked.swf, asked.sacct, asked.generated)) != 1:
        raise ClusterError("give one of --swf FILE, --sacct FILE and --generated NODES")
    if asked.partition is not None and asked.sacct is None:
        raise ClusterError("--partition belongs to --sacct: other logs are read whole")
    if asked.swf is not None:
        return read_swf(asked.swf, nodes=asked.machine_nodes)
    if asked.sacct is not None:
        return read_sacct(asked.sacct, nodes=asked.machine_nodes, partition=asked.partition)
    return lublin(_GENERATED_JOBS, asked.generated or 0, load=0.85, seed=asked.seed)


def _run(log: Workload, asked: AskedRun) -> tuple[MalleableJob, Limits]:
    """The run that is submitted, and what it may ask for."""
    from outlast.cluster.policies.decision import Limits, MalleableJob, PowerSpeed
    from outlast.job.durations import limit_seconds

    reference = asked.nodes or max(log.machine_nodes // 8, 1)
    if reference > log.machine_nodes:
        raise ClusterError(
            f"--nodes {reference}: the log's machine has {log.machine_nodes} nodes; give fewer"
        )
    others = asked.size or [reference // 4, reference // 2, 2 * reference, 4 * reference]
    possible = {other for other in others if 1 <= other <= log.machine_nodes}
    job = MalleableJob(
        work_seconds=asked.hours * HOUR,
        reference_nodes=reference,
        sizes=tuple(sorted({reference, *possible})),
        speed=PowerSpeed(reference, asked.exponent),
        restart_seconds=asked.restart,
        save_seconds=asked.save,
    )
    longest = limit_seconds(asked.max_time)
    if job.progress(reference, longest) <= 0.0:
        raise ClusterError(
            f"--max-time {asked.max_time}: restart and last save alone take "
            f"{job.overhead(reference):g} s; give more"
        )
    return job, Limits(max_wall_seconds=longest, max_nodes=log.machine_nodes)


def _backfill(name: str) -> Backfill:
    if name not in ("easy", "conservative"):
        raise ClusterError(f'--backfill = "{name}" is neither easy nor conservative')
    return name  # type: ignore[return-value]


def _policies(names: list[str] | None, link_seconds: float, backfill: Backfill) -> list[Policy]:
    """One long job, which the others are compared with, and those that were asked for."""
    from outlast.cluster.policies.anchor_filler import AnchorFiller
    from outlast.cluster.policies.automatic import Automatic, Planned
    from outlast.cluster.policies.decision import FixedLinks, OneLongJob

    known: dict[str, Policy] = {
        "links": FixedLinks(link_seconds),
        "filler": AnchorFiller(backfill=backfill),
        "planned": Planned(backfill=backfill),
        "automatic": Automatic(fillers=AnchorFiller(backfill=backfill)),
    }
    for name in names or []:
        if name not in POLICIES:
            raise ClusterError(f'--policy = "{name}" is none of {", ".join(POLICIES)}')
    wanted = [name for name in POLICIES if name in (names or POLICIES) and name in known]
    return [OneLongJob(), *(known[name] for name in wanted)]


def _print(log: Workload, job: MalleableJob, rows: list[PolicyResult]) -> None:
    from outlast.cluster.policies.decision import hours

    console = output()
    heads = ("load", "policy", "runs", "turnaround h", "vs one long job", "worst", "node hours")
    columns = [Column(head, number=head != "policy") for head in (*heads, "jobs", "waste")]
    cells = [
        [
            f"{row.load:.2f}",
            row.policy,
            str(row.runs),
            f"{row.turnaround_seconds / HOUR:.1f}",
            f"{row.ratio:.3f}",
            f"{row.worst:.2f}",
            f"{row.node_ratio:.3f}",
            f"{row.links:.1f}",
            f"{row.waste:.1%}",
        ]
        for row in rows
    ]
    title = (
        f"{len(log):,} jobs on {log.machine_nodes:,} nodes; a run of {hours(job.work_seconds)} on "
        f"{job.reference_nodes} nodes is added; simulated"
    )
    print_table(console, columns, cells, title)
    for note in log.notes:
        console.print(note, style="dim", soft_wrap=True, markup=False)
    best = min(rows, key=lambda row: row.ratio)
    if best.ratio > 0.98:
        sentence = "Just submit one long job: no policy gains 2 % on this log."
    else:
        sentence = (
            f"Best: {best.policy}, {1.0 - best.ratio:.0%} sooner than one long job on average at "
            f"load {best.load:.2f}, with {best.node_ratio:.2f} of its node hours."
        )
    console.print(sentence, soft_wrap=True, markup=False)


def _print_json(log: Workload, job: MalleableJob, rows: list[PolicyResult]) -> None:
    print_json(
        {
            "log": log.name,
            "jobs": len(log),
            "machine_nodes": log.machine_nodes,
            "kind": "simulated",
            "run": {
                "nodes": job.reference_nodes,
                "seconds": job.work_seconds,
                "sizes": job.sizes,
                "restart_seconds": job.restart_seconds,
                "save_seconds": job.save_seconds,
            },
            "notes": log.notes,
            "rows": [asdict(row) for row in rows],
        }
    )
