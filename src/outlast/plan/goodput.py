"""Share of a run's wall time that is progress (ETTR), and what the rest is lost to.

A renewal-reward closed form for many candidates at once. Failures are independent and exponential;
those with Weibull times count with their mean rate over `days_from_new`. They strike while the run
computes, saves, restarts and restores, and not while a failure waits to be detected or a node to be
repaired. `working_seconds` gives the working time per interval, `recovery_time` by how much
restarts and restores lengthen it, `availability` the time without nodes, and `goodput` shares all
out to terms that add up to 1 with the progress.

A run passes base intervals of T seconds of work and saves. A failure of class c throws it back to
the newest version of tier c, `every_c` base intervals apart. All failures are exponential with the
rate l. One attempt takes (1 - exp(-l T)) / l and succeeds with exp(-l T). What fails does so in
class c with probability l_c / l, whatever came before, so each tier is solved on top of the one
below: after a failure of its class the attempt is repeated until it succeeds or a failure of a
higher class ends it, a geometric series; `every_c / every_(c-1)` such attempts in a row are the
attempt of the next tier. With one tier and recoveries of Q seconds this is Daly's complete model
(Daly 2006, FGCS 22, eq. 20), `exp(l Q) (exp(l T) - 1) / l`; two levels are those of Di et al. 2016
(INRIA RR-8851) without their first-order expansion. The recoveries, in which failures strike too,
are each over before the next second of work, so they multiply the time that is found so.

More failures, slower detection, restarts, restores and saves, and fewer spares never raise the
share; `recovery_time` says why. With one group and single nodes in repair this is exact. Waits for
whole racks are approximate, as are replica groups of which many are gone: there it may rise by up
to 0.03 points (random extreme runs: tests/plan/test_plan_reliability_laws.py).

Shares are those of the long run. A run of a few repair times that begins with all nodes and spares
whole does better, by up to the repair time over its length where it mostly waits for nodes.

The effective training time ratio is that of Kokolis et al. 2025 (HPCA, arXiv 2410.21680, section
II-D): productive time over wall time; here steps that are longer than those of punctual workers
without guard and code count as partly lost, which the terms show.

The wall time is that without failures plus a random sum of losses. Its mean is exact for the model
of `goodput`; its variance is that of the sum, `sum n (variance + (1 + clustering) mean^2)`, n being
the expected number of losses of a kind (compound Poisson: Feller 1968, volume 1, XII.2; clustering:
failures that strike again before an interval is over). For many failures the distribution is close
to normal (renewal central limit); for few it is not: with probability `exp(-n)` nothing happens at
all, and else the delay is at least the shortest recovery. So the delay is taken for an atom at 0
and a gamma distribution, shifted by the shortest loss, that has the remaining mean and variance.

Recovery time of the failures that stop a run, with failures of the recovery itself.

A recovery begins with a failure and is over when work is done that has not been done before the
version it goes back to was durable. It is cut short by the next failure, and then begins anew. What
was to be made good before still is: nobody gives back the node that a crash finds half replaced,
and a version that the memory has lost does not come back by a crash. So a recovery that begins anew
takes as long as the longest of those that were cut short, and leads to the safest tier of theirs.

This makes the law hold that more failures never bring more progress. Take two runs with the same
failures, but for one that only the second has, by exposed time. Say that the first is never behind:
it has done at least as much, and has at most as much of a recovery before it. Both hold at the
start, and while nothing strikes, as both continue at one pace. What strikes both takes them back to
their newest versions, of which the first has the later one; and the recoveries that the first has
not done at that time are some of those that the second has not done, so the longest of the second's
is no shorter. What strikes the second alone adds to its recoveries, and takes from its work. Then
the second has taken at least as much time for any work, and paused for at least as many failures. A
shorter recovery in place of a longer one would break this: of a run that is always half through the
replacement of a node, crashes with quick restarts would make an end.

The number of tries at a recovery follows from the order of lengths. Of tries with the length q_j,
`1 - exp(-l q_j)` fail, and each failure is of class c with probability s_c = l_c / l: the next try
has the longer length of j and c. From the shortest length to the longest,
`tries_j = s_j (1 + sum over i < j of tries_i f_i) / (1 - f_j (sum over i <= j of s_i))`.
With one length this is exp(l q), by which Daly's model multiplies the time. What is repeated since
its version was not yet durable (`redone`) comes after, by the same equations over the tiers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from outlast.plan.batch import Array, texts
from outlast.plan.estimate import Term
from outlast.plan.reliability import (
    DAY_SECONDS,
    HOUR_SECONDS,
    SMALLEST_RATE,
    Number,
    Reliability,
    ReplicaAvailability,
    batches_of,
    column,
    groups_hit,
    lost_nodes,
    rate_of,
    replica_availability,
    require,
    summed,
    waited,
)

LARGEST_EXPONENT = 500.0
SMALLEST_SUCCESS = 1e-250


@dataclass(frozen=True, slots=True)
class _Attempt:
    """Expected seconds, and probabilities of success and of its opposite."""

    seconds: Array
    success: Array
    failure: Array


def working_seconds(
    interval_seconds: Array, every: Sequence[Array], rates: Sequence[Array]
) -> Array:
    """Expected seconds of `every[-1]` base intervals and of their repeats, without the recoveries.

    Args:
        interval_seconds: T, saves included.
        every: Of each tier, base intervals from save to save; 0 for one that is not used.
        rates: Of each tier, failures per second that are thrown back to it; those of a tier that is
            not used must have been handed to another.

    Returns:
        (candidates,) or (1,), finite.
    """
    # Of each tier, the failures of this and of all higher classes.
    above = [summed(rates[tier:]) for tier in range(len(every))]
    before = np.ones(1)
    rate = np.maximum(above[0], SMALLEST_RATE)
    failure, success = failing(rate, interval_seconds)
    attempt = _Attempt(failure / rate, success, failure)
    for apart, rate, rest in zip(every, rates, above, strict=True):
        step = np.where(apart > 0.0, apart, before)
        if (step != before).any():
            attempt = _in_a_row(attempt, step / before)
        before = step
        share = np.clip(rate / np.maximum(rest, SMALLEST_RATE), 0.0, 1.0)
        if (share > 0.0).any():
            # An attempt that is made again after failures of its tier's class, a share of all.
            failure = attempt.failure
            leave = np.maximum(attempt.success + failure * (1.0 - share), SMALLEST_SUCCESS)
            tries = 1.0 + failure * share / leave
            attempt = _Attempt(
                attempt.seconds * tries,
                np.maximum(attempt.success * tries, SMALLEST_SUCCESS),
                failure * (1.0 - share) * tries,
            )
    return attempt.seconds


def failing(rate: Array, seconds: Array) -> tuple[Array, Array]:
    """Probabilities that something fails within so many seconds, and that nothing does."""
    exponent = np.minimum(rate * seconds, LARGEST_EXPONENT)
    return -np.expm1(-exponent), np.exp(-exponent)


def _in_a_row(plain: _Attempt, count: Array) -> _Attempt:
    """`count` attempts one after the other."""
    logarithm = np.where(
        plain.failure < 0.5,
        np.log1p(-np.minimum(plain.failure, 0.5)),
        np.log(np.maximum(plain.success, SMALLEST_SUCCESS)),
    )
    rest = (count - 1.0) * logarithm
    # Where nothing at all can fail, the geometric sum is the number of its terms.
    certain = logarithm == 0.0
    ratio = np.expm1(rest) / np.where(certain, 1.0, np.expm1(logarithm))
    later = plain.seconds * np.where(certain, count - 1.0, ratio)
    kept, ended = np.exp(np.maximum(rest, -LARGEST_EXPONENT)), -np.expm1(rest)
    return _Attempt(
        plain.seconds + plain.success * later,
        np.maximum(plain.success * kept, SMALLEST_SUCCESS),
        plain.failure + plain.success * ended,
    )


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
    index = -np.ones(1)
    restore = latency = apart = np.zeros(1)
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
        longer: Exposed time over time without recoveries.
        redone: Time without recoveries over the same less what is redone for want of durability.
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
    total = np.maximum(summed(stop.rate for stop in stops), SMALLEST_RATE)
    lengths = _stacked([stop.restart + stop.restore + stop.late for stop in stops])
    order = np.argsort(lengths, axis=0, kind="stable")

    def in_order(values: Sequence[Array]) -> Array:
        return np.take_along_axis(_stacked(values), order, 0)

    shares = in_order([stop.rate / total for stop in stops])
    tier = in_order([stop.tier for stop in stops])
    failure, success = failing(total, np.take_along_axis(lengths, order, 0))
    tries = _tries(shares, zero, failure, success)
    longer = 1.0 + summed(n * fails for n, fails in zip(tries, failure, strict=True))
    restarts, reached = failing(total, in_order([stop.restart for stop in stops]))
    restores, _ = failing(total, in_order([stop.restore for stop in stops]))
    restart = summed(n * fails for n, fails in zip(tries, restarts, strict=True))
    restore = summed(n * up * fails for n, up, fails in zip(tries, reached, restores, strict=True))
    ends: list[Array] = []
    below = zero
    for index in range(tiers):
        here = summed(s.rate * (s.tier == index) for s in stops) > 0.0
        # Ways back that lead no further: all others count as failures that end them.
        within = np.where(tier <= index, shares, 0.0)
        beyond = summed(np.where(tier > index, shares, 0.0))
        found = _tries(within, beyond, failure, success)
        upto = summed(n * ends_it for n, ends_it in zip(found, success, strict=True))
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
        redone=1.0 + summed(n * fail for n, fail in zip(again, fails, strict=True)),
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


@dataclass(frozen=True, slots=True)
class Loss:
    """One kind of failure, all arrays (candidates,) or (1,).

    Attributes:
        name: Its cause.
        count: Expected number per second of progress.
        mean_seconds: Of the wall time that one costs.
        variance: Of the same, in square seconds.
        least_seconds: Below which no single one costs.
        clustering: Failures that one interval brings, on average: their number is that of
            geometric series, whose variance is `1 + clustering` times that of a Poisson number.
    """

    name: str
    count: Array
    mean_seconds: Array
    variance: Array
    least_seconds: Array
    clustering: Array


def losses_of(
    stops: Sequence[JobFailure], per_second: Array, apart: Sequence[Array], excess: Array
) -> tuple[Loss, ...]:
    """Losses of failures that throw the run back to a checkpoint.

    Args:
        stops: The kinds.
        per_second: Exposed seconds per second of progress.
        apart: Of each tier, exposed seconds from save to save.
        excess: What all of them cost together per second of progress; means are scaled to it.
    """
    found = []
    for stop in stops:
        between = summed(
            np.where(stop.tier == index, item, 0.0) for index, item in enumerate(apart)
        )
        strikes = summed(np.where(other.tier >= stop.tier, other.rate, 0.0) for other in stops)
        mean, square = age_moments(between, strikes)
        # Until the first second of work that has not been done before.
        back = stop.late + stop.redone + stop.restart + stop.restore
        least = stop.detection + np.minimum(back, 1.0 / np.maximum(strikes, SMALLEST_RATE))
        count, variance = stop.rate * per_second, square - mean**2
        found.append(Loss(stop.name, count, least + mean, variance, least, stop.rate * between))
    raw = summed(loss.count * loss.mean_seconds for loss in found)
    scale = np.where(raw > 0.0, excess / np.maximum(raw, SMALLEST_RATE), 0.0)
    return tuple(
        replace(
            loss,
            mean_seconds=loss.mean_seconds * scale,
            variance=loss.variance * scale**2,
            least_seconds=loss.least_seconds * np.minimum(scale, 1.0),
        )
        for loss in found
    )


def age_moments(interval_seconds: Array, rate: Array) -> tuple[Array, Array]:
    """Mean and mean square of the time from a save to a failure in an interval.

    Exponential times cut off at the interval; nearly uniform where failures are rare.
    """
    exponent = np.minimum(rate * interval_seconds, 500.0)
    rare = exponent < 1e-3
    safe, odds = np.where(rare, 1.0, rate), np.where(rare, 1.0, np.expm1(exponent))
    mean = np.where(
        rare, interval_seconds * (0.5 - exponent / 12.0), 1.0 / safe - interval_seconds / odds
    )
    square = np.where(
        rare,
        interval_seconds**2 * (1.0 / 3.0 - exponent / 12.0),
        2.0 / safe**2 - (interval_seconds**2 + 2.0 * interval_seconds / safe) / odds,
    )
    return mean, np.maximum(square, mean**2)


FORMULAS = texts("goodput")
"""Of each term: its formula and its source."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Arrays have shape (candidates,).

    Attributes:
        ettr: Progress per wall time, in [0, 1].
        terms: Shares of the wall time that are lost, by the names of `FORMULAS`; with `ettr` they
            add up to 1.
        losses: What the distribution of the finishing time is made of.
    """

    ettr: Array
    terms: Mapping[str, Array]
    losses: tuple[Loss, ...]

    def explain(self, candidate: int = 0) -> tuple[Term, ...]:
        """The terms of one candidate, progress first."""
        parts = [Term("progress", float(self.ettr[candidate]), "1 - the other terms")]
        for name, share in self.terms.items():
            formula, _, source, _ = FORMULAS[name]
            parts.append(Term(name, float(share[candidate]), formula, source=source))
        return tuple(parts)


def goodput(settings: Reliability) -> Goodput:
    """ETTR and lost time of every candidate of `settings`; takes about a microsecond for each.

    Raises:
        PlanError: More spares than can be counted, where several nodes fail at once.
    """
    nodes = column(settings.nodes)
    going = replica_availability(settings, nodes)
    stops = [stop for stop in job_failures(settings, nodes, going) if (stop.rate > 0.0).any()]
    running, exposed, apart = _exposed(settings, stops)
    detection = summed(stop.rate * stop.detection for stop in stops)
    # Seconds without enough nodes per exposed second, and mean seconds of one wait.
    slow = 1.0 + detection
    batches = batches_of(settings, nodes, slow)
    spares = column(settings.restart.spares)
    ratio = np.where(column(settings.replicas.groups) > 1.0, 0.0, waited(batches, spares))
    load = summed(batch.load for batch in batches)
    often = np.maximum(summed(batch.per_second for batch in batches), SMALLEST_RATE)
    waiting, wait_seconds = ratio * slow, load / often / (spares + 1.0)
    rates = (rate_of(settings, cause, nodes) for cause in settings.causes if cause.silent)
    errors = summed(rates) * going.present
    # Errors in work that is thrown away anyway do no harm.
    silent = errors * running
    # Seconds of false alarms and of corrections in place, per exposed second.
    guard = settings.guard
    alarms = column(guard.false_alarms_per_day) / DAY_SECONDS * guard.alarm_seconds
    caught = errors * guard.coverage * (not guard.rolls_back)
    corrections = caught * (column(guard.latency_seconds) + guard.correction_seconds)
    # All but the recoveries.
    computing = np.maximum(1.0 - exposed["restart"] - exposed["restore"], 0.0)
    checked = (alarms + corrections) * computing
    wall = 1.0 + detection + waiting + going.pauses + checked
    between = column(settings.interval_seconds) * column(settings.tiers[-1].every)
    factor, back = _noticed(settings, silent / wall, between, running * going.present / wall)
    terms = {
        "checkpoint saves": exposed["checkpoint saves"],
        "keeping in memory": exposed["keeping in memory"],
        "lost work": exposed["lost work"],
        "detection": detection,
        "restart": exposed["restart"],
        "restore": exposed["restore"],
        "waiting for nodes": waiting,
        "regrouping": going.pauses,
        "guard": checked,
    }
    # The exposed parts add up to 1 only as far as rounding lets them.
    scale = factor / (running + summed(terms.values()))
    terms = {name: term * scale for name, term in terms.items()}
    terms["silent errors"] = 1.0 - factor
    left = running * scale
    # Steps that are slower than punctual ones of all groups.
    pace = settings.pace
    for name, share in (
        ("degraded running", 1.0 - going.up),
        ("guard", _part(guard.overhead)),
        ("coding", _part(pace.coding_overhead)),
        ("stragglers", _part(pace.straggling - 1.0)),
    ):
        terms[name] = terms.get(name, np.zeros(1)) + left * share
        left = left * (1.0 - share)
    per_second, zero = scale / np.maximum(left, SMALLEST_RATE), np.zeros(1)
    recoveries = exposed["lost work"] + exposed["restart"] + exposed["restore"] + detection
    # Waits are taken for exponential.
    waits = waiting * per_second / np.maximum(wait_seconds, 1e-9)
    outlasted = going.rate * going.present * per_second
    late = _noticed_rate(settings, silent) * per_second
    losses = (
        *losses_of(stops, per_second, apart, recoveries * per_second),
        Loss("waiting for nodes", waits, wait_seconds, wait_seconds**2, zero, zero),
        Loss("replica groups", outlasted, going.loss, going.loss**2, zero, zero),
        Loss("silent errors", late, back, zero, zero, zero),
    )
    shape = np.broadcast_shapes(left.shape, *(term.shape for term in terms.values()))
    return Goodput(
        np.broadcast_to(left, shape),
        {name: np.broadcast_to(terms[name], shape) for name in FORMULAS},
        losses,
    )


def _exposed(
    settings: Reliability, stops: Sequence[JobFailure]
) -> tuple[Array, dict[str, Array], tuple[Array, ...]]:
    """Divide exposed time between work and the cost of failures.

    Returns:
        Share of work that is kept; shares by the names of `FORMULAS`, "lost work" with its saves;
        of each tier, exposed seconds from save to save. All (candidates,) or (1,).
    """
    interval = column(settings.interval_seconds)
    every = [column(tier.every) for tier in settings.tiers]
    saves, kept = np.zeros(1), np.zeros(1)
    for tier, apart in zip(settings.tiers, every, strict=True):
        save = np.where(apart > 0.0, tier.overhead_seconds / np.maximum(apart, 1.0), 0.0)
        saves, kept = (saves, kept + save) if tier.kept else (saves + save, kept)
    whole = interval + saves + kept
    back = recovery_time(stops, len(every))
    # Each of the factors is finite, but not their product.
    per_interval = every[-1] / working_seconds(whole, every, back.rates)
    per_interval = per_interval / back.redone / back.longer
    lost = np.maximum(1.0 - per_interval * whole - back.restart - back.restore, 0.0)
    terms = {
        "checkpoint saves": per_interval * saves,
        "keeping in memory": per_interval * kept,
        "lost work": lost,
        "restart": back.restart,
        "restore": back.restore,
    }
    return per_interval * interval, terms, tuple(apart * whole for apart in every)


def _part(overhead: Number) -> Array:
    return column(overhead) / (1.0 + column(overhead))


def _noticed_rate(settings: Reliability, silent: Array) -> Array:
    guard = settings.guard
    return silent * (1.0 - column(guard.coverage)) * guard.noticed


def _noticed(
    settings: Reliability, silent: Array, apart: Array, running: Array
) -> tuple[Array, Array]:
    """Share of the wall time kept in spite of errors that are noticed late, and what one costs.

    All work from an error until it is noticed is thrown away, later errors with it; so clean time
    and waste alternate: a renewal with the mean clean time 1 / rate, of which whole intervals of T
    are kept: T / (exp(rate T) - 1) on average.

    Args:
        settings: All.
        silent: Silent errors per second of wall time.
        apart: Running time between the versions of the safest tier.
        running: First-time running of all groups together per wall time.
    """
    wall_apart = apart / np.maximum(running, SMALLEST_RATE)
    last = settings.tiers[-1]
    back = column(settings.restart.restart_seconds) + last.restore_seconds
    cost = column(settings.guard.noticed_hours) * HOUR_SECONDS + back
    rate = _noticed_rate(settings, silent)
    # Without such errors the interval may be without bound.
    exponent = np.where(rate > 0.0, np.minimum(rate * wall_apart, LARGEST_EXPONENT), 0.0)
    whole = np.where(exponent > 0.0, exponent / np.expm1(np.maximum(exponent, 1e-300)), 1.0)
    kept = whole / (1.0 + np.minimum(rate * cost, 1e250))
    each = (1.0 / kept - 1.0) / np.maximum(rate, SMALLEST_RATE)
    return kept, np.where(rate > 0.0, each, 0.0)


LARGEST_SECONDS = 1e290
LARGEST_LOSS = 1e100
"""Seconds of one loss, whose square is a float as well."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Wall time of a run, arrays (candidates,), predicted.

    Attributes:
        expected_seconds: Mean.
        undisturbed_seconds: When nothing fails.
        lost_work_seconds: Expected work that is done again.
        failures: Expected number of losses of all kinds.
        undisturbed_probability: That nothing fails.
        least_seconds: Shortest delay when something does.
        shape: Of the gamma distribution of what is beyond.
        scale_seconds: Of the same.
    """

    expected_seconds: Array
    undisturbed_seconds: Array
    lost_work_seconds: Array
    failures: Array
    undisturbed_probability: Array
    least_seconds: Array
    shape: Array
    scale_seconds: Array

    def quantile_seconds(self, share: float) -> Array:
        """Wall time within which the run is finished with this probability, in (0, 1)."""
        from scipy.special import gammaincinv

        free = self.undisturbed_probability
        inner = np.clip((share - free) / np.maximum(1.0 - free, 1e-12), 0.0, 1.0 - 1e-12)
        delay = self.least_seconds + self.scale_seconds * gammaincinv(self.shape, inner)
        return self.undisturbed_seconds + np.where(share <= free, 0.0, delay)

    def likely(self, deadline_seconds: Number, log_deviation: Number) -> Array:
        """Probability that the run is finished in time, its time being predicted with an error.

        All of the run's time is off by one log-normal factor. The delay by failures counts as
        log-normal here, too, with its mean and variance.

        Args:
            deadline_seconds: After the start.
            log_deviation: Of the logarithm of that factor, (cases,) or one.
        """
        from scipy.special import ndtr

        require("deadline_seconds", deadline_seconds, 0.0, above=True)
        deadline = np.log(column(deadline_seconds))
        spread = np.maximum(column(log_deviation), 1e-9)
        free = self.undisturbed_probability
        mean = self.undisturbed_seconds + self.least_seconds + self.shape * self.scale_seconds
        variance = np.log1p(self.shape * (self.scale_seconds / mean) ** 2)
        at_ease = ndtr((deadline - np.log(self.undisturbed_seconds)) / spread)
        delayed = ndtr((deadline - np.log(mean) + variance / 2.0) / np.sqrt(variance + spread**2))
        return np.asarray(free * at_ease + (1.0 - free) * delayed)


def finish(run: Goodput, productive_seconds: Number) -> Finish:
    """Distribution of the wall time of `productive_seconds` of progress.

    Args:
        run: Of each candidate.
        productive_seconds: Time of the run without saves, failures, guard, code and stragglers.

    Raises:
        PlanError: For a time that is not positive.
    """
    require("productive_seconds", productive_seconds, 0.0, above=True)
    work = column(productive_seconds)
    expected = np.minimum(work / np.maximum(run.ettr, SMALLEST_RATE), LARGEST_SECONDS)
    count = mean = variance = weight = np.zeros(1)
    least = np.full(1, np.inf)
    for loss in run.losses:
        number = np.minimum(loss.count * work, 1e200)
        count = count + number
        weight = weight + number / (1.0 + loss.clustering)
        mean = mean + number * loss.mean_seconds
        each = np.minimum(loss.mean_seconds, LARGEST_LOSS)
        square = loss.variance + (1.0 + loss.clustering) * each**2
        variance = variance + number * np.minimum(square, 1e250)
        least = np.where(number > 0.0, np.minimum(least, loss.least_seconds), least)
    mean = np.minimum(mean, expected - work)
    free = np.exp(-np.minimum(weight, 700.0))
    happens = np.maximum(1.0 - free, SMALLEST_RATE)
    middle = mean / happens
    least = np.minimum(np.where(np.isfinite(least), least, 0.0), 0.9 * middle)
    # Of the delay given that there is one: second moment over its probability, less the mean's.
    spread = np.maximum((variance + mean**2) / happens - middle**2, 1e-12 * middle**2)
    beyond = np.maximum(middle - least, SMALLEST_RATE)
    shape = np.clip(beyond**2 / np.maximum(spread, SMALLEST_RATE), 1e-3, 1e9)
    shares = run.terms["lost work"]
    every = np.broadcast_arrays(
        expected,
        # Of a hopeless run the difference is all rounding.
        np.maximum(expected - mean, work),
        np.minimum(shares * expected, LARGEST_SECONDS),
        count,
        free,
        least,
        shape,
        np.maximum(beyond / shape, SMALLEST_RATE),
    )
    return Finish(*every)
