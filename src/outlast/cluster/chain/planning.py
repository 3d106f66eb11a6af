"""The plan of a chain, from a job and the limits of the cluster; or a refusal with the figures."""

from __future__ import annotations

import math
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.cluster.chain.files import ChainFiles, ChainPlan, chain_files, run_log
from outlast.cluster.chain.margin import ASSUMED_SAVE_SECONDS, lead_seconds_of
from outlast.cluster.slurm.commands import SlurmMissingError, SlurmRefusedError
from outlast.cluster.slurm.partitions import (
    Limits,
    array_size_now,
    check_request,
    chosen_partitions,
    limits_of,
    partitions_now,
    quality_now,
)
from outlast.cluster.staging.job import job_directives
from outlast.durations import duration_text, limit_seconds
from outlast.errors import ClusterError
from outlast.job.sections import CHOSEN

if TYPE_CHECKING:
    from outlast.job import Job

ASSUMED_RESTART_SECONDS = 60.0
LONGEST_UNLIMITED_SECONDS = 7 * 86400.0
"""Of a link where the partition has no limit."""


@dataclass(frozen=True)
class Site:
    """Limits of the partitions that a job may use, as the cluster states them; see `Limits`.

    Attributes:
        limits: Of the job.
        preemptible: Whether others can push jobs out there.
        known: Whether the cluster could be asked at all.
    """

    limits: Limits
    preemptible: bool = False
    known: bool = True


UNKNOWN_SITE = Site(Limits(), known=False)


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


def site_now(job: Job) -> Site:
    """Limits of the cluster for a job; see `site_of`."""
    return site_of(job.slurm.partition, job.slurm.qos, array=job.slurm.chain == "array")


def site_of(partition: str, qos: str, *, array: bool = False) -> Site:
    """Ask the cluster; a machine without sinfo gives `UNKNOWN_SITE`.

    Args:
        partition: One, several separated by commas, or empty for the default.
        qos: Empty for the partition's own.
        array: Whether the size of arrays matters.

    Raises:
        ClusterError: The partition is unknown, or the controller does not answer.
    """
    try:
        partitions = chosen_partitions(partitions_now(), partition)
    except (SlurmMissingError, SlurmRefusedError):
        return UNKNOWN_SITE
    quality_name = qos or next((partition.qos for partition in partitions if partition.qos), "")
    quality = quality_now(quality_name) if quality_name else None
    found = limits_of(partitions, quality)
    array_size = array_size_now() if array else None
    return Site(
        Limits(
            found.limit_seconds,
            found.default_seconds,
            found.nodes,
            found.submitted_jobs,
            array_size,
        ),
        preemptible=any(partition.preempts not in ("OFF", "") for partition in partitions),
    )


def run_path(job: Job) -> Path:
    """The run directory, absolute: links do not run where the chain was submitted."""
    return (Path(job.run.directory) / job.run.name).resolve()


def plan_chain(job: Job, site: Site) -> ChainPlan:
    """The plan of a chain that trains `job`.

    Raises:
        ClusterError: The cluster does not allow it, a link would have no time to train, a file
            that a burst buffer is to copy is not there, or a limit is to be chosen and the cluster
            cannot be asked.
    """
    slurm = job.slurm
    limit = wall_seconds(job, site)
    chooses = slurm.wall_time == CHOSEN
    sizes = _sizes(job, site) if chooses else ()
    files = chain_files(run_path(job))
    log = run_log(files)
    restart = slurm.restart_seconds or max(log.restart_seconds[-3:], default=0.0)
    plan = ChainPlan(
        chain=uuid.uuid4().hex[:8],
        name=job.run.name,
        kind=slurm.chain,
        nodes=_reference(job, sizes) if sizes else tuple(slurm.nodes),
        tasks_per_node=slurm.tasks_per_node,
        limit_seconds=limit,
        directory=str(Path.cwd()),
        python=slurm.python or sys.executable,
        steps=job.train.steps,
        link_seconds=slurm.link_seconds,
        links=slurm.links,
        attempts_without_progress=slurm.attempts_without_progress,
        lead_seconds=slurm.lead_seconds,
        cpus_per_task=slurm.cpus_per_task,
        gpus_per_node=slurm.gpus_per_node,
        partition=slurm.partition,
        account=slurm.account,
        qos=slurm.qos,
        directives=(*slurm.directives, *job_directives(job)),
        setup=tuple(slurm.setup),
        command=slurm.command,
        filler_nodes=tuple(slurm.filler_nodes),
        filler_seconds=60.0 * slurm.filler_minutes,
        preemptible=site.preemptible,
        restart_seconds=restart or ASSUMED_RESTART_SECONDS,
        save_seconds=_median(log.save_seconds) or slurm.lead_seconds or ASSUMED_SAVE_SECONDS,
        chooses=chooses,
        sizes=sizes,
    )
    at_once = plan.links if plan.kind != "dependent" else min(2, plan.links or 2)
    check_request(
        site.limits, limit_seconds=limit or 0.0, nodes=plan.nodes, jobs=at_once, kind=plan.kind
    )
    check_room(plan, costs_of(plan, log.save_seconds, measured_restart=bool(restart)))
    return plan


def wall_seconds(job: Job, site: Site) -> float | None:
    """Time limit of a link, the longest where it is chosen; None where nobody names one.

    If the wait for a link grows with its limit (or not at all), the longest limit is the best: each
    link pays its wait, its start and its last save once.
    """
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
    longest = site.limits.limit_seconds
    if longest is None and chooses:
        return LONGEST_UNLIMITED_SECONDS
    if longest is None:
        return None
    return min(longest, LONGEST_UNLIMITED_SECONDS)


def _sizes(job: Job, site: Site) -> tuple[int, ...]:
    """The node counts that links may be given, ascending; none where those of the job are fixed.

    Raises:
        ClusterError: The partition has too few nodes for any of them.
    """
    asked = sorted(set(job.slurm.sizes))
    most = site.limits.nodes
    found = tuple(number for number in asked if most is None or number <= most)
    if asked and not found:
        raise ClusterError(
            f"slurm.sizes = {asked}: one job may have {most} nodes there; add smaller numbers"
        )
    return found


def _reference(job: Job, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The node count that one long job would have: the job's own if it is among `sizes`."""
    own = [node for node in job.slurm.nodes if node in sizes]
    return (own[0] if own else sizes[-1],)


def costs_of(
    plan: ChainPlan, save_seconds: list[float], *, measured_restart: bool = False
) -> Costs:
    """Overhead of a link of `plan` besides training."""
    usable = plan.usable_seconds() or math.inf
    hard = plan.limit_seconds is not None and usable >= plan.limit_seconds
    lead = lead_seconds_of(plan, save_seconds, at_risk_seconds=usable, hard_end=hard)
    save = _median(save_seconds) or plan.save_seconds
    return Costs(plan.restart_seconds, save, lead, bool(save_seconds) and measured_restart)


def check_room(plan: ChainPlan, costs: Costs) -> None:
    """Refuse a link that is over before it has trained.

    Raises:
        ClusterError: With what the link has and what it needs.
    """
    usable = plan.usable_seconds()
    if usable is None:
        return
    needed = costs.restart_seconds + costs.save_seconds
    if usable > needed:
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


def files_of(job: Job) -> ChainFiles:
    """The chain's files of a job's run."""
    return chain_files(run_path(job))


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0
