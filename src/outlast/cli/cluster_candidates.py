"""Candidates of nodes and time limit on the live queue, with predicted starts and ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.errors import ClusterError

if TYPE_CHECKING:
    from outlast.cluster.chain.plan import ChainPlan
    from outlast.cluster.chain.planning import Costs, Site
    from outlast.cluster.policies.automatic import Choice
    from outlast.cluster.workload.jobs import Workload
    from outlast.job import Job

_SHOWN = 12


def print_candidates(
    job: Job,
    chain: ChainPlan,
    site: Site,
    costs: Costs,
    train_seconds: float | None,
    *,
    log: Workload | None = None,
) -> None:
    """Print what each candidate would lead to, and which is best; a sentence where none is known.

    Args:
        job: Its ``slurm.sizes`` are compared, the first of ``slurm.nodes`` is the reference.
        chain: As it would be submitted.
        site: What the cluster allows.
        costs: Of a link.
        train_seconds: That are left on the reference.
        log: What the queue's users did; None: as recent accounting says.
    """
    if not site.known:
        return
    if train_seconds is None:
        print(
            "which time limit and nodes finish first cannot be predicted before the first steps "
            "were measured; say what is left with --hours"
        )
        return
    try:
        choice = candidates_now(job, chain, site, costs, train_seconds, log=log)
    except ClusterError as error:
        print(f"no candidates: {error}")
        return
    _print(choice)
    if log is None:
        from outlast.cluster.chain.planning import files_of
        from outlast.cluster.chain.starts import starts_nearby, starts_words

        print(starts_words(starts_nearby(files_of(job))))


def candidates_now(
    job: Job,
    chain: ChainPlan,
    site: Site,
    costs: Costs,
    train_seconds: float,
    *,
    log: Workload | None = None,
) -> Choice:
    """The best of all candidates on the live queue; see `print_candidates`.

    Predictions are corrected by those of the log's jobs that have started, or without a log by
    those that this folder's runs have seen come true.

    Raises:
        ClusterError: The queue cannot be asked, or no candidate makes progress.
    """
    from outlast.cluster.chain.choosing import choose_now, job_of
    from outlast.cluster.chain.planning import files_of
    from outlast.cluster.chain.starts import correction_of, starts_nearby
    from outlast.cluster.chain.work import step_times
    from outlast.cluster.policies.behaviour import Behaviour
    from outlast.cluster.policies.calibrate import learn_correction

    files = files_of(job)
    sizes = chain.sizes or sizes_of(job)
    left = job_of(chain, costs, train_seconds, sizes, step_times(files, chain))
    if log is None:
        correction = correction_of(starts_nearby(files))
        return choose_now(chain, site, left, correction=correction)
    behaviour = Behaviour.learnt(log)
    if log.start_seconds is None:
        return choose_now(chain, site, left, behaviour=behaviour)
    correction = learn_correction(
        log,
        log.start_seconds,
        behaviour,
        like=(left.reference_nodes, left.wall_to_finish(left.reference_nodes)),
        backfill=None,
    )
    return choose_now(chain, site, left, behaviour=behaviour, correction=correction)


def sizes_of(job: Job) -> tuple[int, ...]:
    """Node counts to compare, ascending; those that the partition has not are left out later."""
    if job.slurm.sizes:
        return tuple(sorted(set(job.slurm.sizes)))
    asked = set(job.slurm.nodes)
    halves = {number // 2 for number in asked if number % 2 == 0}
    return tuple(sorted(asked | halves | {2 * number for number in asked}))


def _print(choice: Choice) -> None:
    from outlast.cli.figures import Column, output, print_table
    from outlast.cluster.durations import duration_text

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
    print_table(output(), [Column(head) for head in heads], rows, title)
    print(choice.reason)
