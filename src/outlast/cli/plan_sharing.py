"""What a file system that others write to as well takes from a predicted run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outlast.errors import PlanError

if TYPE_CHECKING:
    from outlast.cli.plan_asked import Asked
    from outlast.job import Job
    from outlast.plan.cluster import Cluster
    from outlast.plan.pareto.settings import Settings
    from outlast.plan.prediction import Estimate

_RATE = "storage.shared_bytes_per_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The shared file system of a run, and the others on it.

    Attributes:
        load_of_others: Share of its bandwidth that their requests ask for.
        slowdown: How many times as long a transfer takes, to it or from it.
        save_waste: Share of the nodes' time that saves take at most, as if training stood still
            meanwhile; None where checkpoints go to faster tiers as well.
    """

    load_of_others: float
    slowdown: float
    save_waste: float | None


def load_of_others(asked: Asked, job: Job | None) -> float:
    """Share of the shared file system's bandwidth that others ask for.

    A job that takes turns at saving (``checkpoint.turns``) shares it with jobs whose saves keep it
    busy for at most ``checkpoint.turn_load`` of the time, its own among them: so much is taken as
    the others', which is a little too much.

    Raises:
        PlanError: The share that was given is not below 1.
    """
    given = asked.file_system_load
    if given is None:
        return job.checkpoint.turn_load if job is not None and job.checkpoint.turns else 0.0
    if not 0.0 <= given < 1.0:
        raise PlanError(
            f"--file-system-load = {given:g}: give a share of the bandwidth from 0 to below 1; at "
            "1 no transfer ends"
        )
    return given


def shared_with(cluster: Cluster, load: float) -> Cluster:
    """The cluster as one job sees it whose transfers share the file system with a load of others.

    Raises:
        ClusterError: The others leave nothing.
    """
    from outlast.cluster.cost import contended_seconds

    if not load:
        return cluster
    rate = cluster.storage.shared_bytes_per_s / contended_seconds(1.0, load)
    sources = dict(cluster.sources)
    if _RATE in sources:
        alone = sources[_RATE]
        text = f"{alone.text}; {load:.0%} of {alone.value:g} B/s is asked for by others"
        sources[_RATE] = replace(alone, value=rate, text=text)
    storage = replace(cluster.storage, shared_bytes_per_s=rate)
    return replace(cluster, storage=storage, sources=sources)


def sharing_of(load: float, found: Estimate, settings: Settings) -> Sharing | None:
    """What the others cost a run that was predicted with them; None where there are none."""
    from outlast.cluster.cost import contended_seconds, save_waste

    if not load:
        return None
    waste = None
    if settings.tiers == ("shared",):
        # The predicted save has the others in it.
        waste = save_waste(found.last_save_seconds, found.checkpoint_seconds)
    return Sharing(load_of_others=load, slowdown=contended_seconds(1.0, load), save_waste=waste)


def sharing_words(found: Sharing) -> str:
    """The same in a line."""
    from outlast.cli.plan_words import share_words

    text = (
        f"others ask for {found.load_of_others:.0%} of its bandwidth: saves and restores take "
        f"{found.slowdown:.3g} times as long"
    )
    if found.save_waste is None:
        return text
    return f"{text}; saves take at most {share_words(found.save_waste)} of the nodes' time"
