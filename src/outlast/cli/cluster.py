"""``outlast cluster``: plan, simulate, watch and steer a run on a shared cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from outlast.cli.console import (
    Column,
    count_text,
    print_json,
    print_table,
    size_text,
)
from outlast.cli.console import output as console_of
from outlast.cli.options import AsJson, with_options
from outlast.cli.submit import check_run, script_text
from outlast.cli.train import JobFile, Overrides, job_arguments
from outlast.errors import ClusterError
from outlast.paths import read_text

if TYPE_CHECKING:
    from outlast.cluster.chain import ChainStatus, LinkStatus
    from outlast.cluster.chain_files import ChainFiles, ChainPlan
    from outlast.cluster.planning import Costs
    from outlast.cluster.policies import Choice, Limits, MalleableJob, Policy, PolicyResult
    from outlast.cluster.simulate import Backfill
    from outlast.cluster.slurm import SiteLimits
    from outlast.cluster.workload import Workload
    from outlast.job import Job


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
    json: AsJson = False,
) -> None:
    """Say what each policy would have done on a cluster's own log.

    The log's jobs run on a simulated scheduler; one run of yours is added at several moments of it,
    under one policy after the other. All figures are simulated. The log's users appear nowhere.

    Example: outlast cluster simulate --swf log.swf --nodes 16 --hours 48 --load 0.85

    Example: sacct --allusers --parsable2 --starttime now-60days
    --format JobID,Submit,Start,End,ElapsedRaw,TimelimitRaw,NNodes,State,Partition > log.txt;
    outlast cluster simulate --sacct log.txt --partition gpu

    --json: {"log", "jobs", "machine_nodes", "kind", "run", "notes", "rows"}, times in seconds.
    """
    from outlast.cluster.policies import hours, replay

    log = _log(asked_log)
    job, limits = _run(log, asked_run)
    if comparison.backfill not in ("easy", "conservative"):
        raise ClusterError(f'--backfill = "{comparison.backfill}" is neither easy nor conservative')
    backfill = cast("Backfill", comparison.backfill)
    chosen = _policies(comparison.policy, comparison.links * HOUR, backfill)
    rows: list[PolicyResult] = []
    for item in comparison.load or [log.load]:
        stretched = log.at_load(item) if comparison.load else log
        rows += replay(
            stretched,
            chosen,
            job,
            limits,
            runs=comparison.runs,
            seed=asked_log.seed,
            backfill=backfill,
        )
    if json:
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
                "rows": rows,
            }
        )
    else:
        console = console_of()
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
            f"{len(log):,} jobs on {log.machine_nodes:,} nodes; a run of "
            f"{hours(job.work_seconds)} on {job.reference_nodes} nodes is added; simulated"
        )
        print_table(console, columns, cells, title)
        for note in log.notes:
            console.print(note, style="dim", soft_wrap=True, markup=False)
        best = min(rows, key=lambda row: row.ratio)
        if best.ratio > 0.98:
            sentence = "Just submit one long job: no policy gains 2 % on this log."
        else:
            sentence = (
                f"Best: {best.policy}, {1.0 - best.ratio:.0%} sooner than one long job on average "
                f"at load {best.load:.2f}, with {best.node_ratio:.2f} of its node hours."
            )
        console.print(sentence, soft_wrap=True, markup=False)


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
    from outlast.cluster.policies import Limits, MalleableJob, PowerSpeed
    from outlast.durations import limit_seconds

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
    longest = limit_seconds(asked.max_time, "--max-time")
    if job.progress(reference, longest) <= 0.0:
        raise ClusterError(
            f"--max-time {asked.max_time}: restart and last save alone take "
            f"{job.overhead(reference):g} s; give more"
        )
    return job, Limits(max_wall_seconds=longest, max_nodes=log.machine_nodes)


def _policies(names: list[str] | None, link_seconds: float, backfill: Backfill) -> list[Policy]:
    """One long job, which the others are compared with, and those that were asked for."""
    from dataclasses import replace

    from outlast.cluster.policies import (
        QUICK,
        AnchorFiller,
        Automatic,
        FixedLinks,
        OneLongJob,
        Planned,
    )

    known: dict[str, Policy] = {
        "links": FixedLinks(link_seconds),
        "filler": AnchorFiller(backfill=backfill),
        "planned": Planned(outlook=replace(QUICK, backfill=backfill)),
        "automatic": Automatic(fillers=AnchorFiller(backfill=backfill)),
    }
    for name in names or []:
        if name not in POLICIES:
            raise ClusterError(f'--policy = "{name}" is none of {", ".join(POLICIES)}')
    wanted = [name for name in POLICIES if name in (names or POLICIES) and name in known]
    return [OneLongJob(), *(known[name] for name in wanted)]


_SHOWN = 12


def candidates_or_reason(
    job: Job,
    chain: ChainPlan,
    site: SiteLimits,
    costs: Costs,
    train_seconds: float | None,
    *,
    log: Workload | None = None,
) -> tuple[Choice | None, str]:
    """All candidates with the best of them, or none; and why it is best, or why there is none.

    Args:
        job: Its ``slurm.sizes`` are compared, the first of ``slurm.nodes`` is the reference.
        chain: As it would be submitted.
        site: What the cluster allows.
        costs: Of a link.
        train_seconds: That are left on the reference.
        log: What the queue's users did; None: as recent accounting says.
    """
    if not site.known:
        return None, ""
    if train_seconds is None:
        return None, (
            "which time limit and nodes finish first cannot be predicted before the first steps "
            "were measured; say what is left with --hours"
        )
    try:
        choice = candidates_now(job, chain, site, costs, train_seconds, log=log)
    except ClusterError as error:
        return None, f"no candidates: {error}"
    return choice, choice.reason


def print_candidates(choice: Choice) -> None:
    """Print what each candidate would lead to, and which is best."""
    from outlast.durations import duration_text

    rows = [
        [
            str(candidate.nodes),
            duration_text(candidate.wall_seconds),
            *(
                duration_text(seconds)
                for seconds in (
                    candidate.start.p10_seconds,
                    candidate.start.p50_seconds,
                    candidate.start.p90_seconds,
                    candidate.finish_quantile(0.5),
                    candidate.finish_quantile(0.9),
                )
            ),
            f"{candidate.node_seconds / 3600.0:,.1f}",
            "best" if candidate is choice.best else "",
        ]
        for candidate in choice.ranking[:_SHOWN]
    ]
    heads = ("nodes", "time limit", "starts P10", "P50", "P90", "done P50", "P90", "node hours", "")
    title = (
        "candidates on the queue as it is now, predicted (speed of nodes not measured: power 0.9)"
    )
    print_table(console_of(), [Column(head) for head in heads], rows, title)


def _candidate_facts(choice: Choice) -> list[dict[str, Any]]:
    return [
        {
            "nodes": candidate.nodes,
            "wall_seconds": candidate.wall_seconds,
            "start_p10_seconds": candidate.start.p10_seconds,
            "start_p50_seconds": candidate.start.p50_seconds,
            "start_p90_seconds": candidate.start.p90_seconds,
            "finish_p50_seconds": candidate.finish_quantile(0.5),
            "finish_p90_seconds": candidate.finish_quantile(0.9),
            "node_seconds": candidate.node_seconds,
            "best": candidate is choice.best,
        }
        for candidate in choice.ranking
    ]


def candidates_now(
    job: Job,
    chain: ChainPlan,
    site: SiteLimits,
    costs: Costs,
    train_seconds: float,
    *,
    log: Workload | None = None,
) -> Choice:
    """The best of all candidates on the live queue; see `candidates_or_reason`.

    Predictions are corrected by those of the log's jobs that have started, or without a log by
    those that this folder's runs have seen come true.

    Raises:
        ClusterError: The queue cannot be asked, or no candidate makes progress.
    """
    from outlast.cluster.choosing import (
        choose_now,
        correction_of,
        job_of,
        starts_nearby,
        step_times,
    )
    from outlast.cluster.planning import files_of
    from outlast.cluster.policies import QUICK, Behaviour, learn_correction

    files = files_of(job)
    sizes = chain.sizes or sizes_of(job)
    left = job_of(chain, costs, train_seconds, sizes, step_times(files, chain))
    if log is None:
        correction = correction_of(starts_nearby(files))
        return choose_now(chain, site, left, correction=correction)
    behaviour = Behaviour.learnt(log)
    if log.start_seconds is None:
        return choose_now(chain, site, left, behaviour=behaviour)
    like = (left.reference_nodes, left.wall_to_finish(left.reference_nodes))
    outlook = dataclasses.replace(QUICK, behaviour=behaviour)
    correction = learn_correction(log, log.start_seconds, outlook, like=like, slurm=True)
    return choose_now(chain, site, left, behaviour=behaviour, correction=correction)


def sizes_of(job: Job) -> tuple[int, ...]:
    """Node counts to compare, ascending; those that the partition has not are left out later."""
    if job.slurm.sizes:
        return tuple(sorted(set(job.slurm.sizes)))
    asked = set(job.slurm.nodes)
    halves = {number // 2 for number in asked if number % 2 == 0}
    return tuple(sorted(asked | halves | {2 * number for number in asked}))


_CLOCK = (
    "a link ends on its own clock: what squeue says is left, asked again now and then, and a "
    "monotonic clock between; Slurm's USR1 and TERM are the back-up"
)


_CHOICE = (
    "time limit and nodes of a link are those with which the run is predicted to end first on the "
    "queue as it is when the link is submitted: the first one's now, each later one's as the link "
    "before it begins; how much of their limits jobs use is taken from recent accounting (sacct), "
    "and assumed where there is none"
)


_LEAD = (
    "the lead is the one that maximises (W - x) F(x) over what saves have taken, and at least "
    "their 99.5 % quantile"
)


def plan(
    job_file: JobFile = None,
    overrides: Overrides = None,
    hours: Annotated[
        float | None,
        typer.Option(min=0.0, help="What is left to train on the first number of nodes."),
    ] = None,
    sacct: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Predict starts as users did in this output of sacct --allusers --parsable2.",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Show what `outlast submit` would do: the links, their costs, the exact batch script.

    Nothing is submitted. Where the queue can be asked, candidates for time limit and nodes are
    listed with predicted starts.

    --json: {"kind", "chain", "run", "sentences", "plan", "costs", "left_seconds", "candidates",
    "candidates_reason", "number", "reason", "script"}; number and script are of the next link.
    """
    from outlast.cluster.chain import next_number
    from outlast.cluster.chain_files import run_log
    from outlast.cluster.choosing import (
        choose_first,
        starts_nearby,
        starts_words,
        step_times,
        work_seconds,
    )
    from outlast.cluster.planning import costs_of, files_of, plan_chain, site_now
    from outlast.cluster.workload import read_sacct
    from outlast.job import load_job

    job = load_job(*job_arguments(job_file, overrides))
    past = None if sacct is None else read_sacct(sacct)
    site = site_now(job)
    files, chain = files_of(job), plan_chain(job, site)
    costs = costs_of(chain, run_log(files))
    given = None if hours is None else 3600.0 * hours
    left = given
    if left is None:
        left = work_seconds(files, chain, chain.nodes[0], step_times(files, chain))
    said = sentences(job, chain, site, left)
    choice, why = candidates_or_reason(job, chain, site, costs, left, log=past)
    if not json:
        print("\n".join(said))
        if choice is not None:
            print_candidates(choice)
        if why:
            print(why)
        if choice is not None and past is None:
            print(starts_words(starts_nearby(files)))
    number = next_number(files)
    chosen = choose_first(files, chain.from_link(number), number, seconds=given)
    used = chain.from_link(number) if chosen is None else chosen.plan
    script = script_text(files, chain, number, chosen)
    if json:
        print_json(
            {
                "kind": "predicted",
                "chain": chain.chain,
                "run": files.run,
                "sentences": said,
                "plan": used,
                "costs": costs,
                "left_seconds": left,
                "candidates": [] if choice is None else _candidate_facts(choice),
                "candidates_reason": why,
                "number": number,
                "reason": used.reason,
                "script": script,
            }
        )
        return
    if chosen is not None:
        print(f"chosen: {chosen.plan.reason}")
    print("\nThe next link, exactly as it would be submitted:\n")
    print(script, end="")


