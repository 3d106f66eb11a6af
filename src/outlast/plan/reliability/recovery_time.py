"""Recovery time of the failures that stop a run, with failures of the recovery itself.

A way back begins with a failure and is over when work is done that has not been done before the
version it goes back to was durable. It is cut short by the next failure, and then begins anew. What
was to be made good before still is: nobody gives back the node that a crash finds half replaced,
and a version that the memory has lost does not come back by a crash. So a way back that begins anew
takes as long as the longest of those that were cut short, and leads to the safest tier of theirs.

This makes the law hold that more failures never bring more progress. Take two runs with the same
failures, but for one that only the second has, by exposed time. Say that the first is never behind:
it has done at least as much, and has at most as much of a way back before it. Both hold at the
start, and while nothing strikes, as both go on at one pace. What strikes both takes them back to
their newest versions, of which the first has the later one; and the ways back that the first has
not done at that time are some of those that the second has not done, so the longest of the second's
is no shorter. What strikes the second alone adds to its ways back, and takes from its work. Then
the second has taken at least as much time for any work, and paused for at least as many failures. A
shorter way back in place of a longer one would break this: of a run that is always half through the
replacement of a node, crashes with quick restarts would make an end.

The number of tries at a way back follows from the order of lengths. Of tries with the length q_j,
`1 - exp(-l q_j)` fail, and each failure is of class c with probability s_c = l_c / l: the next try
has the longer length of j and c. From the shortest length to the longest,
`tries_j = s_j (1 + sum over i < j of tries_i f_i) / (1 - f_j (sum over i <= j of s_i))`.
With one length this is exp(l q), by which Daly's model multiplies the time. What is repeated since
its version was not yet durable (`redone`) comes after, by the same equations over the tiers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outlast.plan.batch import Array
from outlast.plan.reliability.availability import ReplicaAvailability
from outlast.plan.reliability.failure_rates import SMALLEST_RATE, failing, groups_hit, rate_of
from outlast.plan.reliability.recovery import Reliability, column, lost_nodes


@dataclass(frozen=True, slots=True)
class JobFailure:
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


def job_failures(
    settings: Reliability, nodes: Array, going: ReplicaAvailability
) -> list[JobFailure]:
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
            JobFailure(cause.name, rate, tier, detection, late, latency, restart, column(restore))
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


@dataclass(frozen=True, slots=True)
class RecoveryTime:
    """All arrays (candidates,) or (1,).

    Attributes:
        restart: Seconds of starting again per exposed second.
        restore: Seconds of loading a version per exposed second.
        longer: Exposed time over time without ways back.
        redone: Time without ways back over the same less what is redone for want of durability.
        rates: Of each tier, failures per second of the rest that end in going back to it.
    """

    restart: Array
    restore: Array
    longer: Array
    redone: Array
    rates: tuple[Array, ...]


def recovery_time(stops: Sequence[JobFailure], tiers: int) -> RecoveryTime:
    """Recovery time of the failures that stop a run.

    Args:
        stops: All of them, each with a tier below `tiers`.
        tiers: How many there are.
    """
    zero = np.zeros(1)
    if not stops:
        return RecoveryTime(zero, zero, np.ones(1), np.ones(1), (zero,) * tiers)
    total = np.maximum(sum((stop.rate for stop in stops), zero), SMALLEST_RATE)
    lengths = _stacked([stop.restart + stop.restore + stop.late for stop in stops])
    order = np.argsort(lengths, axis=0, kind="stable")

    def in_order(values: Sequence[Array]) -> Array:
        return np.take_along_axis(_stacked(values), order, 0)

    shares = in_order([stop.rate / total for stop in stops])
    tier = in_order([stop.tier for stop in stops])
    failure, success = failing(total, np.take_along_axis(lengths, order, 0))
    tries = _tries(shares, zero, failure, success)
    longer = 1.0 + sum((n * fails for n, fails in zip(tries, failure, strict=True)), zero)
    restarts, reached = failing(total, in_order([stop.restart for stop in stops]))
    restores, _ = failing(total, in_order([stop.restore for stop in stops]))
    restart = sum((n * fails for n, fails in zip(tries, restarts, strict=True)), zero)
    restore = sum(
        (n * up * fails for n, up, fails in zip(tries, reached, restores, strict=True)), zero
    )
    used = [sum((s.rate * (s.tier == index) for s in stops), zero) > 0.0 for index in range(tiers)]
    ends: list[Array] = []
    below = zero
    for index, here in enumerate(used):
        # Ways back that lead no further: all others count as failures that end them.
        within = np.where(tier <= index, shares, 0.0)
        beyond = sum(np.where(tier > index, shares, 0.0), zero)
        found = _tries(within, beyond, failure, success)
        upto = sum((n * ends_it for n, ends_it in zip(found, success, strict=True)), zero)
        ends.append(np.where(here, np.maximum(upto - below, 0.0), 0.0))
        below = upto
    late = [
        np.max(_stacked([np.where(s.tier == index, s.redone, 0.0) for s in stops]), axis=0)
        for index in range(tiers)
    ]
    fails, passes = failing(total, _stacked(late))
    again = _tries(_stacked(ends), zero, fails, passes)
    return RecoveryTime(
        restart=restart / longer,
        restore=restore / longer,
        longer=longer,
        redone=1.0 + sum((n * fail for n, fail in zip(again, fails, strict=True)), zero),
        rates=tuple(total * n * passed for n, passed in zip(again, passes, strict=True)),
    )


def _stacked(values: Sequence[Array]) -> Array:
    return np.stack(np.broadcast_arrays(*values))


def _tries(shares: Array, others: Array, failure: Array, success: Array) -> list[Array]:
    """Expected tries of each kind, the shortest first.

    Args:
        shares: Of all failures, by the kind of try that they ask for at least, (kinds, candidates).
        others: Share of the failures that end it all, (candidates,).
        failure: Of a try of each kind, (kinds, candidates).
        success: Its opposite.
    """
    longer = [others]
    for share in shares[:0:-1]:
        longer.append(longer[-1] + share)
    found, begun = [], np.ones(1)
    for share, beyond, fails, ends in zip(shares, longer[::-1], failure, success, strict=True):
        found.append(share * begun / (ends + fails * beyond))
        begun = begun + found[-1] * fails
    return found
