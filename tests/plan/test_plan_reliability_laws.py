"""The laws of goodput where failures strike during the recoveries, and no group is safe."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_random_runs import between

from outlast.plan.cluster import FailureCause
from outlast.plan.goodput import JobFailure, goodput, recovery_time
from outlast.plan.reliability import Guard, Pace, Reliability, Replicas, Restart, Tier
from outlast.plan.simulate import Scenario, simulate

APPROXIMATE = 3e-4
"""Of waits for whole racks, and of groups of which most are gone: three hundredths of a point."""


def ettr(run: Reliability) -> float:
    return float(goodput(run).ettr[0])


def more(run: Reliability, name: str, factor: float) -> Reliability:
    """The run with so many times the failures of that name."""
    return replace(
        run,
        causes=tuple(
            replace(each, per_node_day=each.per_node_day * (factor if each.name == name else 1.0))
            for each in run.causes
        ),
    )


CRASH = FailureCause(name="crash", per_node_day=1.0, detection_seconds=0.0)
NODE = FailureCause(name="node", per_node_day=1.0, detection_seconds=0.0, repair_hours=0.1)
SHARED = Tier(name="shared")
REPLACING = Reliability(
    nodes=6,
    causes=(CRASH, NODE),
    interval_seconds=60.0,
    tiers=(SHARED,),
    restart=Restart(restart_seconds=10.0, replace_seconds=30_000.0, spares=100),
)
"""A node is replaced for two means between failures: a crash was a quick way out of that."""
LOADING = replace(
    REPLACING,
    tiers=(
        Tier(name="memory", survives_nodes=0.0),
        Tier(name="shared", restore_seconds=30_000.0),
    ),
    restart=Restart(restart_seconds=10.0, spares=100),
)
"""The same of a version that only shared storage has."""
SILENT = FailureCause(name="crash", per_node_day=1.0, silent=True)
GUARDED = replace(LOADING, causes=(SILENT, NODE), guard=Guard(coverage=1.0, rolls_back=True))
"""The same of alarms."""
RACK = FailureCause(name="rack", per_node_day=60.0, nodes_hit=4, repair_hours=0.1)
LAST_GROUP = Reliability(
    nodes=8,
    causes=(CRASH, RACK),
    interval_seconds=3000.0,
    tiers=(Tier(name="memory", survives_nodes=0.0), Tier(name="shared", every=8)),
    restart=Restart(restart_seconds=600.0, spares=1000),
    replicas=Replicas(groups=8),
)
"""Racks take the last groups, not crashes: more crashes were fewer losses of the memory."""


@pytest.mark.parametrize(
    "run",
    [REPLACING, LOADING, GUARDED, LAST_GROUP],
    ids=["replacing", "loading", "alarms", "last group"],
)
def test_more_crashes_are_no_way_out(run: Reliability) -> None:
    found = [ettr(more(run, "crash", 2.0**power)) for power in range(-6, 7)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1] > 0.0


def test_two_groups_that_are_mostly_gone_fail_as_often_as_one() -> None:
    node = replace(NODE, per_node_day=24.0, repair_hours=24.0)
    run = replace(
        REPLACING, nodes=2, causes=(node,), restart=Restart(), replicas=Replicas(groups=2)
    )
    found = [ettr(more(run, "node", 2.0**power)) for power in range(8)]
    assert found == sorted(found, reverse=True)
    # One of the two is up, and takes the run with it every time that it fails.
    made = goodput(run)
    stops = 86_400.0 * float(made.losses[0].count[0] * made.ettr[0])
    stops /= 1.0 - made.terms["detection"][0]
    assert stops == pytest.approx(24.0, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.25, 1.0, 8.0])
def test_the_simulated_run_finds_no_way_out_either(factor: float) -> None:
    run = more(REPLACING, "crash", factor)
    simulated = simulate(
        Scenario(reliability=run, productive_days=400.0, limit_days=400.0, trials=20)
    )
    assert ettr(run) == pytest.approx(simulated.ettr, abs=0.01)


def stop(rate: float, tier: int, restart: float, restore: float, redone: float) -> JobFailure:
    values = (rate, tier, 0.0, 0.0, redone, restart, restore)
    return JobFailure("any", *(np.array([float(value)]) for value in values))


STOPS = (
    stop(1e-3, 0, 100.0, 20.0, 30.0),
    stop(3e-4, 1, 900.0, 10.0, 50.0),
    stop(5e-4, 0, 2000.0, 0.0, 30.0),
    stop(2e-4, 2, 300.0, 700.0, 400.0),
)


def subsets() -> Iterator[tuple[int, ...]]:
    every = range(len(STOPS))
    for size in range(1, len(STOPS) + 1):
        yield from combinations(every, size)


def test_ways_back_are_those_of_the_chain_of_all_that_struck() -> None:
    """By linear equations over all sets of failures that a recovery has to make good."""
    rates = np.array([float(each.rate[0]) for each in STOPS])
    total = rates.sum()
    states = list(subsets())
    size = len(states)
    leaves, spent = np.eye(size), np.zeros((3, size))
    cleared = np.zeros((size, 3))
    for row, struck in enumerate(states):
        parts = [STOPS[index] for index in struck]
        longest = max(parts, key=lambda each: float(each.restart[0] + each.restore[0]))
        restart, restore = float(longest.restart[0]), float(longest.restore[0])
        passes = math.exp(-total * (restart + restore))
        spent[0, row] = (1.0 - passes) / total
        spent[1, row] = -math.expm1(-total * restart) / total
        spent[2, row] = -math.exp(-total * restart) * math.expm1(-total * restore) / total
        cleared[row, max(int(each.tier[0]) for each in parts)] = passes
        for index, rate in enumerate(rates):
            after = states.index(tuple(sorted({*struck, index})))
            leaves[row, after] -= (1.0 - passes) * rate / total
    first = [states.index((index,)) for index in range(len(STOPS))]
    mean = [float(np.linalg.solve(leaves, each)[first] @ rates / total) for each in spent]
    level = np.linalg.solve(leaves, cleared)[first].T @ rates / total
    assert level.sum() == pytest.approx(1.0)
    # And what is redone, from level to level.
    again, rest, ends = np.eye(3), np.zeros(3), np.zeros((3, 3))
    for row, redone in enumerate((30.0, 50.0, 400.0)):
        fails = -math.expm1(-total * redone)
        rest[row] = fails / total + fails * mean[0]
        ends[row, row] = 1.0 - fails
        for other in range(3):
            again[row, max(row, other)] -= fails * level[other]
    whole = mean[0] + float(level @ np.linalg.solve(again, rest))
    found = recovery_time(STOPS, 3)
    assert found.longer[0] == pytest.approx(1.0 + total * mean[0], rel=1e-12)
    assert found.longer[0] * found.redone[0] == pytest.approx(1.0 + total * whole, rel=1e-12)
    assert found.restart[0] == pytest.approx(total * mean[1] / found.longer[0], rel=1e-12)
    assert found.restore[0] == pytest.approx(total * mean[2] / found.longer[0], rel=1e-12)
    expected = total * (level @ np.linalg.solve(again, ends))
    assert [float(rate[0]) for rate in found.rates] == pytest.approx(list(expected), rel=1e-12)


@st.composite
def extreme(draw: st.DrawFn) -> Reliability:
    """Runs where everything is slow, fast, rare or frequent: most are hopeless."""
    interval, nodes = draw(between(1.0, 1e5)), round(draw(between(1.0, 12_500.0)))
    rate, hours, seconds = between(1e-8, 30.0), between(0.01, 1000.0), between(0.1, 1e4)
    kinds = (
        {"name": "crash"},
        {"name": "node", "repair_hours": draw(hours)},
        {"name": "rack", "repair_hours": draw(hours), "nodes_hit": draw(st.integers(2, 64))},
        {"name": "silent", "silent": True},
    )
    causes = [
        FailureCause(per_node_day=draw(rate), detection_seconds=draw(seconds), **kind)  # type: ignore[arg-type]
        for kind in draw(st.lists(st.sampled_from(kinds), min_size=1, unique_by=id))
    ]
    memory = Tier(
        name="memory",
        survives_nodes=0.0,
        blocked_seconds=draw(between(1e-3, 10.0)),
        restore_seconds=draw(seconds),
    )
    shared = Tier(
        name="shared",
        every=draw(st.integers(1, 20)),
        blocked_seconds=draw(between(1e-3, 1e3)),
        write_seconds=min(draw(between(0.01, 1e4)), interval),
        slowdown=0.02,
        restore_seconds=draw(seconds),
    )
    groups = draw(st.sampled_from([1, 1, 2, nodes, 8 * nodes, max(1, nodes // 4)]))
    share = st.floats(0.0, 1.0)
    return Reliability(
        nodes=nodes,
        causes=tuple(causes),
        interval_seconds=interval,
        tiers=draw(st.sampled_from([(memory, shared), (shared,)])),
        restart=Restart(
            restart_seconds=draw(between(0.1, 1e5)),
            replace_seconds=draw(between(0.1, 1e5)),
            spares=draw(st.integers(0, 300)),
        ),
        replicas=Replicas(
            groups=groups,
            minimum=draw(st.sampled_from([1, max(groups - 3, 1), groups])),
            step_seconds=draw(between(0.1, 1e3)),
            regroup_seconds=draw(between(0.1, 100.0)),
            rejoin_seconds=draw(between(0.1, 100.0)),
        ),
        guard=Guard(
            coverage=draw(share),
            latency_seconds=draw(between(0.1, 1e3)),
            correction_seconds=draw(between(0.1, 1e3)),
            rolls_back=draw(st.booleans()),
            false_alarms_per_day=draw(between(1e-4, 100.0)),
            alarm_seconds=draw(between(0.1, 100.0)),
            noticed=draw(share),
            noticed_hours=draw(between(0.1, 100.0)),
        ),
        pace=Pace(straggler_factor=draw(st.floats(1.0, 2.0))),
    )


def worse(run: Reliability, factor: float) -> Iterator[tuple[str, Reliability]]:
    """All that may get worse: failures, their detection, restarts, restores, saves, spares."""
    for index, cause in enumerate(run.causes):
        for field in ("per_node_day", "detection_seconds"):
            causes = list(run.causes)
            causes[index] = replace(cause, **{field: getattr(cause, field) * factor})
            yield f"{field} of {cause.name}", replace(run, causes=tuple(causes))
    back = run.restart
    for field in ("restart_seconds", "replace_seconds"):
        slower = replace(back, **{field: getattr(back, field) * factor})
        yield field, replace(run, restart=slower)
    for index, tier in enumerate(run.tiers):
        for field in ("restore_seconds", "blocked_seconds"):
            tiers = list(run.tiers)
            tiers[index] = replace(tier, **{field: getattr(tier, field) * factor})
            yield f"{field} of {tier.name}", replace(run, tiers=tuple(tiers))
    fewer = math.floor(float(np.max(back.spares)) / factor)
    yield "spares", replace(run, restart=replace(back, spares=fewer))


@pytest.mark.slow
@given(extreme(), st.floats(1.01, 8.0))
@settings(max_examples=150)
def test_nothing_that_gets_worse_raises_the_progress_of_an_extreme_run(
    run: Reliability, factor: float
) -> None:
    before = ettr(run)
    racks = any(cause.nodes_hit > 1 and cause.repair_hours > 0.0 for cause in run.causes)
    # Alone, and with nodes that are repaired one by one, the law is exact.
    exact = not racks and float(np.max(run.replicas.groups)) == 1.0
    for name, other in worse(run, factor):
        assert ettr(other) <= before + (1e-9 if exact else APPROXIMATE), name
