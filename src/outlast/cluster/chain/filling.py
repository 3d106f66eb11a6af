"""Fillers on the live queue: while a link waits, a smaller job trains in a hole of the queue.

The link keeps its place. A filler goes on from the same checkpoint, on nodes that are free for long
enough by the scheduler's own rules, and hands over: when the link starts it finds the filler at the
fence, asks it to save and end, and goes on from there. Nobody watches the queue between jobs: a
filler is looked for when a chain is submitted or resumed, and when a filler has ended. A link that
waits for the one before has no place in the queue yet, so none is looked for there.

The policy is `outlast.cluster.policies.anchor_filler`, which is simulated on logs as well.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import TYPE_CHECKING

from outlast.cluster.chain.journal import entries, finished, is_filler, of_kind
from outlast.cluster.chain.leading import lead_seconds_of
from outlast.cluster.chain.plan import read_plan
from outlast.cluster.chain.progress import run_log
from outlast.cluster.chain.submission import submit_link
from outlast.cluster.chain.work import SPEED_EXPONENT, step_times, work_seconds
from outlast.cluster.slurm.limits import chosen_partitions
from outlast.cluster.slurm.nodes import partitions_now
from outlast.cluster.slurm.queue import queued
from outlast.cluster.slurm.states import is_live, is_waiting

if TYPE_CHECKING:
    from outlast.cluster.chain.plan import ChainFiles, ChainPlan
    from outlast.cluster.chain.work import StepTimes
    from outlast.cluster.policies.anchor_filler import AnchorFiller
    from outlast.cluster.policies.decision import OwnJob, Situation
    from outlast.cluster.slurm.queue import QueuedJob


def filler_plan(plan: ChainPlan, nodes: int, limit_seconds: float) -> ChainPlan:
    """The plan as one filler sees it."""
    return dataclasses.replace(
        plan, kind="filler", nodes=(nodes,), limit_seconds=limit_seconds, filler_nodes=()
    )


def fill(files: ChainFiles) -> str | None:
    """Submit a filler if the chain wants fillers, its link waits and there is a hole.

    Returns:
        The filler's number, or None.

    Raises:
        ClusterError: The queue cannot be asked, or sbatch refuses.
    """
    plan = read_plan(files)
    journal = entries(files)
    if not plan.filler_nodes or plan.kind != "dependent" or finished(journal) is not None:
        return None
    submitted = of_kind(journal, "submitted")
    roles = {str(entry["job"]): is_filler(entry) for entry in submitted}
    jobs = [job for job in queued(list(roles)) if is_waiting(job.state) or is_live(job.state)]
    waiting = [job for job in jobs if not roles[job.number] and is_waiting(job.state)]
    others = [job for job in jobs if roles[job.number] and is_waiting(job.state)]
    # A link that waits for a running one has no place in the queue to keep.
    if not waiting or others or "dependency" in waiting[0].reason.lower():
        return None
    main = waiting[0]
    number = next(int(entry["number"]) for entry in submitted if str(entry["job"]) == main.number)
    decision = _policy().decide(situation_now(files, plan, [_own(main, plan)]))
    for submission in decision.submit:
        if submission.role == "filler":
            used = filler_plan(plan, submission.nodes, submission.wall_seconds)
            lead = lead_seconds_of(
                plan,
                run_log(files).save_seconds,
                at_risk_seconds=submission.wall_seconds,
                hard_end=True,
            )
            return submit_link(files, used, number, lead_seconds=lead)
    return None


def in_the_way(
    files: ChainFiles, job: str, filler: ChainPlan, limit_seconds: float, began: float
) -> str:
    """Why a running filler should end so that another job can start on its nodes, or nothing.

    Args:
        files: Of the chain.
        job: The filler's number.
        filler: Its plan.
        limit_seconds: Its time limit.
        began: When its script began, seconds since the epoch.

    Raises:
        ClusterError: The queue cannot be asked.
    """
    from outlast.cluster.policies.decision import OwnJob

    plan = read_plan(files)
    roles = {str(entry["job"]): is_filler(entry) for entry in of_kind(entries(files), "submitted")}
    waiting = [
        job for job in queued(list(roles)) if not roles[job.number] and is_waiting(job.state)
    ]
    if not waiting:
        return ""
    own = OwnJob(
        number=int(job),
        role="filler",
        nodes=filler.nodes[0],
        limit_seconds=limit_seconds,
        started_seconds=began,
    )
    situation = situation_now(files, plan, [_own(waiting[0], plan), own])
    decision = _policy().decide(situation)
    return decision.reason if int(job) in decision.hand_over else ""


def situation_now(files: ChainFiles, plan: ChainPlan, own: list[OwnJob]) -> Situation:
    """The queue now and what is left to train, as a policy sees it."""
    from outlast.cluster.policies.decision import Situation
    from outlast.cluster.policies.job import Limits, MalleableJob, PowerSpeed
    from outlast.cluster.slurm.snapshot import queue_now

    partitions = chosen_partitions(partitions_now(), plan.partition)
    main = own[0].nodes
    log, times = run_log(files), step_times(files, plan)
    longest = min((partition.limit_seconds for partition in partitions), default=math.inf)
    job = MalleableJob(
        work_seconds=_work_seconds(files, plan, main, times),
        reference_nodes=main,
        sizes=tuple(sorted({main, *plan.filler_nodes})),
        speed=times.speed(main) if times else PowerSpeed(main, SPEED_EXPONENT),
        restart_seconds=plan.restart_seconds,
        save_seconds=statistics.median(log.save_seconds) if log.save_seconds else plan.save_seconds,
        lead_seconds=0.0,
    )
    limits = Limits(max_wall_seconds=longest, min_wall_seconds=plan.filler_seconds)
    return Situation(queue=queue_now(partitions), job=job, limits=limits, own=tuple(own))


def _policy() -> AnchorFiller:
    from outlast.cluster.policies.anchor_filler import AnchorFiller

    return AnchorFiller(backfill="conservative")


def _own(job: QueuedJob, plan: ChainPlan) -> OwnJob:
    from outlast.cluster.policies.decision import OwnJob

    limit = job.limit_seconds or plan.limit_seconds or math.inf
    return OwnJob(number=int(job.number), role="main", nodes=job.nodes, limit_seconds=limit)


def _work_seconds(files: ChainFiles, plan: ChainPlan, main: int, times: StepTimes | None) -> float:
    """Training that is left, in seconds on the waiting link's nodes.

    Before any step was measured, what fits into that link.
    """
    usable = plan.usable_seconds() or 86400.0
    room = max(usable - plan.restart_seconds - plan.save_seconds, 60.0)
    measured = work_seconds(files, plan, main, times=times)
    return room if measured is None else measured
