"""Nodes and time limits of links and fillers, chosen from the live queue.

``slurm.wall_time = "auto"``: every shape that the site allows is predicted on the queue as it is
now (`outlast.cluster.policies`), and the one with which the run ends first is submitted. A link
chooses for its successor as it begins, for what it will leave, and for a start after its own end.

The prediction made when a link was submitted stands in the journal as it came out of the simulated
queue, uncorrected; the link's own beginning says what came true. The errors of all chains in one
folder of runs are one sample: they meet the same queue.

A filler is a smaller job that trains in a backfill window while a link waits. The link keeps its
place. A filler resumes from the same checkpoint, on nodes that are free for long enough by the
scheduler's own rules, and hands over: when the link starts it finds the filler at the fence, asks
it to save and end, and resumes from there. Nobody watches the queue between jobs: a filler is
looked for when a chain is submitted or resumed, and when a filler has ended. A link that waits for
the one before has no place in the queue yet, so none is looked for there. The policy is
`AnchorFiller`, which is simulated on logs as well.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import traceback
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.cluster.chain_files import (
    by_job,
    chain_files,
    entries,
    finished,
    is_filler,
    note_or_print,
    of_kind,
    read_plan,
    run_log,
)
from outlast.cluster.planning import LONGEST_UNLIMITED_SECONDS, costs_of
from outlast.cluster.slurm import (
    PATIENT,
    Patience,
    chosen_partitions,
    is_live,
    is_waiting,
    partitions_now,
    queued,
    site_of,
)
from outlast.cluster.submission import submit_link
from outlast.durations import duration_text
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.cluster.chain_files import ChainFiles, ChainPlan, Entry
    from outlast.cluster.planning import Costs
    from outlast.cluster.policies import (
        Behaviour,
        Choice,
        Correction,
        Decision,
        MalleableJob,
        OwnJob,
        StartForecast,
    )
    from outlast.cluster.slurm import QueuedJob, SiteLimits

FEWEST = 5
"""Past predictions from which on the next ones are corrected: one or two starts are an accident."""
NEWEST = 60
"""Older ones than so many are of another queue."""
SPEED_EXPONENT = 0.9
"""How the speed grows with nodes beyond the counts that were measured."""
_LAST_STEPS = 50
WALLS_HOURS = (1, 2, 4, 8, 12, 24, 48)
_SAMPLES = 16
_SAMPLED_JOBS = 8000
"""Waiting jobs in all samples together; of longer queues fewer samples are drawn."""
_FEWEST_SAMPLES = 4


@dataclass(frozen=True)
class PastStart:
    """A prediction and what came of it.

    Attributes:
        time: When it was made, seconds since the epoch.
        forecast: What was predicted, uncorrected; of the waits the quantiles and the longest.
        waited_seconds: From when the link could start to when it did.
    """

    time: float
    forecast: StartForecast
    waited_seconds: float


def past_starts(journal: Sequence[Entry]) -> list[PastStart]:
    """Predictions of one chain whose links have begun, oldest first."""
    import numpy as np

    from outlast.cluster.policies import StartForecast

    started, ended = by_job(journal, "started"), by_job(journal, "ended")
    found = []
    for entry in of_kind(journal, "chosen"):
        job, after, waits = str(entry["job"]), str(entry.get("after", "")), entry.get("waits")
        # Of a link that ended without a word nobody knows since when the next one could start.
        if job not in started or not waits or (after and after not in ended):
            continue
        ready = max(float(entry["time"]), float(ended[after]["time"]) if after else 0.0)
        told = np.array([float(wait) for wait in waits])
        p10, p50, p90, _ = told.tolist()
        shape = int(entry["nodes"]), float(entry["wall_seconds"])
        forecast = StartForecast(*shape, told, p10, p50, p90)
        waited = max(float(started[job]["began"]) - ready, 0.0)
        found.append(PastStart(float(entry["time"]), forecast, waited))
    return found


def starts_nearby(files: ChainFiles) -> list[PastStart]:
    """Predictions of this chain and of those whose runs lie beside this one, the newest `NEWEST`.

    Those that were certain to start at once teach nothing and are left out; so are journals that
    cannot be read.
    """
    try:
        journals = sorted(files.run.parent.glob(f"*/{files.path.name}/{files.journal.name}"))
    except OSError:
        journals = [files.journal]
    found: list[PastStart] = []
    for journal in journals:
        try:
            found += past_starts(entries(chain_files(journal.parent.parent)))
        except (ClusterError, KeyError, TypeError, ValueError):
            continue
    uncertain = [start for start in found if not start.forecast.certain]
    return sorted(uncertain, key=lambda start: start.time)[-NEWEST:]


def correction_of(past: Sequence[PastStart]) -> Correction | None:
    """Correction of the next predictions by past errors; None with fewer than `FEWEST`."""
    from outlast.cluster.policies import Correction

    if len(past) < FEWEST:
        return None
    waited = [start.waited_seconds for start in past]
    return Correction.learnt([start.forecast for start in past], waited)


def starts_words(past: Sequence[PastStart]) -> str:
    """One sentence about the accuracy of earlier predictions."""
    if not past:
        return (
            f"no predicted start of this folder's runs has been seen yet; from {FEWEST} on, "
            "predictions are corrected by past errors"
        )
    early = sum(start.waited_seconds <= start.forecast.p90_seconds for start in past)
    seen = (
        f"{len(past)} predicted start(s) of this folder's runs were seen: {early} came by the P90 "
        "that was predicted"
    )
    found = correction_of(past)
    if found is None:
        return f"{seen}; from {FEWEST} on, predictions are corrected by past errors"
    middle, late = math.exp(found.p50), math.exp(found.p90)
    return (
        f"{seen}; predictions are corrected by that (waits and 5 min times {middle:.2g} at P50, "
        f"{late:.2g} at P90)"
    )


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
        from outlast.cluster.policies import TableSpeed

        points = tuple((count, 1.0 / second) for count, second in sorted(self.seconds.items()))
        return 1.0 / TableSpeed(points, beyond=SPEED_EXPONENT)(nodes * self.tasks_per_node)


def step_times(files: ChainFiles, plan: ChainPlan) -> StepTimes | None:
    """Seconds per step from the run's records, or as reported by the program; None without either.

    Of each number of processes the newest steps count.
    """
    found = _recorded_steps(files)
    if not found:
        # The newest link of each size that has saved a step, its start included.
        journal = entries(files)
        ended = by_job(journal, "ended")
        for start in of_kind(journal, "started"):
            end = ended.get(str(start["job"]), {"step": start["step"], "seconds": 0.0})
            steps = int(end["step"]) - int(start["step"])
            if steps > 0 and float(end["seconds"]) > 0.0:
                found[int(start.get("processes", 1))] = float(end["seconds"]) / steps
    return StepTimes(found, plan.tasks_per_node) if found else None


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


def speed_of(times: StepTimes | None, reference: int) -> Callable[[int], float]:
    """The speed on node counts, relative to that on `reference`; assumed where none is measured."""
    from outlast.cluster.policies import PowerSpeed

    if times is None:
        return PowerSpeed(reference, SPEED_EXPONENT)
    base = times.seconds_on(reference)
    return lambda nodes: base / times.seconds_on(nodes)


def work_seconds(
    files: ChainFiles, plan: ChainPlan, nodes: int, times: StepTimes | None, step: int | None = None
) -> float | None:
    """Training that is left, in seconds on `nodes`; None before any step was measured.

    Args:
        files: Of the chain.
        plan: Of the chain.
        nodes: Of the link whose seconds are meant.
        times: Of steps; None: not known.
        step: What is done; None: the newest checkpoint.
    """
    log = run_log(files)
    steps = log.steps or plan.steps
    if times is None or not steps:
        return None
    left = max(steps - (log.step if step is None else step), 0)
    return float(left * times.seconds_on(nodes))


def job_of(
    plan: ChainPlan, costs: Costs, seconds: float, sizes: tuple[int, ...], times: StepTimes | None
) -> MalleableJob:
    """A run as the policies see it.

    Args:
        plan: Of its chain; the first of its nodes that is one of `sizes` is the reference.
        costs: Of a link.
        seconds: Of training that are left on the reference.
        sizes: Node counts that it can run on.
        times: Of steps on some of them; None: the speed is assumed.
    """
    from outlast.cluster.policies import MalleableJob

    reference = next((node for node in plan.nodes if node in sizes), sizes[0])
    return MalleableJob(
        work_seconds=seconds,
        reference_nodes=reference,
        sizes=sizes,
        speed=speed_of(times, reference),
        restart_seconds=costs.restart_seconds,
        save_seconds=costs.save_seconds,
        lead_seconds=max(costs.lead_seconds - costs.save_seconds, 0.0),
    )


@dataclass(frozen=True)
class Chosen:
    """Nodes and time limit of one link.

    Attributes:
        plan: Of the chain, with this link's nodes and time limit, and the reason for them.
        forecast: Of its start; None where nothing was predicted.
    """

    plan: ChainPlan
    forecast: StartForecast | None = None


def choose_now(
    plan: ChainPlan,
    site: SiteLimits,
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
        behaviour: Of the queue's users; None: the shares of their limits that jobs use by recent
            accounting, or assumed where that says nothing.
        correction: From past predictions.
        after: The running job for whose end the link waits.

    Raises:
        ClusterError: The queue cannot be asked, or no shape makes progress.
    """
    from outlast.cluster.policies import (
        Behaviour,
        Correction,
        Limits,
        Outlook,
        Situation,
        as_slurm,
        choose,
        queue_now,
    )
    from outlast.cluster.workload import recent_jobs

    partitions = chosen_partitions(partitions_now(), plan.partition)
    limits = Limits(
        # A link that ends by itself needs no more.
        max_wall_seconds=min(
            longest_seconds(site), max(plan.link_seconds, 60.0) if plan.link_seconds else math.inf
        ),
        max_nodes=site.nodes or 2**31,
        # One place in the queue, unless the job wants fillers; nobody looks for one between links.
        max_jobs=(site.submitted_jobs or 2**31) if plan.filler_nodes and not after else 1,
    )
    queue = queue_now(partitions)
    walls = tuple(3600.0 * hour for hour in WALLS_HOURS if 3600.0 * hour <= limits.longest)
    if behaviour is None:
        # Whether one may see everybody's jobs there is not known, so arrivals are not taken.
        log = recent_jobs([partition.name for partition in partitions])
        behaviour = None if log is None else Behaviour.learnt(log, arrivals=False)
    waiting = max(len(queue.pending_nodes), 1)
    outlook = Outlook(
        behaviour=behaviour,
        samples=min(_SAMPLES, max(_SAMPLED_JOBS // waiting, _FEWEST_SAMPLES)),
        backfill=as_slurm(queue),
        correction=correction or Correction(),
        after=int(after) if after.isdigit() else None,
    )
    return choose(Situation(queue=queue, job=job, limits=limits), outlook, walls)


def longest_seconds(site: SiteLimits) -> float:
    """Longest link that is worth asking for."""
    longest = site.limit_seconds
    return LONGEST_UNLIMITED_SECONDS if longest is None or math.isinf(longest) else longest


def choose_first(
    files: ChainFiles,
    plan: ChainPlan,
    number: int,
    *,
    seconds: float | None = None,
    step: int | None = None,
    after: str = "",
) -> Chosen | None:
    """Nodes and time limit of link `number`, the first to be submitted, on the queue as it is now.

    Args:
        files: Of the chain.
        plan: Of it.
        number: Of the link.
        seconds: Training that is left on the first of the plan's nodes; None: as measured, before
            the first steps as the plan says, or else as much as the longest link could do.
        step: That is done; None: of the newest checkpoint.
        after: The job for whose end it waits.

    Returns:
        A choice; None where the plan gives nodes and time limit.

    Raises:
        ClusterError: Nothing can be chosen; says why.
    """
    if not plan.chooses:
        return None
    try:
        return _chosen(files, plan, number, seconds=seconds, step=step, after=after)
    except ClusterError as error:
        raise ClusterError(
            f'slurm.wall_time = "auto" finds nothing to choose: {error}; or give a time, such as '
            "slurm.wall_time=8h"
        ) from None


def choose_next(files: ChainFiles, link: ChainPlan, number: int, job: str) -> Chosen:
    """Choose nodes and time limit of link `number`; the link before it calls this as it begins.

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


def _as_before(plan: ChainPlan, link: ChainPlan, number: int, why: str) -> Chosen:
    nodes = link.nodes[0] if plan.sizes else plan.nodes_of(number)
    limit = "" if link.limit_seconds is None else f" for {duration_text(link.limit_seconds)}"
    reason = f"{nodes} node(s){limit}, as the link before: {why}"
    return Chosen(
        dataclasses.replace(plan, nodes=(nodes,), limit_seconds=link.limit_seconds, reason=reason)
    )


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
    costs = costs_of(plan, run_log(files))
    reference = plan.nodes_of(number)
    times = step_times(files, plan)
    # Given figures are of the plan's first nodes.
    slower = speed_of(times, plan.nodes[0])(reference)
    measured = seconds and seconds / slower
    if measured is None:
        measured = work_seconds(files, plan, reference, times, step)
    if measured is None and plan.work_seconds:
        measured = plan.work_seconds / slower
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
    correction = correction_of(starts_nearby(files))
    choice = choose_now(plan, site, job, correction=correction, after=after)
    best, reason = choice.best, choice.reason
    if measured is None:
        reason += "; no step is measured yet, so this is for as much work as the longest link does"
    shaped = plan.shaped(best.nodes, best.wall_seconds)
    return Chosen(dataclasses.replace(shaped, reason=reason), best.start)


def submit_chosen(
    files: ChainFiles, chosen: Chosen, number: int, *, after: str = "", patience: Patience = PATIENT
) -> str:
    """Submit a link with what was chosen, and write down what was predicted; see `submit_link`."""
    plan, forecast = chosen.plan, chosen.forecast
    job = submit_link(files, plan, number, after=after, patience=patience)
    predicted = {}
    if forecast is not None:
        import numpy as np

        from outlast.cluster.policies import LEVELS

        waits = [*np.quantile(forecast.wait_seconds, LEVELS), forecast.wait_seconds.max()]
        told = (forecast.p10_seconds, forecast.p50_seconds, forecast.p90_seconds)
        for name, values in (("waits", waits), ("told", told)):
            predicted[name] = [round(float(seconds), 1) for seconds in values]
    note_or_print(
        files,
        "chosen",
        job=job,
        number=number,
        after=after,
        nodes=plan.nodes[0],
        wall_seconds=plan.limit_seconds,
        reason=plan.reason,
        **predicted,
    )
    return job


def submit_filler(files: ChainFiles) -> str | None:
    """Submit a filler if the chain wants fillers, its link waits and there is a backfill window.

    Returns:
        The filler's number, or None.

    Raises:
        ClusterError: The queue cannot be asked, or sbatch refuses.
    """
    plan, journal = read_plan(files), entries(files)
    if not plan.filler_nodes or plan.kind != "dependent" or finished(journal) is not None:
        return None
    submitted = by_job(journal, "submitted")
    jobs = [job for job in queued(list(submitted)) if is_waiting(job.state) or is_live(job.state)]
    links = [job for job in jobs if not is_filler(submitted[job.number]) and is_waiting(job.state)]
    fillers = [job for job in jobs if is_filler(submitted[job.number]) and is_waiting(job.state)]
    # A link that waits for a running one has no place in the queue to keep.
    if not links or fillers or "dependency" in links[0].reason.lower():
        return None
    number = int(submitted[links[0].number]["number"])
    for submission in _decision(files, plan, links[0]).submit:
        if submission.role == "filler":
            used = plan.shaped(submission.nodes, submission.wall_seconds, filler=True)
            return submit_link(files, used, number)
    return None


def reason_to_yield(files: ChainFiles, job: str, filler: ChainPlan, began: float) -> str:
    """Why a running filler should end so that another job can start on its nodes, or nothing.

    Args:
        files: Of the chain.
        job: The filler's number.
        filler: Its plan.
        began: When its script began, seconds since the epoch.

    Raises:
        ClusterError: The queue cannot be asked.
    """
    from outlast.cluster.policies import OwnJob

    submitted = by_job(entries(files), "submitted")
    for link in queued(list(submitted)):
        if is_waiting(link.state) and not is_filler(submitted[link.number]):
            own = OwnJob(
                number=int(job),
                role="filler",
                nodes=filler.nodes[0],
                limit_seconds=filler.limit_seconds or 0.0,
                started_seconds=began,
            )
            decision = _decision(files, read_plan(files), link, own)
            return decision.reason if int(job) in decision.hand_over else ""
    return ""


def _decision(files: ChainFiles, plan: ChainPlan, link: QueuedJob, *fillers: OwnJob) -> Decision:
    """Decision of the policy on the queue now, where `link` waits and fillers run."""
    from outlast.cluster.policies import AnchorFiller, Limits, OwnJob, Situation, queue_now

    partitions = chosen_partitions(partitions_now(), plan.partition)
    log, times = run_log(files), step_times(files, plan)
    longest = min((partition.limit_seconds for partition in partitions), default=math.inf)
    # Training that is left, in seconds on the waiting link's nodes.
    measured = work_seconds(files, plan, link.nodes, times)
    usable = plan.usable_seconds() or 86400.0
    room = max(usable - plan.restart_seconds - plan.save_seconds, 60.0)
    sizes = tuple(sorted({link.nodes, *plan.filler_nodes}))
    shaped = dataclasses.replace(plan, nodes=(link.nodes,))
    job = job_of(shaped, costs_of(plan, log), room if measured is None else measured, sizes, times)
    limit = link.limit_seconds or plan.limit_seconds or math.inf
    anchor = OwnJob(number=int(link.number), role="main", nodes=link.nodes, limit_seconds=limit)
    situation = Situation(
        queue=queue_now(partitions),
        job=dataclasses.replace(job, lead_seconds=0.0),
        limits=Limits(max_wall_seconds=longest, min_wall_seconds=plan.filler_seconds),
        own=(anchor, *fillers),
    )
    return AnchorFiller(backfill="conservative").decide(situation)
