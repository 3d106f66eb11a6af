"""Periods under a bandwidth budget, orders of requests, and what they are worth in a fluid."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_saves import simulate_saves

from outlast.cluster.storage import (
    SavingJob,
    priority,
    set_of,
    shared_periods,
    waiting_cost,
    waste_of,
)
from outlast.errors import ClusterError

jobs = st.lists(
    st.builds(
        SavingJob,
        st.floats(1.0, 500.0),
        st.floats(1.0, 2000.0),
        st.floats(1e4, 1e7),
        st.none() | st.floats(0.01, 100.0),
    ),
    min_size=1,
    max_size=8,
)


@given(jobs, st.floats(0.01, 2.0))
def test_periods_keep_the_budget_and_spend_it_when_it_binds(found, budget):
    periods = shared_periods(found, budget)
    load = sum(job.save_seconds / p for job, p in zip(found, periods.seconds, strict=True))
    assert load <= budget * (1 + 1e-9)
    assert periods.load == pytest.approx(load)
    if periods.multiplier:
        assert load == pytest.approx(budget, rel=1e-6)
    else:
        assert periods.seconds == pytest.approx([job.best_period_seconds() for job in found])


@given(jobs, st.floats(0.05, 0.9), st.lists(st.floats(0.3, 3.0), min_size=8, max_size=8))
def test_no_other_periods_within_the_budget_waste_less(found, budget, factors):
    periods = shared_periods(found, budget)
    other = [p * f for p, f in zip(periods.seconds, factors, strict=False)]
    load = sum(job.save_seconds / p for job, p in zip(found, other, strict=True))
    # Stretched until it keeps the budget, as any period in question must.
    other = [p * max(load / budget, 1.0) for p in other]
    assert waste_of(found, other) >= periods.waste * (1 - 1e-9)


def test_worked_case():
    # Young/Daly: sqrt(2 * 20,000 * 25) = 1,000 s, a load of 2.5 %; half of that: lambda = 3 n.
    alone = SavingJob(8, 25.0, 20_000.0)
    assert shared_periods([alone]).seconds == (1000.0,)
    assert shared_periods([alone]).waste == pytest.approx(0.05)
    halved = shared_periods([alone], 0.0125)
    assert halved.seconds[0] == pytest.approx(2000.0)
    assert halved.multiplier == pytest.approx(24.0)


def test_worked_case_of_saves_in_the_background():
    # A save costs the job 1 s and the file system 25: alone sqrt(2 * 20,000 * 1) = 200 s, a load of
    # 12.5 %; half of that: 1 + 25 lambda / 8 = 4.
    alone = SavingJob(8, 25.0, 20_000.0, overhead_seconds=1.0)
    assert shared_periods([alone]).seconds == pytest.approx((200.0,))
    halved = shared_periods([alone], 0.0625)
    assert halved.seconds[0] == pytest.approx(400.0)
    assert halved.multiplier == pytest.approx(0.96)


def test_small_jobs_make_way_for_large_ones():
    small, large = SavingJob(1, 60.0, 1e6), SavingJob(100, 60.0, 1e6)
    found = shared_periods([small, large], 0.005)
    assert found.seconds[0] > 2.0 * found.seconds[1]


@pytest.mark.parametrize("values", [(0, 1, 1), (1, -1, 1), (1, 1, math.inf), (1, math.nan, 1)])
def test_figures_without_a_meaning_are_refused(values):
    with pytest.raises(ClusterError, match="finite number above 0"):
        SavingJob(*values)


def test_budgets_without_a_meaning_are_refused():
    with pytest.raises(ClusterError, match="budget = 0"):
        shared_periods([SavingJob(1, 1.0, 1.0)], 0.0)
    with pytest.raises(ClusterError, match="no jobs"):
        shared_periods([])


def test_orders():
    with pytest.raises(ClusterError, match='order = "lifo" is not known: give one of fcfs'):
        set_of("lifo", 10.0)
    early, late = 1.0, 2.0
    big = {"asked_seconds": early, "size_bytes": 80.0, "cost_per_second": waiting_cost(4.0)}
    small = {"asked_seconds": late, "size_bytes": 10.0, "cost_per_second": waiting_cost(2.0)}
    assert priority("fcfs", **big) < priority("fcfs", **small)
    assert priority("least-waste", **small) < priority("least-waste", **big)
    assert [set_of("set-10", each) for each in (10.0, 250.0, 4000.0)] == [1, 2, 4]
    assert set_of("fcfs", math.inf) == 0
    with pytest.raises(ClusterError, match="period_seconds"):
        set_of("set-10", math.inf)


@given(st.lists(st.tuples(st.floats(1.0, 50.0), st.floats(1.0, 100.0)), min_size=2, max_size=5))
@settings(max_examples=50)
def test_no_order_of_waiting_saves_wastes_less(requests):
    """All permutations of requests that wait together, against the order by priority."""

    def wasted(order):
        now = cost = 0.0
        for seconds, nodes in order:
            now += seconds
            cost += nodes * now
        return cost

    chosen = sorted(
        requests,
        key=lambda each: priority(
            "least-waste", asked_seconds=0.0, size_bytes=each[0], cost_per_second=each[1]
        ),
    )
    best = min(map(wasted, itertools.permutations(requests)))
    assert wasted(chosen) == pytest.approx(best)


def test_two_saves_as_worked_by_hand():
    # One job of 1 node saves 10 s in every 100 s of computing, alone: 10 of 110 s blocked.
    one = simulate_saves(
        [SavingJob(1, 10.0, 1e9)], [100.0], "fcfs", horizon_seconds=110_000, jitter=0.0
    )
    assert one.blocked == pytest.approx(10 / 110, rel=2e-3)
    assert one.load == pytest.approx(10 / 110, rel=2e-3)
    assert one.redone == pytest.approx(1000 * 100 * 60 / 1e9 / 110_000, rel=5e-3)


@pytest.mark.parametrize("policy", ["uncoordinated", "fcfs", "least-waste", "set-10"])
@pytest.mark.parametrize("waiting", ["still", "computing"])
def test_no_policy_serves_faster_than_the_file_system(policy, waiting):
    found = [SavingJob(2.0 * n, 5.0 * n, 1e6) for n in range(1, 6)]
    periods = [60.0] * 5
    run = simulate_saves(found, periods, policy, horizon_seconds=50_000, waiting=waiting)
    assert run.load <= 1.0 + 1e-9
    # Nobody stands still for less than its own save.
    alone = sum(job.nodes * job.save_seconds for job in found)
    assert run.blocked * 50_000 * 30.0 >= 0.9 * alone * run.saves / 5 - 1e-9
    again = simulate_saves(found, periods, policy, horizon_seconds=50_000, waiting=waiting)
    assert again == run


def test_taking_turns_wastes_less_than_sharing_when_all_save_together():
    found = [SavingJob(10, 10.0, 1e9)] * 6
    kept = {"horizon_seconds": 100_000.0, "jitter": 0.0}
    shared = simulate_saves(found, [20.0] * 6, "uncoordinated", **kept)
    turns = simulate_saves(found, [20.0] * 6, "least-waste", waiting="computing", **kept)
    assert turns.blocked < 0.7 * shared.blocked


def test_a_share_of_the_bandwidth_limits_a_job():
    wide = simulate_saves(
        [SavingJob(1, 10.0, 1e9)], [90.0], "fcfs", horizon_seconds=1e5, jitter=0.0
    )
    narrow = simulate_saves(
        [SavingJob(1, 10.0, 1e9)], [90.0], "fcfs", horizon_seconds=1e5, jitter=0.0, most_share=[0.5]
    )
    assert wide.blocked == pytest.approx(0.1, rel=1e-2)
    assert narrow.blocked == pytest.approx(20 / 110, rel=1e-2)


def test_one_period_per_job_is_needed():
    with pytest.raises(ClusterError, match="2 periods for 1 jobs"):
        simulate_saves([SavingJob(1, 1.0, 1.0)], [1.0, 2.0], "fcfs", horizon_seconds=10.0)