def explain(job_file: JobFile = None, overrides: Overrides = None, json: AsJson = False) -> None:
    """Say in words how a chain of this job works, and where each figure comes from.

    --json: {"run", "plan", "costs", "sentences", "chosen"}.
    """
    from outlast.cluster.chain_files import choice_words, entries, run_log
    from outlast.cluster.choosing import starts_nearby, starts_words
    from outlast.cluster.planning import costs_of, files_of, plan_chain, site_now
    from outlast.job import load_job

    job = load_job(*job_arguments(job_file, overrides))
    site = site_now(job)
    files, chain = files_of(job), plan_chain(job, site)
    chosen = choice_words(entries(files))
    lines = [*sentences(job, chain, site), *reasons(chain), starts_words(starts_nearby(files))]
    if json:
        costs = costs_of(chain, run_log(files))
        facts = {"run": files.run, "plan": chain, "costs": costs}
        print_json({**facts, "sentences": lines, "chosen": chosen or None})
        return
    for line in [*lines, *([f"chosen last: {chosen}"] if chosen else [])]:
        print(line)


def sentences(
    job: Job, chain: ChainPlan, site: SiteLimits, left_seconds: float | None = None
) -> list[str]:
    """The plan in words, a sentence a line.

    Args:
        job: As it was given.
        chain: The plan of its chain.
        site: What the cluster allows.
        left_seconds: Of training; None: as the steps so far say.
    """
    from outlast.cluster.chain_files import run_log
    from outlast.cluster.choosing import step_times, work_seconds
    from outlast.cluster.planning import costs_of, files_of, links_needed
    from outlast.durations import duration_text

    files = files_of(job)
    log = run_log(files)
    costs = costs_of(chain, log)
    found = [f"run {chain.name} in {files.run}, step {log.step} of {chain.steps} saved"]
    usable = chain.usable_seconds()
    nodes = ", then ".join(str(node) for node in chain.nodes)
    length = "the partition's default limit" if usable is None else duration_text(usable)
    if chain.chooses:
        length = f"at most {length}, chosen for each as it is submitted,"
        nodes = " or ".join(str(size) for size in chain.sizes) or nodes
    kind = {
        "dependent": "jobs that submit their successors",
        "presubmitted": f"{chain.links} jobs submitted at once",
        "array": f"{chain.links} places of one job array",
    }[chain.kind]
    found.append(
        f"a chain of {kind}: links of {length} on {nodes} node(s) with "
        f"{chain.tasks_per_node} process(es) each"
    )
    if not site.known:
        found.append("this machine cannot ask Slurm, so the limits of the cluster are not checked")
    found.append(
        f"a link needs {costs.restart_seconds:.3g} s to its first step and {costs.save_seconds:.3g}"
        f" s for a save ({_kind(costs)}); its last save begins {costs.lead_seconds:.3g} s before "
        "its end"
    )
    if usable is not None:
        share = (costs.restart_seconds + costs.lead_seconds) / usable
        found.append(f"start and lead take {share:.2%} of a link, {_kind(costs)}")
    measured_seconds = work_seconds(files, chain, chain.nodes[0], step_times(files, chain))
    seconds = measured_seconds if left_seconds is None else left_seconds
    how = "as given" if seconds != measured_seconds else "predicted from the steps so far"
    links = links_needed(chain, costs, seconds)
    if links is not None and seconds is not None:
        found.append(f"{duration_text(seconds)} of training are left, {how}: {links} more link(s)")
        if chain.links and links > chain.links:
            found.append(f"slurm.links = {chain.links} is not enough for that")
    return found


