"""Fillers on the live queue: while a link waits, a smaller job trains in a backfill window.

The link keeps its place. A filler resumes from the same checkpoint, on nodes that are free for long
enough by the scheduler's own rules, and hands over: when the link starts it finds the filler at the
fence, asks it to save and end, and resumes from there. Nobody watches the queue between jobs: a
filler is looked for when a chain is submitted or resumed, and when a filler has ended. A link that
waits for the one before has no place in the queue yet, so none is looked for there.
The policy is `outlast.cluster.policies.anchor_filler`, which is simulated on logs as well.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.cluster.chain.files import entries, finished, is_filler, of_kind, read_plan, run_log
from outlast.cluster.chain.margin import lead_seconds_of
from outlast.cluster.chain.submission import submit_link
from outlast.cluster.slurm.jobs import is_live, is_waiting, queued
from outlast.cluster.slurm.partitions import chosen_partitions, partitions_now

if TYPE_CHECKING:
    from outlast.cluster.chain.files import ChainFiles, ChainPlan
    from outlast.cluster.policies.anchor_filler import AnchorFiller
    from outlast.cluster.policies.decision import OwnJob, Situation
    from outlast.cluster.slurm.jobs import QueuedJob


SPEED_EXPONENT = 0.9
"""How the speed grows with nodes beyond the counts that were measured."""
_LAST_STEPS = 50


@dataclass(frozen=True)
class StepTimes:
    """Measured seconds per step.

    Attributes:
        seconds: Of a step, by the number of processes; at least one.
        tasks_per_node: Processes of a node.
    """

    seconds: dict[int, float]
    tasks_per_node: int

    def seconds_on(self, nodes: int) -> float:
        """Of a step on so many nodes: measured, interpolated, or beyond by `SPEED_EXPONENT`."""
        from outlast.cluster.policies.decision import TableSpeed

        points = tuple((count, 1.0 / second) for count, second in sorted(self.seconds.items()))
        return 1.0 / TableSpeed(points, beyond=SPEED_EXPONENT)(nodes * self.tasks_per_node)

    def speed(self, reference: int) -> Callable[[int], float]:
        """The speed on node counts, relative to that on `reference`."""
        base = self.seconds_on(reference)
        return lambda nodes: base / self.seconds_on(nodes)


def step_times(files: ChainFiles, plan: ChainPlan) -> StepTimes | None:
    """Seconds per step from the run's records, or as reported by the program; None without either.

    Of each number of processes the newest steps count.
    """
    found = _recorded_steps(files) or _steps_of_links(files)
    return StepTimes(found, plan.tasks_per_node) if found else None


def work_seconds(
    files: ChainFiles,
    plan: ChainPlan,
    nodes: int,
    *,
    step: int | None = None,
    times: StepTimes | None = None,
) -> float | None:
    """Training that is left, in seconds on `nodes`; None before any step was measured.

    Args:
        files: Of the chain.
        plan: Of the chain.
        nodes: Of the link whose seconds are meant.
        step: What is done; None: the newest checkpoint.
        times: Of steps, where they were read already.
    """
    log = run_log(files)
    steps = log.steps or plan.steps
    times = times or step_times(files, plan)
    if times is None or not steps:
        return None
    left = max(steps - (log.step if step is None else step), 0)
    return float(left * times.seconds_on(nodes))


def _recorded_steps(files: ChainFiles) -> dict[int, float]:
    """Seconds of a step by processes, by the run's own records."""
    from outlast.errors import OutlastError
    from outlast.records import read_run

    try:
        run = read_run(files.run)
        sizes = {attempt.number: attempt.world_size for attempt in run.attempts}
        steps = run.steps()
    except OutlastError:
        return {}
    newest: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_LAST_STEPS))
    for record, event in steps:
        newest[sizes[record.attempt]].extend(event.step_seconds)
    means = {size: statistics.mean(item) for size, item in newest.items() if item}
    return {size: mean for size, mean in means.items() if mean > 0.0}


def _steps_of_links(files: ChainFiles) -> dict[int, float]:
    """The same of the newest link of each size that has saved a step, its start included."""
    journal = entries(files)
    ended = {str(entry["job"]): entry for entry in of_kind(journal, "ended")}
    found: dict[int, float] = {}
    for start in of_kind(journal, "started"):
        end = ended.get(str(start["job"]))
        steps = int(end["step"]) - int(start["step"]) if end is not None else 0
        if end is not None and steps > 0 and float(end["seconds"]) > 0.0:
            found[int(start.get("processes", 1))] = float(end["seconds"]) / steps
    return found


def filler_plan(plan: ChainPlan, nodes: int, limit_seconds: float) -> ChainPlan:
    """The plan as one filler sees it."""
    return dataclasses.replace(
        plan, kind="filler", nodes=(nodes,), limit_seconds=limit_seconds, filler_nodes=()
    )


def submit_filler(files: ChainFiles) -> str | None:
    """Submit a filler if the chain wants fillers, its link waits and there is a backfill window.

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


def reason_to_yield(
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
    from outlast.cluster.policies.decision import Limits, MalleableJob, PowerSpeed, Situation
    from outlast.cluster.slurm.snapshot import queue_now

    partitions = chosen_partitions(partitions_now(), plan.partition)
    main = own[0].nodes
    log, times = run_log(files), step_times(files, plan)
    longest = min((partition.limit_seconds for partition in partitions), default=math.inf)
    # Training that is left, in seconds on the waiting link's nodes.
    usable = plan.usable_seconds() or 86400.0
    room = max(usable - plan.restart_seconds - plan.save_seconds, 60.0)
    measured = work_seconds(files, plan, main, times=times)
    job = MalleableJob(
        work_seconds=room if measured is None else measured,
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
