"""Share of a run's wall time that is progress (ETTR), and what the rest is lost to.

A renewal-reward closed form for many candidates at once. Failures are independent and exponential;
those with Weibull times count with their mean rate over `days_from_new`. They strike while the run
computes, saves, restarts and restores, and not while a failure waits to be detected or a node
to be repaired. `renewal` gives the working time per interval, `ways_back` by how much restarts and
restores lengthen it, `waiting` the time without nodes, and this module shares all out to terms that
add up to 1 with the progress.

More failures, slower detection, restarts, restores and saves, and fewer spares never raise the
share; `ways_back` says why. With one group and single nodes in repair this is exact. Waits for
whole racks are approximate, as are replica groups of which many are gone: there it may rise by up
to 0.03 points (random extreme runs: tests/plan/test_plan_reliability_laws.py).

Shares are those of the long run. A run of a few repair times that begins with all nodes and spares
whole does better, by up to the repair time over its length where it mostly waits for nodes.

The effective training time ratio is that of Kokolis et al. 2025 (HPCA, arXiv 2410.21680, section
II-D): productive time over wall time; here steps that are longer than those of punctual workers
without guard and code count as partly lost, which the terms show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from outlast.plan.cases import Array
from outlast.plan.estimate import Term
from outlast.plan.reliability import losses
from outlast.plan.reliability.going import going_on
from outlast.plan.reliability.losses import Loss
from outlast.plan.reliability.rates import batches_of, rate_of
from outlast.plan.reliability.recovery import (
    DAY_SECONDS,
    HOUR_SECONDS,
    Reliability,
    column,
)
from outlast.plan.reliability.renewal import (
    LARGEST_EXPONENT,
    SMALLEST_RATE,
    working_seconds,
)
from outlast.plan.reliability.stops import Stop, stops_of
from outlast.plan.reliability.waiting import waited
from outlast.plan.reliability.ways_back import ways_back

FORMULAS: Mapping[str, tuple[str, str]] = {
    "checkpoint saves": (
        "sum over tiers of overhead / every, per interval",
        "outlast.checkpoint.cost (Young 1974; Daly 2006)",
    ),
    "keeping in memory": (
        "max(copy + parity - slack of a step, 0) / every, per kept state",
        "outlast.recover.cost",
    ),
    "lost work": (
        "exposed time - running - saves - restarts, exposed = exp(l Q) (exp(l T) - 1) / l",
        "Daly 2006, FGCS 22, eq. 20; several tiers and ways back: own, solved exactly",
    ),
    "detection": ("rate x detection", "own"),
    "restart": ("rate x tries x (1 - exp(-l R)) / l, R = restart + replacement", "own"),
    "restore": ("rate x tries x exp(-l R) (1 - exp(-l V)) / l, V = restore", "own"),
    "waiting for nodes": (
        "B / (1 - B), B = Erlang's loss formula with spares + 1 servers",
        "Erlang 1917; several nodes at once: Fredericks 1980 (Hayward)",
    ),
    "regrouping": ("rate x (detection + regroup + rejoin + step / 2)", "own"),
    "degraded running": ("1 - E[groups up] / groups, binomial", "own"),
    "silent errors": (
        "1 - x / (exp(x) - 1) / (1 + rate x (noticed after + restart)), x = rate x T",
        "own",
    ),
    "guard": ("overhead / (1 + overhead) + alarms and corrections", "outlast.guard.cost"),
    "coding": ("overhead / (1 + overhead)", "outlast.coding.cost"),
    "stragglers": ("1 - 1 / factor", "outlast.coding.cost"),
}
"""Of each term: its formula and its source."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Arrays have shape (candidates,).

    Attributes:
        ettr: Progress per wall time, in [0, 1].
        terms: Shares of the wall time that are lost, by the names of `FORMULAS`; with `ettr` they
            add up to 1.
        stops_per_day: Failures that stop the whole run, per day of wall time.
        unseen_per_day: Silent errors that nobody ever notices, per day of wall time.
        losses: What the distribution of the finishing time is made of.
    """

    ettr: Array
    terms: Mapping[str, Array]
    stops_per_day: Array
    unseen_per_day: Array
    losses: tuple[Loss, ...]

    def explain(self, candidate: int = 0) -> tuple[Term, ...]:
        """The terms of one candidate, progress first."""
        parts = [Term("progress", float(self.ettr[candidate]), "1 - the other terms")]
        for name, share in self.terms.items():
            formula, source = FORMULAS[name]
            parts.append(Term(name, float(share[candidate]), formula, source=source))
        return tuple(parts)


@dataclass(frozen=True, slots=True)
class _Exposure:
    """What exposed time goes to, as shares of it, (candidates,) or (1,).

    Attributes:
        running: Work that is kept.
        checkpoints: Saves.
        kept: Keeping states in memory.
        restart: Starting again.
        restore: Loading a version.
        lost: Work that is done again, with its saves.
        apart: Of each tier, exposed seconds from save to save.
    """

    running: Array
    checkpoints: Array
    kept: Array
    restart: Array
    restore: Array
    lost: Array
    apart: tuple[Array, ...]

    @property
    def computing(self) -> Array:
        """All but the ways back."""
        found: Array = np.maximum(1.0 - self.restart - self.restore, 0.0)
        return found


def goodput(settings: Reliability) -> Goodput:
    """ETTR and lost time of every candidate of `settings`; takes about a microsecond for each.

    Raises:
        PlanError: More spares than can be counted, where several nodes fail at once.
    """
    nodes = column(settings.nodes)
    going = going_on(settings, nodes)
    stops = [stop for stop in stops_of(settings, nodes, going) if (stop.rate > 0.0).any()]
    share = _exposure(settings, stops)
    detection = sum((stop.rate * stop.detection for stop in stops), np.zeros(1))
    waiting, wait_seconds = _waiting(settings, nodes, detection)
    errors = _silent_rate(settings, nodes) * going.present
    # Errors in work that is thrown away anyway do no harm.
    silent = errors * share.running
    checked = _checked(settings, errors, share.computing)
    wall = 1.0 + detection + waiting + going.pauses + checked
    between = column(settings.interval_seconds) * column(settings.tiers[-1].every)
    factor, back = _noticed(settings, silent / wall, between, share.running * going.present / wall)
    terms = {
        "checkpoint saves": share.checkpoints,
        "keeping in memory": share.kept,
        "lost work": share.lost,
        "detection": detection,
        "restart": share.restart,
        "restore": share.restore,
        "waiting for nodes": waiting,
        "regrouping": going.pauses,
        "guard": checked,
    }
    # The exposed parts add up to 1 only as far as rounding lets them.
    scale = factor / (share.running + sum(terms.values(), np.zeros(1)))
    terms = {name: term * scale for name, term in terms.items()}
    terms["silent errors"] = 1.0 - factor
    left = _paced(settings, going.up, share.running * scale, terms)
    per_second = scale / np.maximum(left, SMALLEST_RATE)
    found = losses.of_stops(
        [(s.name, s.rate * per_second, s.detection, s.back_seconds, s.tier) for s in stops],
        [s.rate for s in stops],
        share.apart,
        excess=(share.lost + share.restart + share.restore + detection) * per_second,
    )
    found += losses.others(
        waiting=(waiting * per_second, wait_seconds),
        going=(going.rate * going.present * per_second, going.loss),
        silent=(_noticed_rate(settings, silent) * per_second, back),
    )
    shape = np.broadcast_shapes(left.shape, *(term.shape for term in terms.values()))
    unseen = silent / wall * factor * (1.0 - column(settings.guard.coverage))
    return Goodput(
        np.broadcast_to(left, shape),
        {name: np.broadcast_to(terms[name], shape) for name in FORMULAS},
        np.broadcast_to(sum((s.rate for s in stops), np.zeros(1)) * scale * DAY_SECONDS, shape),
        np.broadcast_to(unseen * (1.0 - column(settings.guard.noticed)) * DAY_SECONDS, shape),
        found,
    )


def _exposure(settings: Reliability, stops: Sequence[Stop]) -> _Exposure:
    """How exposed time is shared out between work and what the stops cost."""
    interval = column(settings.interval_seconds)
    every = [column(tier.every) for tier in settings.tiers]
    saves, kept = np.zeros(1), np.zeros(1)
    for tier, apart in zip(settings.tiers, every, strict=True):
        each = np.where(apart > 0.0, tier.overhead_seconds / np.maximum(apart, 1.0), 0.0)
        saves, kept = (saves, kept + each) if tier.kept else (saves + each, kept)
    whole = interval + saves + kept
    back = ways_back(stops, len(every))
    # Each of the factors is finite, but not their product.
    per_interval = every[-1] / working_seconds(whole, every, back.rates)
    per_interval = per_interval / back.redone / back.longer
    running = per_interval * interval
    return _Exposure(
        running=running,
        checkpoints=per_interval * saves,
        kept=per_interval * kept,
        restart=back.restart,
        restore=back.restore,
        lost=np.maximum(1.0 - per_interval * whole - back.restart - back.restore, 0.0),
        apart=tuple(apart * whole for apart in every),
    )


def _checked(settings: Reliability, errors: Array, computing: Array) -> Array:
    """Seconds of false alarms and of corrections in place, per exposed second.

    Args:
        settings: All.
        errors: Silent errors per second of computing.
        computing: Seconds of computing per exposed second.
    """
    guard = settings.guard
    alarms = column(guard.false_alarms_per_day) / DAY_SECONDS * guard.alarm_seconds
    caught = errors * guard.coverage * (not guard.rolls_back)
    corrections = caught * (column(guard.latency_seconds) + guard.correction_seconds)
    return (alarms + corrections) * computing


def _paced(settings: Reliability, up: Array, left: Array, terms: dict[str, Array]) -> Array:
    """What is left of the wall time when steps are slower than punctual ones; adds to the terms.

    Args:
        settings: All.
        up: Share of the groups that get work done.
        left: Share of the wall time in which the run goes on.
        terms: Shares that are lost, by name.
    """
    pace = settings.pace
    for name, share in (
        ("degraded running", 1.0 - up),
        ("guard", _part(settings.guard.overhead)),
        ("coding", _part(pace.coding_overhead)),
        ("stragglers", _part(pace.straggling - 1.0)),
    ):
        terms[name] = terms.get(name, np.zeros(1)) + left * share
        left = left * (1.0 - share)
    return left


def _part(overhead: object) -> Array:
    added = np.atleast_1d(np.asarray(overhead, dtype=np.float64))
    return added / (1.0 + added)


def _silent_rate(settings: Reliability, nodes: Array) -> Array:
    rates = (rate_of(settings, c, nodes) for c in settings.causes if c.silent)
    return sum(rates, np.zeros(1))


def _waiting(settings: Reliability, nodes: Array, detection: Array) -> tuple[Array, Array]:
    """Seconds without enough nodes per exposed second, and mean seconds of one wait."""
    slow = 1.0 + detection
    batches = batches_of(settings, nodes, slow)
    spares = column(settings.restart.spares)
    ratio = np.where(column(settings.replicas.groups) > 1.0, 0.0, waited(batches, spares))
    load = sum((batch.load for batch in batches), np.zeros(1))
    rate = sum((batch.per_second for batch in batches), np.zeros(1))
    return ratio * slow, load / np.maximum(rate, SMALLEST_RATE) / (spares + 1.0)


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