def reasons(chain: ChainPlan) -> list[str]:
    """Why a chain does what it does, a sentence a line."""
    follows = {
        "dependent": "each link submits the next as it starts, which waits for its end (afterany), "
        "so it gathers priority meanwhile; a requeue would wait two minutes at least",
        "presubmitted": "all links are submitted now, each waiting for the one before; those that "
        "are left over when the run is done end at once",
        "array": "all links are places of one array that run one after the other; those left over "
        "are cancelled when the run is done",
    }[chain.kind]
    given_up = f"after {chain.attempts_without_progress} links in a row that saved no step"
    return [
        follows,
        *([_CHOICE] if chain.chooses else []),
        _CLOCK,
        "all ranks agree at a step boundary, save, and end with code 3; no step is lost there",
        _LEAD,
        "one link writes the run at a time: a fence names its job, and a dead job's is taken over",
        f"the chain gives up {given_up}",
        "a job that is cancelled stays cancelled; preemption and failed nodes are continued from",
    ]


def _kind(costs: Costs) -> str:
    return "measured in this run" if costs.measured else "assumed until measured"


def prefetch(job_file: JobFile = None, overrides: Overrides = None, json: AsJson = False) -> None:
    """Copy the tokens of a job to this node, where its section staging says.

    Run it once on each node, e.g. `srun --overlap --ntasks-per-node=1 outlast cluster prefetch
    job.toml &`, while an earlier job is still training; the processes that start later find the
    copies, or wait for those that are on their way. Text that no run has tokenised yet is left out.

    --json: {"directory", "copies": [{"source", "path", "bytes", "copied_bytes", "resumed_bytes",
    "seconds", "waited_seconds", "evicted", "damaged", "problem"}]}.
    """
    from outlast.cluster.staging import prefetch as fetch
    from outlast.cluster.staging import told
    from outlast.job import load_job

    job_file, settings = job_arguments(job_file, overrides)
    job = load_job(job_file, settings)
    copies = fetch(job)
    if json:
        print_json({"directory": job.staging.directory or None, "copies": copies})
    else:
        print("\n".join(told(job, copies)))


Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run directory, e.g. runs/quickstart; or a job file.")
]


