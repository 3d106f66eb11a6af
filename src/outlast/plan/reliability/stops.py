"""Which failures stop a run, how often, and what the way back takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outlast.plan.cases import Array
from outlast.plan.reliability.going import Going
from outlast.plan.reliability.rates import groups_hit, rate_of
from outlast.plan.reliability.recovery import Reliability, column, lost_nodes


@dataclass(frozen=True, slots=True)
class Stop:
    """Failures of one kind that throw the run back to a checkpoint, arrays (candidates,) or (1,).

    Attributes:
        name: Their cause.
        rate: Per exposed second.
        tier: Index of the tier that is restored.
        detection: Seconds until somebody acts.
        late: Seconds of work from a silent error to the alarm.
        redone: Seconds of work after a save that are done again until its version is durable.
        restart: Seconds until the restore begins.
        restore: Seconds of the restore.
    """

    name: str
    rate: Array
    tier: Array
    detection: Array
    late: Array
    redone: Array
    restart: Array
    restore: Array

    @property
    def back_seconds(self) -> Array:
        """From the stop to the first second of work that has not been done before."""
        return self.late + self.redone + self.restart + self.restore


def stops_of(settings: Reliability, nodes: Array, going: Going) -> list[Stop]:
    """All failures that need a checkpoint."""
    back, found = settings.restart, []
    groups = column(settings.replicas.groups)
    for cause in settings.causes:
        lost = lost_nodes(cause)
        tier, restore, latency = _restored(settings, lost)
        rate = rate_of(settings, cause, nodes)
        detection, late = column(cause.detection_seconds), np.zeros(1)
        if cause.silent:
            if not settings.guard.rolls_back:
                continue
            rate = rate * settings.guard.coverage
            detection, late = np.zeros(1), column(settings.guard.latency_seconds)
        else:
            hit = groups_hit(settings, nodes, cause.nodes_hit)
            last = going.last.get(cause.nodes_hit, np.zeros(1))
            # One group of one, or all of them at once; else only when it is the last one up.
            rate = np.where((groups < 2.0) | (hit >= groups), rate, rate * last)
        restart = column(back.restart_seconds) + (column(back.replace_seconds) if lost else 0.0)
        found.append(
            Stop(cause.name, rate, tier, detection, late, latency, restart, column(restore))
        )
    return found


def _restored(settings: Reliability, lost: int) -> tuple[Array, Array, Array]:
    """Index of the first used tier that survives so many nodes, its restore and its latency."""
    index, restore, latency, apart = -np.ones(1), np.zeros(1), np.zeros(1), np.zeros(1)
    for position, tier in enumerate(settings.tiers):
        if tier.survives_nodes >= lost:
            takes = (index < 0.0) & (column(tier.every) > 0.0)
            index = np.where(takes, float(position), index)
            restore = np.where(takes, tier.restore_seconds, restore)
            latency = np.where(takes, tier.latency_seconds, latency)
            apart = np.where(takes, tier.every, apart)
            # A safer tier that saves as often may have the newest version earlier.
            latency = np.where(
                tier.every == apart, np.minimum(latency, tier.latency_seconds), latency
            )
    return index, restore, latency
