"""Nodes and time limit of a link, chosen from the live queue as it is submitted.

``slurm.wall_time = "auto"``: every shape that the site allows is predicted on the queue as it is
now (`outlast.cluster.policies`), and the one with which the run ends first is submitted. A link
chooses for its successor as it begins, for what it will leave, and for a start after its own end.
"""

from __future__ import annotations

import dataclasses
import math
import traceback
from typing import TYPE_CHECKING

from outlast.cluster.chain.journal import note_or_print
from outlast.cluster.chain.leading import lead_seconds_of
from outlast.cluster.chain.plan import read_plan
from outlast.cluster.chain.planning import LONGEST_UNLIMITED_SECONDS, costs_of, site_of
from outlast.cluster.chain.progress import run_log
from outlast.cluster.chain.starts import correction_of, predicted_fields, starts_nearby
from outlast.cluster.chain.submission import submit_link
from outlast.cluster.chain.work import SPEED_EXPONENT, step_times, work_seconds
from outlast.cluster.durations import duration_text
from outlast.cluster.slurm.limits import chosen_partitions
from outlast.cluster.slurm.nodes import partitions_now
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.cluster.chain.plan import ChainFiles, ChainPlan
    from outlast.cluster.chain.planning import Costs, Site
    from outlast.cluster.chain.work import StepTimes
    from outlast.cluster.policies.automatic import Choice
    from outlast.cluster.policies.behaviour import Behaviour
    from outlast.cluster.policies.job import MalleableJob
    from outlast.cluster.policies.predict import Correction, StartForecast
    from outlast.cluster.slurm.commands import Patience

WALLS_HOURS = (1, 2, 4, 8, 12, 24, 48)
_SAMPLES = 16
_SAMPLED_JOBS = 8000
"""Waiting jobs in all samples together; of longer queues fewer samples are drawn."""
_FEWEST_SAMPLES = 4


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What one link is submitted with.

    Attributes:
        plan: Of the chain, with this link's nodes and time limit.
        reason: One sentence.
        forecast: Of its start; None where nothing was predicted.
    """

    plan: ChainPlan
    reason: str
    forecast: StartForecast | None = None


def choose_now(
    plan: ChainPlan,
    site: Site,
    job: MalleableJob,
    *,
    behaviour: Behaviour | None = None,
    correction: Correction | None = None,
    after: str = "",
) -> Choice:
    """The best of all shapes of `job` on the live queue.

    Args:
        plan: Of the chain.
        site: What the cluster allows.
        job: What is left; see `job_of`.
        behaviour: Of the queue's users; None: as accounting says, see `behaviour_now`.
        correction: From past predictions.
        after: The running job for whose end the link waits.

    Raises:
        ClusterError: The queue cannot be asked, or no shape makes progress.
    """
    from outlast.cluster.policies.automatic import choose
    from outlast.cluster.policies.decision import Situation
    from outlast.cluster.policies.holes import as_slurm
    from outlast.cluster.policies.job import Limits
    from outlast.cluster.slurm.snapshot import queue_now

    partitions = chosen_partitions(partitions_now(), plan.partition)
    limits = Limits(
        # A link that ends by itself needs no more.
        max_wall_seconds=min(longest_seconds(site), _own_end(plan)),
        max_nodes=site.limits.nodes or 2**31,
        # One place in the queue, unless the job wants fillers; nobody looks for one between links.
        max_jobs=(site.limits.submitted_jobs or 2**31) if plan.filler_nodes and not after else 1,
    )
    situation = Situation(queue=queue_now(partitions), job=job, limits=limits)
    walls = tuple(3600.0 * hour for hour in WALLS_HOURS if 3600.0 * hour <= limits.longest)
    waiting = len(situation.queue.pending_nodes)
    return choose(
        situation,
        behaviour or behaviour_now([partition.name for partition in partitions]),
        walls=walls,
        backfill=as_slurm(situation.queue),
        samples=min(_SAMPLES, max(_SAMPLED_JOBS // max(waiting, 1), _FEWEST_SAMPLES)),
        correction=correction,
        after=int(after) if after.isdigit() else None,
    )


def behaviour_now(partitions: Sequence[str]) -> Behaviour:
    """How much of their limits jobs use, by recent accounting; assumed where that says nothing.

    Whether one may see everybody's jobs there is not known, so what arrives is not taken from it.
    """
    from outlast.cluster.policies.behaviour import Behaviour
    from outlast.cluster.workload.sacct import recent_jobs

    log = recent_jobs(partitions)
    return Behaviour.assumed() if log is None else Behaviour.learnt(log, arrivals=False)


def job_of(
    plan: ChainPlan,
    costs: Costs,
    seconds: float,
    sizes: tuple[int, ...],
    times: StepTimes | None = None,
) -> MalleableJob:
    """A run as the policies see it.

    Args:
        plan: Of its chain; the first of its nodes that is one of `sizes` is the reference.
        costs: Of a link.
        seconds: Of training that are left on the reference.
        sizes: Node counts that it can run on.
        times: Of steps on some of them; None: the speed is assumed.
    """
    from outlast.cluster.policies.job import MalleableJob, PowerSpeed

    reference = next((node for node in plan.nodes if node in sizes), sizes[0])
    return MalleableJob(
        work_seconds=seconds,
        reference_nodes=reference,
        sizes=sizes,
        speed=times.speed(reference) if times else PowerSpeed(reference, SPEED_EXPONENT),
        restart_seconds=costs.restart_seconds,
        save_seconds=costs.save_seconds,
        lead_seconds=max(costs.lead_seconds - costs.save_seconds, 0.0),
    )


def longest_seconds(site: Site) -> float:
    """Longest link that is worth asking for."""
    longest = site.limits.limit_seconds
    return LONGEST_UNLIMITED_SECONDS if longest is None or math.isinf(longest) else longest


def _own_end(plan: ChainPlan) -> float:
    """Seconds after which a link ends by itself, as long as a limit must be."""
    return max(plan.link_seconds, 60.0) if plan.link_seconds else math.inf


def choose_first(
    files: ChainFiles,
    plan: ChainPlan,
    number: int,
    *,
    seconds: float | None = None,
    step: int | None = None,
    after: str = "",
) -> Chosen:
    """What link `number`, the first one that is submitted, should be.

    Args:
        files: Of the chain.
        plan: Of it.
        number: Of the link.
        seconds: Training that is left on the first of the plan's nodes; None: as measured, before
            the first steps as the plan says, or else as much as the longest link could do.
        step: That is done; None: of the newest checkpoint.
        after: The job for whose end it waits.

    Raises:
        ClusterError: Nothing can be chosen; says why.
    """
    try:
        return _chosen(files, plan, number, seconds=seconds, step=step, after=after)
    except ClusterError as error:
        raise ClusterError(
            f'slurm.wall_time = "auto" finds nothing to choose: {error}; or give a time, such as '
            "slurm.wall_time=8h"
        ) from None


def choose_next(files: ChainFiles, link: ChainPlan, number: int, job: str) -> Chosen:
    """What link `number` should be, chosen by the link before it as that begins.

    Args:
        files: Of the chain.
        link: The plan with the nodes and the limit of the running link.
        number: Of the link to choose.
        job: Of the running link.

    Returns:
        A choice; the running link's nodes and limit again where the queue does not answer or the
        choice fails in any other way, and where that link is expected to do all that is left.
    """
    plan = read_plan(files)
    try:
        return _chosen(files, plan, number, after=job, running=link)
    except Exception as error:  # a chain must not end because its next link cannot be chosen
        said = str(error)
        if not isinstance(error, ClusterError):
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}"
        return _as_before(plan, link, number, f"nothing can be chosen now ({said})")


def _on_reference(
    plan: ChainPlan, reference: int, seconds: float, times: StepTimes | None
) -> float:
    """Training in seconds on `reference` nodes, which was given for the plan's first nodes."""
    from outlast.cluster.policies.job import PowerSpeed

    first = plan.nodes[0]
    speed = times.speed(first) if times else PowerSpeed(first, SPEED_EXPONENT)
    return seconds / speed(reference)