def chain_of(run: Path) -> ChainFiles:
    """The chain of a run directory, or of the run that a job file names.

    Raises:
        ClusterError: There is no such directory.
        JobError: The job file is wrong.
    """
    from outlast.cluster.chain_files import chain_files
    from outlast.cluster.planning import files_of

    if run.suffix == ".toml":
        from outlast.job import load_job

        return files_of(load_job(run))
    if not run.is_dir():
        raise ClusterError(
            f"{run} is no run directory, so it has no chain: `outlast submit job.toml` makes one"
        )
    return chain_files(run.resolve())


def status(run: Run, json: AsJson = False) -> None:
    """Say how a chain is doing: links, progress, where the time went, when it will be done.

    --json: {"chain", "name", "outcome", "reason", "step", "steps", "links", "jobs", "seconds",
    "goodput", "left_seconds", "save_seconds", "chosen", "waits"}.
    """
    from outlast.cluster.chain import status_of

    found = status_of(chain_of(run))
    if json:
        print_json(found)
    else:
        print_status(found)


def print_status(found: ChainStatus) -> None:
    """The status as text."""
    from outlast.durations import duration_text

    console = console_of()
    why = f": {found.reason}" if found.reason else ""
    of = f" of {found.steps} ({found.step / found.steps:.1%})" if found.steps else ""
    print(f"chain {found.chain} of run {found.name}: {found.outcome}{why}")
    print(f"saved up to step {found.step}{of}")
    if found.goodput is not None:
        print(f"goodput {found.goodput:.1%} of the links' time, measured")
        total = sum(found.seconds.values())
        for name, seconds in sorted(found.seconds.items(), key=lambda second: -second[1]):
            print(f"  {name:<26} {duration_text(seconds):>12}  {seconds / total:6.1%}")
    elif found.links:
        print("goodput not known: the run has kept no records of its time yet")
    if gaps := found.gaps_seconds:
        print(f"between links {sum(gaps) / len(gaps):.1f} s on average, {max(gaps):.1f} s at most")
    if found.left_seconds:
        print(f"about {duration_text(found.left_seconds)} left, predicted from the links so far")
    for job, state in found.jobs.items():
        waits = found.waits.get(job)
        print(f"job {job}: {state.lower()}{f': {waits}' if waits else ''}")
    if found.chosen:
        print(f"chosen: {found.chosen}")
    if found.links:
        rows = [
            [
                f"{link.number} filler" if link.role == "filler" else str(link.number),
                link.job,
                f"{link.nodes} x {link.processes // max(link.nodes, 1)}",
                "" if link.wait_seconds is None else f"{link.wait_seconds:.1f} s",
                _predicted(link),
                "" if link.seconds is None else duration_text(link.seconds),
                f"{link.first_step} to {link.last_step}",
                link.verdict,
                link.reason,
            ]
            for link in found.links
        ]
        heads = ["link", "job", "nodes", "waited", "predicted", "ran", "steps", "then", "why"]
        if all(link.predicted_wait_seconds is None for link in found.links):
            place = heads.index("predicted")
            del heads[place]
            rows = [row[:place] + row[place + 1 :] for row in rows]
        print_table(console, [Column(head) for head in heads], rows, "")


