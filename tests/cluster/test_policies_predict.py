"""Predicted starts: by hand where nothing is uncertain, by law where it is."""

import math

import numpy as np
import pytest
from cluster_policy_queues import HOUR, queue
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.cluster.policies.forecast import (
    DAY,
    Behaviour,
    Correction,
    Outlook,
    StartForecast,
    World,
    corrected,
    corrected_waits,
    forecast_waits,
    learn_correction,
    queue_at,
)
from outlast.cluster.simulate import Simulation
from outlast.cluster.workload import Workload, lublin

BUSY = queue(10, running=[(6, 4.0)], pending=[(8, 10.0)])


def literal(**settings):
    """Users who use all that they ask for."""
    behaviour = Behaviour(edges=np.zeros(0), used=(np.ones(10),))
    return Outlook(behaviour=behaviour, **settings)


def test_where_all_use_their_limits_the_start_is_the_schedulers():
    found = forecast_waits(BUSY, [(4, 3 * HOUR), (4, 5 * HOUR), (2, 24 * HOUR)], literal())
    assert [each.p90_seconds for each in found] == pytest.approx([0.0, 14 * HOUR, 0.0])
    assert [each.certain for each in found] == [True, False, True]
    assert found[1].p10_seconds == found[1].p50_seconds == found[1].p90_seconds


@pytest.mark.parametrize("backfill", ["easy", "conservative"])
def test_with_the_true_run_times_and_arrivals_the_prediction_is_exact(backfill):
    log = lublin(300, 32, load=0.95, seed=7)
    simulation = Simulation(32, workload=log, backfill=backfill)
    simulation.run(until=float(log.submit_seconds[150]) + 1.0)
    seen = simulation.snapshot()
    runs = np.minimum(log.run_seconds, log.limit_seconds)
    later = log.chosen(slice(151, None))

    class Clairvoyant:
        def world(self, *_):
            return World(
                running_end_seconds=seen.running_start_seconds + runs[seen.running_jobs],
                pending_run_seconds=runs[seen.pending_jobs],
                arrivals=list(
                    zip(
                        later.submit_seconds.tolist(),
                        later.nodes.tolist(),
                        later.limit_seconds.tolist(),
                        later.run_seconds.tolist(),
                        strict=True,
                    )
                ),
            )

    [found] = forecast_waits(
        seen,
        [(16, 20 * HOUR)],
        Outlook(behaviour=Clairvoyant(), samples=1, backfill=backfill),
    )
    job = simulation.submit(16, 20 * HOUR, HOUR)
    assert found.p50_seconds > 0.0
    assert seen.now_seconds + found.p50_seconds == pytest.approx(simulation.run_until_start(job))


def test_jobs_that_end_early_make_the_start_sooner():
    half = Behaviour(edges=np.zeros(0), used=(np.full(10, 0.5),))
    # The running job asked for 5 h, an hour ago: it ends in 1.5 h, and the head runs 5 h.
    [found] = forecast_waits(BUSY, [(4, 5 * HOUR)], Outlook(behaviour=half))
    assert found.p50_seconds == pytest.approx(6.5 * HOUR)


@given(st.floats(1.7e9, 1.9e9), st.floats(0.1, 99.0))
def test_a_job_on_the_nodes_of_the_one_before_it_starts_as_that_ends(now, hours):
    seen = queue(10, running=[(6, 200.0), (4, hours)], now=now)
    [found] = forecast_waits(seen, [(4, 5 * HOUR)], Outlook(samples=2, after=1))
    assert found.certain
    [found] = forecast_waits(seen, [(5, 5 * HOUR)], literal(samples=2, after=1))
    assert found.p50_seconds == pytest.approx((200.0 - hours) * HOUR, abs=0.01)


def test_more_nodes_than_there_are_never_start():
    [found] = forecast_waits(BUSY, [(11, HOUR)], literal())
    assert found.p10_seconds == math.inf


def test_the_same_seed_predicts_the_same_and_quantiles_are_in_order():
    shapes = [(4, 5 * HOUR), (8, HOUR)]
    first = forecast_waits(BUSY, shapes, Outlook(seed=3))
    again = forecast_waits(BUSY, shapes, Outlook(seed=3))
    for one, two in zip(first, again, strict=True):
        assert np.array_equal(one.wait_seconds, two.wait_seconds)
        assert one.p10_seconds <= one.p50_seconds <= one.p90_seconds


@given(st.floats(0.0, 1.0), st.integers(0, 100))
def test_a_running_job_uses_at_least_what_it_has_used(begun, seed):
    behaviour = Behaviour.assumed()
    limits = np.full(50, HOUR)
    found = behaviour.shares(limits, begun * limits, np.random.default_rng(seed))
    assert np.all(found >= min(begun, 1.0) - 1e-12)
    assert np.all(found <= 1.0)