def _as_before(plan: ChainPlan, link: ChainPlan, number: int, why: str) -> Chosen:
    nodes = link.nodes[0] if plan.sizes else plan.nodes_of(number)
    limit = "" if link.limit_seconds is None else f" for {duration_text(link.limit_seconds)}"
    reason = f"{nodes} node(s){limit}, as the link before: {why}"
    shaped = dataclasses.replace(
        plan, nodes=(nodes,), limit_seconds=link.limit_seconds, reason=reason
    )
    return Chosen(shaped, reason)


def submit_chosen(
    files: ChainFiles,
    chosen: Chosen,
    number: int,
    *,
    after: str = "",
    lead_seconds: float | None = None,
    patience: Patience | None = None,
) -> str:
    """Submit a link with what was chosen, and write down what was predicted; see `submit_link`."""
    plan = chosen.plan
    if lead_seconds is None:
        saves, usable = run_log(files).save_seconds, plan.usable_seconds() or 0.0
        lead_seconds = lead_seconds_of(plan, saves, at_risk_seconds=usable, hard_end=True)
    job = submit_link(
        files, plan, number, after=after, lead_seconds=lead_seconds, patience=patience
    )
    note_or_print(
        files,
        "chosen",
        job=job,
        number=number,
        after=after,
        nodes=plan.nodes[0],
        wall_seconds=plan.limit_seconds,
        reason=chosen.reason,
        **({} if chosen.forecast is None else predicted_fields(chosen.forecast)),
    )
    return job


def _chosen(
    files: ChainFiles,
    plan: ChainPlan,
    number: int,
    *,
    seconds: float | None = None,
    step: int | None = None,
    after: str = "",
    running: ChainPlan | None = None,
) -> Chosen:
    site = site_of(plan.partition, plan.qos)
    if not site.known:
        raise ClusterError("sinfo, which says what the partition allows, cannot be asked here")
    log = run_log(files)
    costs = costs_of(plan, log.save_seconds, measured_restart=bool(log.restart_seconds))
    reference = plan.nodes_of(number)
    times = step_times(files, plan)
    measured = seconds and _on_reference(plan, reference, seconds, times)
    if measured is None:
        measured = work_seconds(files, plan, reference, step=step, times=times)
    if measured is None and plan.work_seconds:
        measured = _on_reference(plan, reference, plan.work_seconds, times)
    longest = longest_seconds(site)
    # As much as the longest link could do, where nobody knows.
    left = max(longest - costs.restart_seconds - costs.save_seconds, 60.0)
    work = left if measured is None else measured
    job = job_of(plan, costs, work, plan.sizes or (reference,), times)
    if running is not None and measured is not None:
        nodes = running.nodes[0]
        done = job.progress(nodes, running.usable_seconds() or longest)
        if done >= job.work_seconds:
            return _as_before(plan, running, number, "that is expected to do all that is left")
        job = job.after(done, nodes)
    choice = choose_now(
        plan,
        site,
        job,
        correction=correction_of(starts_nearby(files)),
        after=after,
    )
    best, reason = choice.best, choice.reason
    if measured is None:
        reason += "; no step is measured yet, so this is for as much work as the longest link does"
    shaped = plan.shaped(best.nodes, best.wall_seconds)
    return Chosen(dataclasses.replace(shaped, reason=reason), reason, best.start)