def _predicted(link: LinkStatus) -> str:
    """The wait that was predicted when the link was chosen."""
    from outlast.cluster.policies import hours

    if link.predicted_wait_seconds is None:
        return ""
    low, high = link.predicted_wait_seconds
    return f"{hours(low)} to {hours(high)}" if high else "no wait"


def resume(run: Run, overrides: Overrides = None, json: AsJson = False) -> None:
    """Continue with a chain that was stopped, cancelled, gave up or lost its next link.

    Settings such as slurm.wall_time=4h replace those that the chain was submitted with.

    --json: {"jobs", "chain", "run", "reason"}.
    """
    from outlast.cluster.chain import resume as resumed
    from outlast.cluster.chain_files import read_plan

    files = chain_of(run)
    before = read_plan(files)
    jobs = resumed(files, *(_changed(files, before, list(overrides)) if overrides else ()))
    words = f"submitted {', '.join(jobs)}: chain {before.chain} of {files.run} continues"
    _tell_submitted(files, jobs, before.chain, words, json=json)


def _tell_submitted(
    files: ChainFiles, jobs: list[str], chain: str, words: str, *, json: bool
) -> None:
    """Say what was submitted, and why it is as it is, where that was chosen."""
    from outlast.cluster.chain_files import choice_words, entries

    chosen = choice_words(entries(files))
    if json:
        print_json({"jobs": jobs, "chain": chain, "run": files.run, "reason": chosen or ""})
        return
    print(words)
    if chosen:
        print(f"chosen: {chosen}")


