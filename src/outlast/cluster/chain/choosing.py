"""Nodes and time limit of a link, chosen from the live queue as it is submitted.

``slurm.wall_time = "auto"``: every shape that the site allows is predicted on the queue as it is
now (`outlast.cluster.policies`), and the one with which the run ends first is submitted. A link
chooses for its successor as it begins, for what it will leave, and for a start after its own end.

The prediction made when a link was submitted stands in the journal as it came out of the simulated
queue, uncorrected; the link's own beginning says what came true. The errors of all chains in one
folder of runs are one sample: they meet the same queue.
"""

from __future__ import annotations

import dataclasses
import math
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.cluster.chain.files import (
    chain_files,
    entries,
    note_or_print,
    of_kind,
    read_plan,
    run_log,
)
from outlast.cluster.chain.filler import SPEED_EXPONENT, StepTimes, step_times, work_seconds
from outlast.cluster.chain.margin import first_lead_seconds
from outlast.cluster.chain.planning import LONGEST_UNLIMITED_SECONDS, costs_of, site_of
from outlast.cluster.chain.submission import submit_link
from outlast.cluster.slurm.partitions import chosen_partitions, partitions_now
from outlast.durations import duration_text
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.cluster.chain.files import ChainFiles, ChainPlan, Entry
    from outlast.cluster.chain.planning import Costs, Site
    from outlast.cluster.policies.automatic import Choice
    from outlast.cluster.policies.decision import MalleableJob
    from outlast.cluster.policies.forecast import Behaviour, Correction, StartForecast
    from outlast.cluster.slurm.commands import Patience


FEWEST = 5
"""Past predictions from which on the next ones are corrected: one or two starts are an accident."""
NEWEST = 60
"""Older ones than so many are of another queue."""


@dataclass(frozen=True)
class PastStart:
    """A prediction and what came of it.

    Attributes:
        time: When it was made, seconds since the epoch.
        nodes: That the link asked for.
        wall_seconds: That it asked for.
        predicted_seconds: Wait at P10, P50 and P90, and the longest of all samples.
        waited_seconds: From when it could start to when it did.
    """

    time: float
    nodes: int
    wall_seconds: float
    predicted_seconds: tuple[float, float, float, float]
    waited_seconds: float

    @property
    def certain(self) -> bool:
        """True for a start predicted at once in every sample; such a prediction teaches nothing."""
        return not self.predicted_seconds[3] > 0.0


def predicted_fields(forecast: StartForecast) -> dict[str, object]:
    """A prediction as fields of the journal's entry ``chosen``."""
    import numpy as np

    from outlast.cluster.policies.forecast import LEVELS

    waits = forecast.wait_seconds
    quantiles = [float(item) for item in np.quantile(waits, LEVELS)]
    told = (forecast.p10_seconds, forecast.p50_seconds, forecast.p90_seconds)
    return {
        "waits": [round(quantile, 1) for quantile in (*quantiles, float(waits.max()))],
        "told": [round(seconds, 1) for seconds in told],
    }


def past_starts(journal: Sequence[Entry]) -> list[PastStart]:
    """Predictions of one chain whose links have begun, oldest first."""
    began = {str(entry["job"]): float(entry["began"]) for entry in of_kind(journal, "started")}
    ended = {str(entry["job"]): float(entry["time"]) for entry in of_kind(journal, "ended")}
    found = []
    for entry in of_kind(journal, "chosen"):
        job, after, waits = str(entry["job"]), str(entry.get("after", "")), entry.get("waits")
        # Of a link that ended without a word nobody knows since when the next one could start.
        if job not in began or not waits or (after and after not in ended):
            continue
        ready = max(float(entry["time"]), ended.get(after, 0.0))
        p10, p50, p90, longest = (float(wait) for wait in waits)
        found.append(
            PastStart(
                time=float(entry["time"]),
                nodes=int(entry["nodes"]),
                wall_seconds=float(entry["wall_seconds"]),
                predicted_seconds=(p10, p50, p90, longest),
                waited_seconds=max(began[job] - ready, 0.0),
            )
        )
    return found


