"""The plan of a chain, from a job and the limits of the cluster; or a refusal with the figures."""

from __future__ import annotations

import dataclasses
import math
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.cluster.chain_files import ChainFiles, ChainPlan, chain_files, run_log
from outlast.cluster.slurm import site_of
from outlast.cluster.stopping import ASSUMED_SAVE_SECONDS, lead_seconds_of
from outlast.durations import duration_text, limit_seconds
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from outlast.cluster.chain_files import RunLog
    from outlast.cluster.slurm import SiteLimits
    from outlast.job import Job

ASSUMED_RESTART_SECONDS = 60.0
LONGEST_UNLIMITED_SECONDS = 7 * 86400.0
"""Of a link where the partition has no limit."""


@dataclass(frozen=True)
class Costs:
    """Overhead of a link besides training.

    Attributes:
        restart_seconds: From the beginning of its script to its first step.
        save_seconds: Median of its saves.
        lead_seconds: How long before its end the last save begins.
        measured: Whether these were measured in this run, or assumed.
    """

    restart_seconds: float
    save_seconds: float
    lead_seconds: float
    measured: bool


def site_now(job: Job) -> SiteLimits:
    """Limits of the cluster for a job; see `site_of`."""
    return site_of(job.slurm.partition, job.slurm.qos, array=job.slurm.chain == "array")


def run_path(job: Job) -> Path:
    """The run directory, absolute: links do not run where the chain was submitted."""
    return (Path(job.run.directory) / job.run.name).resolve()


def files_of(job: Job) -> ChainFiles:
    """The chain's files of a job's run."""
    return chain_files(run_path(job))


def plan_chain(job: Job, site: SiteLimits) -> ChainPlan:
    """The plan of a chain that trains `job`.

    Raises:
        ClusterError: The cluster does not allow it, a link would have no time to train, a file
            that a burst buffer is to copy is not there, or a limit is to be chosen and the cluster
            cannot be asked.
    """
    # A running link, which plans nothing, does not wait for these.
    from outlast.cluster.staging import job_directives
    from outlast.job.sections import CHOSEN

    slurm = job.slurm
    chooses = slurm.wall_time == CHOSEN
    log = run_log(files_of(job))
    limit = wall_seconds(job, site)
    sizes: tuple[int, ...] = ()
    if chooses and slurm.sizes:
        asked = sorted(set(slurm.sizes))
        sizes = tuple(number for number in asked if site.nodes is None or number <= site.nodes)
        if not sizes:
            raise ClusterError(
                f"slurm.sizes = {asked}: one job may have {site.nodes} nodes there; add smaller "
                "numbers"
            )
    # The node count that one long job would have is the job's own if it is among the sizes.
    own = [node for node in slurm.nodes if node in sizes]
    restart = slurm.restart_seconds or max(log.restart_seconds[-3:], default=0.0)
    # Most settings have the same name in the section [slurm].
    names = {field.name for field in dataclasses.fields(ChainPlan)}
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in slurm.model_dump(include=names).items()
    }
    settings |= {
        "chain": uuid.uuid4().hex[:8],
        "name": job.run.name,
        "kind": slurm.chain,
        "nodes": ((own[0] if own else sizes[-1]),) if sizes else tuple(slurm.nodes),
        "limit_seconds": limit,
        "directory": str(Path.cwd()),
        "python": slurm.python or sys.executable,
        "steps": job.train.steps,
        "directives": (*slurm.directives, *job_directives(job)),
        "filler_seconds": 60.0 * slurm.filler_minutes,
        "preemptible": site.preemptible,
        "restart_seconds": restart or ASSUMED_RESTART_SECONDS,
        "save_seconds": _median(log.save_seconds) or slurm.lead_seconds or ASSUMED_SAVE_SECONDS,
        "chooses": chooses,
        "sizes": sizes,
    }
    plan = ChainPlan(**settings)
    check_request(plan, site)
    check_room(plan, costs_of(plan, log))
    return plan