def _changed(files: ChainFiles, before: ChainPlan, overrides: list[str]) -> tuple[ChainPlan, str]:
    """The plan of a chain with other settings, and the text of its job."""
    from outlast.cluster.planning import files_of, plan_chain, site_now
    from outlast.job import load_job, to_toml

    with contextlib.ExitStack() as there:
        try:
            # Paths of a job are meant from where its links run.
            there.enter_context(contextlib.chdir(before.directory))
        except OSError as error:
            raise ClusterError(
                f"{before.directory}, where the links run, cannot be entered: {error.strerror}"
            ) from None
        job = load_job(files.job, overrides)
        if files_of(job).path != files.path:
            raise ClusterError(
                f"run.directory and run.name are now those of {files_of(job).run}, not of "
                f"{files.run}: set them back, or submit it as a run of its own"
            )
        check_run(job)
        plan = plan_chain(job, site_now(job))
    python = job.slurm.python or before.python
    return dataclasses.replace(plan, python=python), to_toml(job)


def stop(
    run: Run,
    after_checkpoint: Annotated[
        bool,
        typer.Option(
            "--after-checkpoint", help="Let the running link save at its next step first."
        ),
    ] = False,
    json: AsJson = False,
) -> None:
    """End a chain: cancel its jobs, or let the running one save and end.

    --json: {"run", "done"}, in words what was done.
    """
    from outlast.cluster.chain import stop as stopped

    files = chain_of(run)
    done = stopped(files, after_checkpoint=after_checkpoint)
    if json:
        print_json({"run": files.run, "done": done})
    else:
        print(done)


def adopt(
    job_number: Annotated[str, typer.Argument(metavar="JOBID", help="A job that trains this run.")],
    job_file: Annotated[
        Path, typer.Argument(metavar="JOB.TOML|RUN", help="The job file or directory of the run.")
    ],
    overrides: Overrides = None,
    json: AsJson = False,
) -> None:
    """Make a job that was submitted by hand the first link of a chain.

    --json: {"jobs", "chain", "run", "reason"}.
    """
    from outlast.cluster.chain import adopt as adopted
    from outlast.cluster.planning import files_of, plan_chain, site_now
    from outlast.job import load_job, to_toml
    from outlast.job.section import toml_value
    from outlast.records import RunDirectory

    if not re.fullmatch(r"\d+(_\d+)?", job_number):
        raise ClusterError(f"JOBID = {job_number} is no number of a Slurm job; squeue shows them")
    if job_file.is_dir():
        # Wherever it lies now.
        place = [f"run.directory={toml_value(str(job_file.resolve().parent))}"]
        place.append(f"run.name={toml_value(job_file.resolve().name)}")
        job_file = RunDirectory(job_file).job_file
    else:
        place = []
    settings = [*place, *(overrides or [])]
    job = load_job(job_file, settings, unsure=frozenset({"model"}))
    check_run(job)
    if not job.slurm.command:
        load_job(job_file, settings)
    plan = plan_chain(job, site_now(job))
    files = files_of(job)
    jobs = adopted(files, plan, to_toml(job), job_number)
    words = f"submitted {', '.join(jobs)} to follow job {job_number}: chain {plan.chain}"
    _tell_submitted(files, jobs, plan.chain, words, json=json)