def test_shares_are_learnt_for_short_and_long_limits_apart():
    count = 200
    log = Workload(
        np.arange(count) * 60.0,
        np.ones(count, np.int64),
        np.where(np.arange(count) % 2, HOUR, DAY),
        np.where(np.arange(count) % 2, 0.9 * HOUR, 0.1 * DAY),
        machine_nodes=4,
    )
    behaviour = Behaviour.learnt(log)
    source = np.random.default_rng(0)
    found = behaviour.shares(np.array([HOUR, DAY]), np.zeros(2), source)
    assert found == pytest.approx([0.9, 0.1])


def test_a_short_log_teaches_nothing_of_shares():
    log = Workload([0.0, 60.0], [1, 1], [HOUR, HOUR], [60.0, 60.0], machine_nodes=4)
    assert len(Behaviour.learnt(log).used[0]) == len(Behaviour.assumed().used[0])


def test_arrivals_come_at_the_logs_time_of_day():
    # Ten days with one job at noon each.
    noons = np.arange(10) * DAY + DAY / 2
    log = Workload(noons, [2] * 10, [HOUR] * 10, [600.0] * 10, machine_nodes=4)
    now = 10 * DAY
    world = Behaviour.learnt(log).world(queue(4, now=now), 3 * DAY, np.random.default_rng(1))
    times, nodes, *_ = zip(*world.arrivals, strict=True)
    assert times == pytest.approx(now + DAY / 2 + np.arange(3) * DAY)
    assert nodes == (2, 2, 2)
    alone = Behaviour.learnt(log, arrivals=False).world(
        queue(4, now=now), 3 * DAY, np.random.default_rng(1)
    )
    assert not alone.arrivals


def forecast(waits):
    low, middle, high = np.quantile(waits, (0.1, 0.5, 0.9))
    return StartForecast(
        nodes=1,
        wall_seconds=HOUR,
        wait_seconds=waits,
        p10_seconds=low,
        p50_seconds=middle,
        p90_seconds=high,
    )


@settings(deadline=None, max_examples=4)
@given(st.floats(0.2, 5.0), st.integers(0, 20))
def test_past_errors_mend_predictions_that_are_wrong_by_a_factor(factor, seed):
    source = np.random.default_rng(seed)

    def cases(count):
        scales = HOUR * np.exp(source.normal(1.0, 1.0, count))
        made = [forecast(scale * source.exponential(1.0, 64)) for scale in scales]
        return made, factor * scales * source.exponential(1.0, count)

    correction = Correction.learnt(*cases(250))
    later, waits = cases(250)
    mended = [corrected(each, correction) for each in later]
    covered = np.mean([wait <= each.p90_seconds for wait, each in zip(waits, mended, strict=True)])
    assert 0.82 <= covered <= 0.97
    half = np.mean([wait <= each.p50_seconds for wait, each in zip(waits, mended, strict=True)])
    assert 0.38 <= half <= 0.62


def test_certain_starts_teach_nothing_and_stay_certain():
    certain = forecast(np.zeros(8))
    assert Correction.learnt([certain], [0.0]).count == 0
    assert corrected(certain, Correction(p90=2.0)).p90_seconds == 0.0


@given(st.floats(-1.0, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_corrected_samples_have_the_corrected_median_and_keep_their_order(low, more, most):
    made = forecast(HOUR * np.random.default_rng(3).exponential(1.0, 101))
    correction = Correction(p10=low, p50=low + more, p90=low + more + most, count=9)
    found = corrected_waits(made, correction)
    assert np.all(np.diff(found[np.argsort(made.wait_seconds)]) >= 0.0)
    assert np.median(found) == pytest.approx(corrected(made, correction).p50_seconds)
    assert corrected_waits(made, Correction()) is made.wait_seconds


def test_the_past_queue_is_that_of_the_simulation():
    log = lublin(400, 32, load=0.9, seed=11)
    simulation = Simulation(32, workload=log)
    moment = float(log.submit_seconds[250])
    simulation.run(until=moment)
    seen = simulation.snapshot()
    whole = Simulation(32, workload=log)
    whole.run()
    found = queue_at(log, whole.starts(), moment, before=251)
    assert sorted(found.running_end_seconds) == pytest.approx(sorted(seen.running_end_seconds))
    assert found.pending_nodes.tolist() == seen.pending_nodes.tolist()
    assert found.free_nodes == seen.free_nodes


def test_a_correction_is_learnt_from_a_log():
    log = lublin(400, 32, load=0.95, seed=12)
    whole = Simulation(32, workload=log)
    whole.run()
    # Whoever believes that all limits are used expects too late a start.
    found = learn_correction(log, whole.starts(), literal(samples=1), count=30)
    assert found.count >= 5
    assert found.p50 < 0.0