def wall_seconds(job: Job, site: SiteLimits) -> float | None:
    """Time limit of a link, the longest where it is chosen; None where nobody names one.

    If the wait for a link grows with its limit (or not at all), the longest limit is the best: each
    link pays its wait, its start and its last save once.
    """
    from outlast.job.sections import CHOSEN

    chooses = job.slurm.wall_time == CHOSEN
    if job.slurm.wall_time and not chooses:
        given = limit_seconds(job.slurm.wall_time)
        if not given > 0.0:
            raise ClusterError(
                f'slurm.wall_time = "{job.slurm.wall_time}" is no time at all: give a time such as '
                "8h, or leave it out for the longest that the partition allows"
            )
        return given
    if chooses and not site.known:
        raise ClusterError(
            f'slurm.wall_time = "{CHOSEN}" chooses from the live queue, and this machine cannot '
            "ask Slurm (sinfo, squeue): submit on a login node, or give a time, such as 8h"
        )
    if site.limit_seconds is None and not chooses:
        return None
    return min(site.limit_seconds or math.inf, LONGEST_UNLIMITED_SECONDS)


def costs_of(plan: ChainPlan, log: RunLog) -> Costs:
    """Overhead of a link of `plan` besides training, by what `log` has of the links so far."""
    usable = plan.usable_seconds() or math.inf
    hard = plan.limit_seconds is not None and usable >= plan.limit_seconds
    lead = lead_seconds_of(plan, log.save_seconds, at_risk_seconds=usable, hard_end=hard)
    save = _median(log.save_seconds) or plan.save_seconds
    measured = bool(log.save_seconds) and bool(log.restart_seconds)
    return Costs(plan.restart_seconds, save, lead, measured)


def check_request(plan: ChainPlan, site: SiteLimits) -> None:
    """Refuse what Slurm would refuse, or leave waiting for ever.

    Raises:
        ClusterError: With the setting, its value and the limit.
    """
    limit, nodes = plan.limit_seconds or 0.0, max(plan.nodes)
    if site.limit_seconds is not None and limit > site.limit_seconds:
        raise ClusterError(
            f"slurm.wall_time = {duration_text(limit)} is more than the "
            f"{duration_text(site.limit_seconds)} that the partition or QoS allows: ask for no "
            "more, the chain continues with another link"
        )
    if site.nodes is not None and nodes > site.nodes:
        raise ClusterError(
            f"slurm.nodes = {nodes} is more than the {site.nodes} nodes that one job may have there"
        )
    # In the queue at once.
    jobs = plan.links if plan.kind != "dependent" else min(2, plan.links or 2)
    if site.submitted_jobs is not None and jobs > site.submitted_jobs:
        remedy = (
            "choose another slurm.qos, or set slurm.links = 1 and submit again after each link"
            if plan.kind == "dependent"
            else 'lower slurm.links, or set slurm.chain = "dependent", which needs two'
        )
        raise ClusterError(
            f"{jobs} jobs at once are more than the {site.submitted_jobs} that the QoS lets a user "
            f"submit: {remedy}"
        )
    if plan.kind == "array" and site.array_size is not None and jobs > site.array_size:
        raise ClusterError(
            f"slurm.links = {jobs} is more than the {site.array_size} places of an array here "
            "(MaxArraySize): lower it"
        )


def check_room(plan: ChainPlan, costs: Costs) -> None:
    """Refuse a link that is over before it has trained.

    Raises:
        ClusterError: With what the link has and what it needs.
    """
    usable = plan.usable_seconds()
    needed = costs.restart_seconds + costs.save_seconds
    if usable is None or usable > needed:
        return
    which = (
        f"slurm.link_seconds = {plan.link_seconds:g}"
        if plan.link_seconds == usable
        else f"slurm.wall_time = {duration_text(usable)}"
    )
    how = (
        "measured in this run"
        if costs.measured
        else "as the job says or assumed: slurm.restart_seconds, slurm.lead_seconds"
    )
    raise ClusterError(
        f"{which} leaves no time to train: a link needs {costs.restart_seconds:.3g} s to its first "
        f"step and {costs.save_seconds:.3g} s for its last save ({how}), {needed:.3g} s in all; "
        "give it several times that"
    )


def links_needed(plan: ChainPlan, costs: Costs, train_seconds: float | None) -> int | None:
    """Number of links for `train_seconds` of training; None where that is not known."""
    usable = plan.usable_seconds()
    if train_seconds is None or usable is None:
        return None
    room = usable - costs.restart_seconds - costs.lead_seconds
    return max(math.ceil(train_seconds / room), 1) if room > 0.0 else None


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0