def starts_nearby(files: ChainFiles) -> list[PastStart]:
    """Predictions of this chain and of those whose runs lie beside this one, the newest `NEWEST`.

    Those that were certain to start at once are left out; so are journals that cannot be read.
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
    uncertain = [start for start in found if not start.certain]
    return sorted(uncertain, key=lambda start: start.time)[-NEWEST:]


def correction_of(past: Sequence[PastStart]) -> Correction | None:
    """Correction of the next predictions by past errors; None with fewer than `FEWEST`."""
    import numpy as np

    from outlast.cluster.policies.forecast import Correction, StartForecast

    if len(past) < FEWEST:
        return None
    forecasts = [
        StartForecast(
            nodes=start.nodes,
            wall_seconds=start.wall_seconds,
            wait_seconds=np.array(start.predicted_seconds),
            p10_seconds=start.predicted_seconds[0],
            p50_seconds=start.predicted_seconds[1],
            p90_seconds=start.predicted_seconds[2],
        )
        for start in past
    ]
    return Correction.learnt(forecasts, [start.waited_seconds for start in past])


def starts_words(past: Sequence[PastStart]) -> str:
    """One sentence about the accuracy of earlier predictions."""
    if not past:
        return (
            f"no predicted start of this folder's runs has been seen yet; from {FEWEST} on, "
            "predictions are corrected by past errors"
        )
    count = len(past)
    early = sum(start.waited_seconds <= start.predicted_seconds[2] for start in past)
    seen = (
        f"{count} predicted start(s) of this folder's runs were seen: {early} came by the P90 that "
        "was predicted"
    )
    found = correction_of(past)
    if found is None:
        return f"{seen}; from {FEWEST} on, predictions are corrected by past errors"
    middle, late = math.exp(found.p50), math.exp(found.p90)
    return (
        f"{seen}; predictions are corrected by that (waits and 5 min times {middle:.2g} at P50, "
        f"{late:.2g} at P90)"
    )


WALLS_HOURS = (1, 2, 4, 8, 12, 24, 48)
_SAMPLES = 16
_SAMPLED_JOBS = 8000
"""Waiting jobs in all samples together; of longer queues fewer samples are drawn."""
_FEWEST_SAMPLES = 4


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Nodes and time limit of one link, with the reason.

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
    from outlast.cluster.policies.decision import Limits, Situation
    from outlast.cluster.policies.forecast import as_slurm
    from outlast.cluster.slurm.snapshot import queue_now

    partitions = chosen_partitions(partitions_now(), plan.partition)
    limits = Limits(
        # A link that ends by itself needs no more.
        max_wall_seconds=min(
            longest_seconds(site), max(plan.link_seconds, 60.0) if plan.link_seconds else math.inf
        ),
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
    """Share of their limits that jobs use, by recent accounting; assumed where that says nothing.

    Whether one may see everybody's jobs there is not known, so what arrives is not taken from it.
    """
    from outlast.cluster.policies.forecast import Behaviour
    from outlast.cluster.workload import recent_jobs

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
    from outlast.cluster.policies.decision import MalleableJob, PowerSpeed

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


def choose_first(
    files: ChainFiles,
    plan: ChainPlan,
    number: int,
    *,
    seconds: float | None = None,
    step: int | None = None,
    after: str = "",
) -> Chosen:
    """Choose nodes and time limit of link `number`, the first to be submitted.

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


def _on_reference(
    plan: ChainPlan, reference: int, seconds: float, times: StepTimes | None
) -> float:
    """Training in seconds on `reference` nodes, which was given for the plan's first nodes."""
    from outlast.cluster.policies.decision import PowerSpeed

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
        lead_seconds = first_lead_seconds(files, plan)
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
        plan, site, job, correction=correction_of(starts_nearby(files)), after=after
    )
    best, reason = choice.best, choice.reason
    if measured is None:
        reason += "; no step is measured yet, so this is for as much work as the longest link does"
    shaped = plan.shaped(best.nodes, best.wall_seconds)
    return Chosen(dataclasses.replace(shaped, reason=reason), reason, best.start)