ROWS_SHOWN = 60


def tasks(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.toml",
            help="A run's figures, in the tables run, bytes_per_s, tier and evaluation; or any "
            "graph, in the tables nodes, bytes_per_s, task and edge.",
        ),
    ],
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PAGE.html", help="Write the picture here."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help=f"Print more than {ROWS_SHOWN} rows.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Plan a run's training, saves, copies and evaluations together; nothing is run.

    Transfers share the file system, the network and the disks; the plan says which go first. Below
    the table: how far the plan can be at most from the shortest one, and what would happen without
    a plan. Figures are predictions from the file.

    --json: {"kind", "seconds", "bound_seconds", "without_a_plan_seconds", "sharing", "rows",
    "output"}.
    """
    from outlast.cluster.tasks import duration, graph_from_toml, page, plan, run_greedily

    try:
        text = read_text(file)
    except OSError as error:
        raise ClusterError(f"{file} cannot be read ({error.strerror}): give another") from error
    except UnicodeDecodeError as error:
        raise ClusterError(f"{file} is no UTF-8 text: give a TOML file") from error
    graph = graph_from_toml(text, str(file))
    schedule, unmanaged = plan(graph), run_greedily(graph)
    if output is not None:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            content = page(schedule, title=file.stem, unmanaged=unmanaged)
            output.write_text(content, encoding="utf-8")
        except OSError as error:
            raise ClusterError(f"{output} cannot be written ({error.strerror})") from error
    if json:
        print_json(
            {
                "kind": "predicted",
                "seconds": schedule.makespan_seconds,
                "bound_seconds": schedule.bound_seconds,
                "without_a_plan_seconds": unmanaged.makespan_seconds,
                "sharing": schedule.sharing,
                "rows": list(schedule.rows),
                "output": output,
            }
        )
    else:
        names = list(schedule.graph.machine.nodes)
        sizes = {activity.name: activity.size_bytes for activity in schedule.graph.activities}
        rows = [
            [
                row.name,
                row.kind,
                duration(row.start_seconds),
                duration(row.end_seconds),
                duration(row.seconds),
                size_text(round(sizes[row.name])) if sizes[row.name] else "-",
                f"{len(row.nodes)} {names[row.group]}" if row.nodes else "-",
            ]
            for row in schedule.rows[: (None if everything else ROWS_SHOWN)]
        ]
        columns = [
            Column("task", number=False, least=20),
            Column("kind", number=False, optional=2),
            Column("start"),
            Column("end"),
            Column("takes"),
            Column("moves"),
            Column("nodes", number=False, optional=1),
        ]
        print_table(console_of(), columns, rows, "schedule (predicted)")
        left = len(schedule.rows) - len(rows)
        if left > 0:
            print(f"and {count_text(left, 'row')} more; --all prints them")
        makespan = schedule.makespan_seconds
        print(f"all is done after    {duration(makespan)}")
        gap = (
            "as short as can be" if schedule.gap < 5e-4 else f"at most {schedule.gap:.1%} too long"
        )
        print(f"no plan is shorter   {duration(schedule.bound_seconds)}: this one is {gap}")
        more = unmanaged.makespan_seconds / makespan - 1.0 if makespan else 0.0
        print(f"without a plan       {duration(unmanaged.makespan_seconds)} ({more:+.1%})")
        if output is not None:
            print(f"wrote {output}")


cluster = typer.Typer(
    name="cluster",
    help="Long runs on a shared Slurm cluster: plan them, watch them, steer them.",
    no_args_is_help=True,
)


for command in (plan, status, resume, stop, adopt, explain, simulate, tasks, prefetch):
    cluster.command()(command)
