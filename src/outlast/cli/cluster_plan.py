"""``outlast cluster plan`` and ``explain``: what would be submitted, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli.submit import script_text
from outlast.cli.train import JobFile, Overrides, jobs_arguments

if TYPE_CHECKING:
    from outlast.cluster.chain.plan import ChainPlan
    from outlast.cluster.chain.planning import Costs, Site
    from outlast.job import Job


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
) -> None:
    """Show what `outlast submit` would do: the links, their costs, the exact batch script.

    Nothing is submitted. Where the queue can be asked, candidates for time limit and nodes are
    listed with predicted starts.
    """
    from outlast.cli.cluster_candidates import print_candidates
    from outlast.cluster.chain.manage import choice_of, next_number
    from outlast.cluster.chain.planning import costs_of, files_of, plan_chain, site_now
    from outlast.cluster.chain.progress import run_log
    from outlast.cluster.chain.work import work_seconds
    from outlast.cluster.workload.sacct import read_sacct
    from outlast.job import load_job

    job = load_job(*jobs_arguments(job_file, overrides))
    past = None if sacct is None else read_sacct(sacct)
    site = site_now(job)
    files, chain = files_of(job), plan_chain(job, site)
    log = run_log(files)
    costs = costs_of(chain, log.save_seconds, measured_restart=bool(log.restart_seconds))
    given = None if hours is None else 3600.0 * hours
    left = work_seconds(files, chain, chain.nodes[0]) if given is None else given
    for line in sentences(job, chain, site, left):
        print(line)
    print_candidates(job, chain, site, costs, left, log=past)
    number = next_number(files)
    chosen = choice_of(files, chain.from_link(number), number, seconds=given)
    if chosen is not None:
        print(f"chosen: {chosen.reason}")
    print("\nThe next link, exactly as it would be submitted:\n")
    print(script_text(files, chain, number, chosen), end="")


def explain(job_file: JobFile = None, overrides: Overrides = None) -> None:
    """Say in words how a chain of this job works, and where each figure comes from."""
    from outlast.cluster.chain.journal import choice_words, entries
    from outlast.cluster.chain.planning import files_of, plan_chain, site_now
    from outlast.cluster.chain.starts import starts_nearby, starts_words
    from outlast.job import load_job

    job = load_job(*jobs_arguments(job_file, overrides))
    site = site_now(job)
    files, chain = files_of(job), plan_chain(job, site)
    chosen = choice_words(entries(files))
    lines = [*sentences(job, chain, site), *reasons(chain), starts_words(starts_nearby(files))]
    for line in [*lines, *([f"chosen last: {chosen}"] if chosen else [])]:
        print(line)


def sentences(
    job: Job, chain: ChainPlan, site: Site, left_seconds: float | None = None
) -> list[str]:
    """The plan in words, a sentence a line.

    Args:
        job: As it was given.
        chain: The plan of its chain.
        site: What the cluster allows.
        left_seconds: Of training; None: as the steps so far say.
    """
    from outlast.cluster.chain.planning import costs_of, files_of, links_needed
    from outlast.cluster.chain.progress import run_log
    from outlast.cluster.chain.work import work_seconds
    from outlast.cluster.durations import duration_text

    files = files_of(job)
    log = run_log(files)
    measured = bool(log.restart_seconds)
    costs = costs_of(chain, log.save_seconds, measured_restart=measured)
    found = [f"run {chain.name} in {files.run}, step {log.step} of {chain.steps} saved"]
    usable = chain.usable_seconds()
    nodes = ", then ".join(str(node) for node in chain.nodes)
    length = "the partition's default limit" if usable is None else duration_text(usable)
    if chain.chooses:
        length = f"at most {length}, chosen for each as it is submitted,"
        nodes = " or ".join(str(size) for size in chain.sizes) or nodes
    found.append(
        f"a chain of {_kind_words(chain)}: links of {length} on {nodes} node(s) with "
        f"{chain.tasks_per_node} process(es) each"
    )
    if not site.known:
        found.append("this machine cannot ask Slurm, so the limits of the cluster are not checked")
    found.append(_cost_words(costs))
    if usable is not None:
        share = (costs.restart_seconds + costs.lead_seconds) / usable
        found.append(f"start and lead take {share:.2%} of a link, {_kind(costs)}")
    measured_seconds = work_seconds(files, chain, chain.nodes[0])
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
        "a job that is cancelled stays cancelled; preemption and failed nodes are gone on from",
    ]


def _kind_words(chain: ChainPlan) -> str:
    return {
        "dependent": "jobs that submit their successors",
        "presubmitted": f"{chain.links} jobs submitted at once",
        "array": f"{chain.links} places of one job array",
    }[chain.kind]


def _cost_words(costs: Costs) -> str:
    return (
        f"a link needs {costs.restart_seconds:.3g} s to its first step and {costs.save_seconds:.3g}"
        f" s for a save ({_kind(costs)}); its last save begins {costs.lead_seconds:.3g} s before "
        "its end"
    )


def _kind(costs: Costs) -> str:
    return "measured in this run" if costs.measured else "assumed until measured"
