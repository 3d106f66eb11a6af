"""What replica groups that go on without each other do to a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from outlast.plan.cases import Array
from outlast.plan.reliability.rates import batches_of, groups_hit, rate_of
from outlast.plan.reliability.recovery import HOUR_SECONDS, Reliability, column, lost_nodes
from outlast.plan.reliability.renewal import SMALLEST_RATE
from outlast.plan.reliability.units import Taken, last_ones, outlasted, units_of
from outlast.plan.reliability.waiting import missing_nodes


@dataclass(frozen=True, slots=True)
class Going:
    """What replica groups do to the run; all rates are per second of exposed time.

    Attributes:
        present: Share of the groups that are up.
        up: Share of the work that gets done: with fewer than the minimum there is none.
        pauses: Seconds for which all stand still.
        last: Of failures by their nodes, the share that takes the last group that is up.
        loss: Seconds that one failure costs.
        rate: Failures when all groups are up.
    """

    present: Array
    up: Array
    pauses: Array
    last: Mapping[int, Array]
    loss: Array
    rate: Array


def going_on(settings: Reliability, nodes: Array) -> Going:
    """Units of replica groups are up and down independently of each other."""
    replicas, back = settings.replicas, settings.restart
    groups = column(replicas.groups)
    pauses = rate = watched = down = repairs = np.zeros(1)
    taken: list[tuple[int, Array, Array, Array, Array]] = []
    for cause in settings.causes:
        if cause.silent:
            continue
        hit = groups_hit(settings, nodes, cause.nodes_hit)
        soft = (groups > 1.0) & (hit < groups)
        each = np.where(soft, rate_of(settings, cause, nodes), 0.0)
        absent = (
            column(back.restart_seconds)
            + (column(back.replace_seconds) if lost_nodes(cause) else 0.0)
            + column(replicas.recovery_seconds)
        )
        noticed = replicas.noticed_seconds(cause)
        pause = (
            noticed
            + column(replicas.regroup_seconds)
            + column(replicas.rejoin_seconds)
            + column(replicas.step_seconds) / 2.0
        )
        rate, pauses = rate + each, pauses + each * pause
        watched = watched + each * noticed
        repair = each * (cause.repair_hours if lost_nodes(cause) else 0.0) * HOUR_SECONDS
        down, repairs = down + each * hit * absent, repairs + repair * hit
        taken.append((cause.nodes_hit, hit, each, each * hit * absent, repair))
    if not (rate > 0.0).any():
        zero = np.zeros(1)
        return Going(np.ones(1), np.ones(1), zero, {}, zero, zero)
    short = _short_groups(settings, nodes)
    absent = (down + short) / groups
    # Who waits for a repair is one of those in repair.
    part = short / np.maximum(repairs, SMALLEST_RATE) / groups
    units = units_of(
        [
            Taken(number, hit, each, gone / groups, repair * hit * part, repair)
            for number, hit, each, gone, repair in taken
        ],
        groups,
    )
    seldom = 1.0 / (1.0 + absent)
    chances = last_ones(units, 1.0 - seldom, groups)
    last = {each.nodes: chance for each, chance in zip(units, chances, strict=True)}
    stops = sum((each * last[number] for number, _, each, _, _ in taken), np.zeros(1))
    # While all stand still, groups come back without loss of work: absence is shorter by `slow`,
    # wall time over exposed time, where slow = still + pauses up and up = slow / (slow + absent).
    still = 1.0 + stops * watched / np.maximum(rate, SMALLEST_RATE)
    half = (still + pauses - absent) / 2.0
    slow = half + np.sqrt(half**2 + still * absent)
    up = slow / (slow + absent)
    # E[K; K >= m] of K groups up is G a P(at most G - m absent), given that a certain one is up.
    fewest = column(replicas.minimum)
    enough = np.ones(1)
    if (fewest > 1.0).any():
        spare = np.where(fewest > 1.0, groups - fewest, 0.0)
        enough = np.where(fewest > 1.0, outlasted(units, spare, column(back.spares)), 1.0)
    # A failure costs the absence, the pause, and the time in which too few groups are left.
    loss = (absent + pauses + 1.0 - enough) / np.maximum(rate, SMALLEST_RATE)
    return Going(up, up * enough, pauses * up, last, loss, rate)


def _short_groups(settings: Reliability, nodes: Array) -> Array:
    """Mean replica groups that wait for a repair because no spare is left."""
    batches = batches_of(settings, nodes, np.ones(1))
    groups = column(settings.replicas.groups)
    load = sum((batch.load * batch.nodes for batch in batches), np.zeros(1))
    square = sum((batch.load * batch.nodes**2 for batch in batches), np.zeros(1))
    hit = sum(
        (batch.load * groups_hit(settings, nodes, batch.nodes) for batch in batches), groups * 0
    )
    peaked = np.maximum(1.0, square / np.maximum(load, SMALLEST_RATE))
    missing = missing_nodes(column(settings.restart.spares), np.where(groups > 1, load, 0), peaked)
    return missing * hit / np.maximum(load, SMALLEST_RATE)
