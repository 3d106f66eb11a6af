"""What a queue with a time limit adds to a predicted run: its links, their losses and waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outlast.cluster.cost import Chain
    from outlast.plan.prediction import Estimate


def queued(wall_time: str | None, queue_wait: str | None, found: Estimate) -> Chain | None:
    """The chain of links that a run becomes; None where no time limit was given.

    Args:
        wall_time: Limit of a link, as a person says it.
        queue_wait: How long each link waits; None for not at all.
        found: The run without a queue.

    Raises:
        PlanError: A wait without a limit.
        ClusterError: A time that cannot be read, or a limit in which nothing trains.
    """
    from outlast.cluster.cost import LinkOverhead, QueueWait, chain
    from outlast.cluster.durations import limit_seconds
    from outlast.errors import PlanError

    if wall_time is None:
        if queue_wait is not None:
            raise PlanError(f"queue_wait = {queue_wait} is of each link: give wall_time, too")
        return None
    wait = limit_seconds(queue_wait) if queue_wait else 0.0
    overhead = LinkOverhead(
        restart_seconds=found.resume_seconds,
        save_seconds=found.last_save_seconds,
        step_seconds=found.step_seconds.figure.middle,
    )
    work = found.finish_seconds.middle
    return chain(work, limit_seconds(wall_time), overhead, QueueWait(wait))


def queue_words(found: Chain) -> str:
    """A chain in a line."""
    from outlast.cli.plan_words import seconds_words, share_words

    links = "1 job" if found.links == 1 else f"{found.links:,} links"
    return (
        f"{seconds_words(found.seconds)} as {links}: {seconds_words(found.wait_seconds)} of it "
        f"waiting, {seconds_words(found.overhead_seconds)} ({share_words(found.waste)} of the "
        "nodes' time) in last saves and restarts"
    )
