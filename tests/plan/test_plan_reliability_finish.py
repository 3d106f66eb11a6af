"""When a run is done: the distribution of its wall time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.errors import PlanError
from outlast.plan.cluster import FailureCause
from outlast.plan.goodput import Goodput, finish, goodput
from outlast.plan.reliability import Number, Reliability, Restart, Tier
from outlast.plan.simulate import Scenario, simulate

DAY = 86_400.0


def plan(nodes: Number, interval: float = 1800.0, repair_hours: float = 0.0) -> Reliability:
    return Reliability(
        nodes=nodes,
        causes=(FailureCause(name="node", per_node_day=0.005, repair_hours=repair_hours),),
        interval_seconds=interval,
        tiers=(Tier(name="shared", blocked_seconds=5.0, restore_seconds=60.0),),
        restart=Restart(restart_seconds=300.0, spares=4),
    )


def run(nodes: Number, **settings: float) -> Goodput:
    return goodput(plan(nodes, **settings))


@given(
    st.integers(1, 16_384), st.floats(60.0, 21_600.0), st.floats(0.0, 48.0), st.floats(60.0, 1e8)
)
@settings(max_examples=50, deadline=None)
def test_quantiles_and_probabilities_are_in_order(
    nodes: int, interval: float, hours: float, seconds: float
) -> None:
    found = finish(run(nodes, interval=interval, repair_hours=hours), seconds)
    low, middle, high = (float(found.quantile_seconds(share)[0]) for share in (0.1, 0.5, 0.9))
    assert seconds * (1.0 - 1e-9) <= low <= middle <= high < math.inf
    assert found.expected_seconds[0] >= found.undisturbed_seconds[0] * (1.0 - 1e-9)
    assert 0.0 <= found.lost_work_seconds[0] < found.expected_seconds[0]
    chances = [float(found.likely(high * factor, 0.01)[0]) for factor in (0.1, 0.5, 1.0, 2.0)]
    assert chances == sorted(chances)
    assert 0.0 <= chances[0] <= chances[-1] <= 1.0


def test_a_run_that_nothing_befalls_is_done_on_time() -> None:
    quiet = Reliability(
        nodes=8, causes=(), interval_seconds=100.0, tiers=(Tier(name="x", blocked_seconds=1.0),)
    )
    found = finish(goodput(quiet), 1000.0)
    assert found.expected_seconds[0] == pytest.approx(1010.0)
    assert found.quantile_seconds(0.9)[0] == pytest.approx(1010.0)
    assert found.likely(1011.0, 1e-6)[0] == 1.0
    assert found.likely(1009.0, 1e-6)[0] == 0.0


def test_a_lucky_run_has_the_probability_of_no_failure() -> None:
    found = finish(run(1), 100.0 * DAY)
    assert found.undisturbed_probability[0] == pytest.approx(math.exp(-0.5), abs=0.01)
    lucky = float(found.undisturbed_seconds[0])
    assert found.quantile_seconds(0.5)[0] == pytest.approx(lucky)
    assert found.quantile_seconds(0.9)[0] > lucky + 300.0


@pytest.mark.parametrize(("nodes", "days"), [(200, 1.0), (200, 5.0), (2000, 4.0)])
def test_quantiles_are_those_of_the_simulation(nodes: int, days: float) -> None:
    scenario = Scenario(reliability=plan(nodes), productive_days=days, trials=2000, seed=3)
    simulated = simulate(scenario)
    found = finish(run(nodes), days * DAY)
    assert found.expected_seconds[0] == pytest.approx(simulated.finish_seconds.mean(), rel=0.005)
    for share in (0.1, 0.5, 0.9):
        limit = float(found.quantile_seconds(share)[0]) * (1.0 + 1e-9)
        # With one failure on average the chance of none is a jump of the distribution.
        below = float((simulated.finish_seconds <= limit).mean())
        assert below == pytest.approx(max(share, float(found.undisturbed_probability[0])), abs=0.06)


def test_many_candidates_have_many_distributions() -> None:
    found = finish(run(np.array([1.0, 100.0, 10_000.0])), np.array([DAY, DAY, 10.0 * DAY]))
    assert found.expected_seconds.shape == (3,)
    assert (np.diff(found.quantile_seconds(0.9)) > 0.0).all()
    assert found.likely(2.0 * DAY, 0.1).shape == (3,)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_a_job_without_length_is_refused(seconds: float) -> None:
    with pytest.raises(PlanError, match="productive_seconds"):
        finish(run(8), seconds)


@pytest.mark.parametrize("nodes", [8, 1_000, 16_000])
@pytest.mark.parametrize("deviation", [0.02, 0.3])
def test_an_error_of_the_time_itself_spreads_the_probability(nodes: int, deviation: float) -> None:
    found = finish(run(nodes, repair_hours=2.0), 20 * DAY)
    draws = np.random.default_rng(1)
    shares = draws.uniform(1e-6, 1.0 - 1e-6, 4_000)
    times = np.array([found.quantile_seconds(float(share))[0] for share in shares])
    times = times * np.exp(deviation * draws.standard_normal(len(times)))
    for share in (0.1, 0.5, 0.9):
        deadline = float(np.quantile(times, share))
        assert found.likely(deadline, deviation)[0] == pytest.approx(share, abs=0.06)
    sure = found.likely(float(found.expected_seconds[0]) * 1.5, 1e-4)
    assert sure[0] == pytest.approx(1.0, abs=1e-3)
    with pytest.raises(PlanError, match="deadline_seconds"):
        found.likely(0.0, deviation)
