"""Laws of the closed form of goodput, and its ties to the checkpoint's own formulas."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.checkpoint.cost import Failures, SaveCost, waste_fraction
from outlast.errors import PlanError
from outlast.plan.cluster import FailureCause
from outlast.plan.goodput import FORMULAS, goodput
from outlast.plan.reliability import Guard, Pace, Reliability, Replicas, Restart, Tier, early_factor

SHARED = Tier(name="shared", blocked_seconds=5.0, write_seconds=30.0, slowdown=0.1)
CRASH = FailureCause(name="crash", per_node_day=0.004, detection_seconds=0.0)


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


@st.composite
def causes(draw: st.DrawFn) -> tuple[FailureCause, ...]:
    rate, seconds = numbers(0.0, 0.02), numbers(0.0, 3600.0)
    hours = numbers(0.1, 72.0)
    return (
        FailureCause(name="crash", per_node_day=draw(rate), detection_seconds=draw(seconds)),
        FailureCause(
            name="node",
            per_node_day=draw(rate),
            detection_seconds=draw(seconds),
            repair_hours=draw(hours),
        ),
        FailureCause(
            name="rack",
            per_node_day=draw(rate),
            nodes_hit=draw(st.integers(1, 16)),
            repair_hours=draw(hours),
        ),
        FailureCause(name="silent", per_node_day=draw(numbers(0.0, 0.002)), silent=True),
    )


@st.composite
def runs(draw: st.DrawFn) -> Reliability:
    interval = draw(numbers(60.0, 21_600.0))

    def tier(name: str, survives: float, every: int) -> Tier:
        return Tier(
            name=name,
            survives_nodes=survives,
            every=every,
            blocked_seconds=draw(numbers(0.0, 60.0)),
            write_seconds=draw(numbers(0.0, interval)),
            slowdown=draw(numbers(0.0, 0.2)),
            restore_seconds=draw(numbers(0.0, 600.0)),
        )

    several = draw(st.integers(1, 6))
    every = max(1, several * draw(st.integers(0, 3)))
    nodes = draw(st.integers(1, 16_384))
    groups = draw(st.integers(1, min(nodes, 16)))
    return Reliability(
        nodes=nodes,
        causes=draw(causes()),
        interval_seconds=interval,
        tiers=(
            tier("memory", 0.0, 1),
            tier("peer", 1.0, several if every % several == 0 else 0),
            tier("shared", math.inf, every),
        ),
        restart=Restart(
            restart_seconds=draw(numbers(0.0, 3600.0)),
            replace_seconds=draw(numbers(0.0, 600.0)),
            spares=draw(st.integers(0, 40)),
        ),
        replicas=Replicas(
            groups=groups,
            minimum=draw(st.integers(1, groups)),
            regroup_seconds=draw(numbers(0.0, 120.0)),
            rejoin_seconds=draw(numbers(0.0, 120.0)),
        ),
        guard=Guard(
            coverage=draw(numbers(0.0, 1.0)),
            overhead=draw(numbers(0.0, 0.1)),
            latency_seconds=draw(numbers(0.0, 60.0)),
            rolls_back=draw(st.booleans()),
            false_alarms_per_day=draw(numbers(0.0, 10.0)),
            alarm_seconds=draw(numbers(0.0, 60.0)),
            noticed=draw(numbers(0.0, 1.0)),
        ),
        pace=Pace(straggler_factor=draw(numbers(1.0, 1.5)), coding_ratio=draw(numbers(0.6, 1.0))),
    )


def ettr(run: Reliability) -> float:
    return float(goodput(run).ettr[0])


@given(runs())
@settings(max_examples=40, deadline=None)
def test_terms_are_shares_that_sum_to_one(run: Reliability) -> None:
    found = goodput(run)
    assert 0.0 <= found.ettr[0] <= 1.0
    assert set(found.terms) == set(FORMULAS)
    for name, share in found.terms.items():
        assert np.isfinite(share[0]), name
        assert share[0] >= 0.0, name
    assert sum(term.value for term in found.explain()) == pytest.approx(1.0, abs=1e-9)


@given(runs(), numbers(1.0, 4.0), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_more_failures_never_raise_it(run: Reliability, factor: float, which: int) -> None:
    worse = list(run.causes)
    worse[which] = replace(worse[which], per_node_day=worse[which].per_node_day * factor)
    assert ettr(replace(run, causes=tuple(worse))) <= ettr(run) + 1e-6


@pytest.mark.slow
@given(runs(), numbers(0.0, 600.0))
@settings(max_examples=40, deadline=None)
def test_slower_recovery_never_raises_it(run: Reliability, more: float) -> None:
    # Waits for racks are approximated, to far less than a hundredth of a point.
    before = ettr(run) + 1e-4
    back = run.restart
    later = tuple(replace(c, detection_seconds=c.detection_seconds + more) for c in run.causes)
    tiers = tuple(replace(t, restore_seconds=t.restore_seconds + more) for t in run.tiers)
    saves = tuple(replace(t, blocked_seconds=t.blocked_seconds + more) for t in run.tiers)
    restart = replace(back, restart_seconds=back.restart_seconds + more)
    assert ettr(replace(run, causes=later)) <= before
    assert ettr(replace(run, tiers=tiers)) <= before
    assert ettr(replace(run, tiers=saves)) <= before
    assert ettr(replace(run, restart=restart)) <= before


@given(runs(), st.integers(1, 20))
@settings(max_examples=40, deadline=None)
def test_spares_never_hurt(run: Reliability, more: int) -> None:
    richer = replace(run, restart=replace(run.restart, spares=run.restart.spares + more))
    # The waits for whole racks are approximate.
    assert ettr(richer) >= ettr(run) - 1e-3


def test_nothing_is_lost_when_nothing_fails_and_saves_are_free() -> None:
    run = Reliability(nodes=1024, causes=(), interval_seconds=600.0, tiers=(Tier(name="shared"),))
    assert ettr(run) == 1.0
    assert ettr(replace(run, causes=(replace(CRASH, per_node_day=0.0),))) == 1.0


@pytest.mark.parametrize("interval", [600.0, 6000.0, 60_000.0])
def test_one_tier_is_the_checkpoints_own_formula(interval: float) -> None:
    tier = replace(SHARED, restore_seconds=30.0)
    run = Reliability(
        nodes=2048,
        causes=(CRASH,),
        interval_seconds=interval,
        tiers=(tier,),
        restart=Restart(restart_seconds=300.0),
    )
    save = SaveCost(5.0, 30.0, 0.1)
    failures = Failures(2048 * 0.004 / 86_400.0, 300.0, 30.0)
    waste = waste_fraction(interval + save.overhead_seconds, save, failures)
    assert ettr(run) == pytest.approx(1.0 - waste, rel=1e-12)


@pytest.mark.slow
@given(st.lists(runs(), min_size=1, max_size=1), st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_many_candidates_at_once_are_as_one_by_one(some: list[Reliability], seed: int) -> None:
    run = some[0]
    generator = np.random.default_rng(seed)
    nodes = generator.integers(run.replicas.groups, 16_384, 7).astype(float)
    interval = float(run.interval_seconds) * generator.uniform(1.0, 3.0, 7)
    every = generator.choice([0.0, 1.0], 7)
    spares = generator.integers(0, 30, 7).astype(float)

    def made(nodes: object, interval: object, every: object, spares: object) -> Reliability:
        first = replace(run.tiers[0], every=every)
        return replace(
            run,
            nodes=nodes,
            interval_seconds=interval,
            tiers=(first, *run.tiers[1:]),
            restart=replace(run.restart, spares=spares),
        )

    together = goodput(made(nodes, interval, every, spares))
    assert together.ettr.shape == (7,)
    for index in range(7):
        alone = goodput(
            made(
                float(nodes[index]),
                float(interval[index]),
                float(every[index]),
                float(spares[index]),
            )
        )
        assert together.ettr[index] == pytest.approx(alone.ettr[0], rel=1e-9, abs=1e-15)
        for name in FORMULAS:
            assert together.terms[name][index] == pytest.approx(alone.terms[name][0], abs=1e-9)


def test_without_spares_each_repair_is_waited_for() -> None:
    node = FailureCause(name="node", per_node_day=0.001, detection_seconds=0.0, repair_hours=10.0)
    run = Reliability(
        nodes=100,
        causes=(node,),
        interval_seconds=1e-3,
        tiers=(Tier(name="shared"),),
        restart=Restart(restart_seconds=0.0),
    )
    # A failure every 10 days costs 10 hours.
    assert ettr(run) == pytest.approx(240.0 / 250.0, abs=1e-6)
    assert ettr(replace(run, restart=Restart(restart_seconds=0.0, spares=9))) > 0.999999


def test_a_peers_memory_survives_one_node_and_not_a_rack() -> None:
    tiers = (
        Tier(name="peer", survives_nodes=1.0, blocked_seconds=1.0),
        Tier(name="shared", every=20, blocked_seconds=1.0),
    )
    node = FailureCause(name="node", per_node_day=0.01, nodes_hit=1, repair_hours=1.0)
    run = Reliability(
        nodes=1000,
        causes=(node,),
        interval_seconds=300.0,
        tiers=tiers,
        restart=Restart(spares=1000),
    )
    racks = replace(node, per_node_day=0.02, nodes_hit=2)
    lost = goodput(run).terms["lost work"][0]
    assert goodput(replace(run, causes=(racks,))).terms["lost work"][0] > 8.0 * lost


def test_a_run_within_one_rack_stops_whenever_it_does() -> None:
    rack = FailureCause(name="rack", per_node_day=0.01, nodes_hit=16)
    assert [float(rack.per_day(nodes)) for nodes in (1, 8, 16)] == [0.01] * 3
    assert float(rack.per_day(64)) == pytest.approx(0.04)
    run = Reliability(nodes=4, causes=(rack,), interval_seconds=600.0, tiers=(SHARED,))
    assert ettr(run) == pytest.approx(ettr(replace(run, nodes=16)), rel=1e-12)


@pytest.mark.parametrize("shape", [0.0, 0.01, 100.0, math.nan, math.inf])
def test_shapes_that_no_failure_has_are_refused(shape: float) -> None:
    with pytest.raises(PlanError, match="shape = "):
        replace(CRASH, shape=shape)


def test_replica_groups_lose_no_more_than_their_share() -> None:
    node = FailureCause(name="node", per_node_day=0.01, detection_seconds=10.0, repair_hours=1.0)
    run = Reliability(
        nodes=512,
        causes=(node,),
        interval_seconds=3600.0,
        tiers=(SHARED,),
        restart=Restart(restart_seconds=600.0, spares=512),
    )
    groups = Replicas(groups=16, step_seconds=10.0, regroup_seconds=5.0)
    found = goodput(replace(run, replicas=groups))
    assert found.ettr[0] > goodput(run).ettr[0] + 0.05
    assert found.terms["lost work"][0] < 1e-6
    absent = 5.12 * 600.0 / 86_400.0 / 16.0
    assert found.terms["degraded running"][0] == pytest.approx(absent, rel=0.02)


def test_a_guard_saves_what_late_discovery_costs() -> None:
    silent = FailureCause(name="silent", per_node_day=3e-4, silent=True)
    run = Reliability(
        nodes=1024,
        causes=(silent,),
        interval_seconds=600.0,
        tiers=(Tier(name="shared"),),
        guard=Guard(noticed=0.5, noticed_hours=48.0),
    )
    guarded = replace(run, guard=replace(run.guard, coverage=0.95, overhead=0.02))
    bare, safe = goodput(run), goodput(guarded)
    assert safe.ettr[0] > bare.ettr[0] + 0.1
    assert safe.terms["guard"][0] == pytest.approx(0.02, abs=0.002)
    # Half of 0.3 errors a day are seen 2 days later: of 1 + 0.3 days of time 1 is kept.
    assert bare.ettr[0] == pytest.approx(1.0 / (1.0 + 0.1536 * 2.0), rel=0.01)


def test_a_code_is_faster_by_its_ratio_and_slower_by_its_claims() -> None:
    pace = Pace(straggler_factor=1.2, coding_ratio=0.9, coding_overhead=0.01)
    run = Reliability(
        nodes=8, causes=(), interval_seconds=600.0, tiers=(Tier(name="shared"),), pace=pace
    )
    found = goodput(run)
    assert found.ettr[0] == pytest.approx(1.0 / (1.2 * 0.9 * 1.01), rel=1e-12)
    assert found.terms["coding"][0] == pytest.approx(0.01 / 1.01, rel=1e-12)


def test_new_nodes_with_early_deaths_fail_more_often() -> None:
    assert early_factor(1.0, 100.0, 10.0) == 1.0
    assert early_factor(0.7, 150.0, 30.0) > 1.5
    assert early_factor(1.5, 150.0, 30.0) < 0.6
    assert early_factor(0.7, 1.0, 5000.0) == pytest.approx(1.0, abs=0.02)
    # Few failures in a short time: M(t) is about F(t).
    days, mean = 1.0, 1000.0
    spread = -math.expm1(-((days / mean * math.gamma(1.0 + 1.0 / 0.7)) ** 0.7))
    assert early_factor(0.7, mean, days) == pytest.approx(spread / (days / mean), rel=0.02)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nodes": 0}, "nodes = 0"),
        ({"nodes": math.inf}, "nodes = inf"),
        ({"nodes": np.array([4.0, math.nan])}, "nodes = nan"),
        ({"interval_seconds": 0.0}, "interval_seconds = 0"),
        ({"interval_seconds": math.inf}, "interval_seconds = inf"),
        ({"interval_seconds": 20.0}, "not durable before the next save, 20 s later"),
        ({"tiers": ()}, "at least one store"),
        ({"tiers": (Tier(name="peer", survives_nodes=1.0),)}, "nothing is left after 'rack'"),
        ({"tiers": (SHARED, Tier(name="peer", survives_nodes=1.0))}, "survives less"),
        ({"tiers": (replace(SHARED, every=2), replace(SHARED, every=3))}, "no multiple"),
        ({"tiers": (replace(SHARED, every=0),)}, "every = 0 of the last tier"),
        ({"days_from_new": 0.0}, "days_from_new = 0"),
        ({"nodes": np.ones(2), "interval_seconds": np.full(3, 600.0)}, "2 and 3 values"),
    ],
)
def test_bad_settings_are_refused(change: dict[str, object], words: str) -> None:
    rack = FailureCause(name="rack", per_node_day=0.001, nodes_hit=4, repair_hours=1.0)
    run = Reliability(nodes=64, causes=(rack,), interval_seconds=600.0, tiers=(SHARED,))
    with pytest.raises(PlanError, match=words):
        replace(run, **change)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        (Tier, {"name": "x", "blocked_seconds": -1.0}),
        (Tier, {"name": "x", "every": 1.5}),
        (Restart, {"restart_seconds": math.inf}),
        (Replicas, {"groups": 2, "minimum": 3}),
        (Guard, {"coverage": 1.1}),
        (Pace, {"straggler_factor": 0.9}),
    ],
)
def test_bad_parts_are_refused(part: type, change: dict[str, object]) -> None:
    with pytest.raises(PlanError, match=r"give|with this"):
        part(**change)
