"""The choice of nodes, wall time and policy on queues worked out by hand."""

import math

import numpy as np
import pytest
from cluster_policy_queues import HOUR, job, queue, situation
from hypothesis import given
from hypothesis import strategies as st

from outlast.cluster.policies.automatic import Automatic, Planned, candidates, choose, thriftiest
from outlast.cluster.policies.decision import Limits
from outlast.cluster.policies.forecast import Behaviour, Outlook
from outlast.errors import ClusterError

LITERAL = Outlook(behaviour=Behaviour(edges=np.zeros(0), used=(np.ones(10),)), samples=16)
IDLE = queue(16)


def test_an_idle_machine_gets_the_largest_job():
    found = Planned(outlook=LITERAL).decide(situation(IDLE, job(sizes=(1, 2, 4, 8, 16))))
    assert found.submit[0].nodes == 16


def test_a_rigid_job_on_an_idle_machine_is_one_long_job_and_that_is_said():
    choice = choose(situation(IDLE, job(sizes=(4,))), LITERAL)
    assert choice.reason.startswith("just submit one long job, 4 nodes")


def test_fewer_nodes_now_beat_more_nodes_later():
    # Ten nodes, six busy for 30 h: four are free for any time, eight only then.
    busy = queue(10, running=[(6, 30.0)])
    work = job(sizes=(2, 4, 8))
    choice = choose(situation(busy, work), LITERAL)
    assert choice.best.nodes == 4
    finish = work.run_seconds(4)
    assert choice.best.mean_finish_seconds == pytest.approx(finish)
    eight = next(each for each in choice.ranking if each.nodes == 8)
    assert eight.mean_finish_seconds == pytest.approx(30 * HOUR + work.run_seconds(8))


def test_more_nodes_soon_beat_fewer_nodes_now_and_fillers_train_until_then():
    busy = queue(10, running=[(6, 5.0)])
    choice = choose(situation(busy, job(sizes=(2, 4, 8))), LITERAL)
    assert choice.best.nodes == 8
    assert "fillers train" in choice.reason
    assert "one long job on 4 nodes in" in choice.reason


def test_a_hole_is_tried_with_its_length():
    busy = queue(10, running=[(6, 4.0)], pending=[(10, 10.0)])
    ranking = candidates(situation(busy, job(sizes=(4,))), LITERAL)
    walls = {each.wall_seconds for each in ranking}
    assert walls == {4 * HOUR, job().wall_to_finish(4)}
    # In the window 14,040 of 72,000 s get done; as many such cycles as that takes.
    window = next(each for each in ranking if each.wall_seconds == 4 * HOUR)
    assert window.mean_finish_seconds == pytest.approx(4 * HOUR * 72_000 / 14_040)


def test_fewer_node_hours_win_among_equals():
    ranking = candidates(situation(IDLE, job(sizes=(4, 8, 16))), LITERAL)
    assert thriftiest(ranking, 0.0).nodes == 16
    assert thriftiest(ranking, 10.0).nodes == 4


def test_a_budget_of_node_hours_and_a_short_limit_are_refused_with_figures():
    poor = Limits(max_node_seconds=10 * HOUR)
    with pytest.raises(ClusterError, match="10 are left"):
        candidates(situation(IDLE, job(), limits=poor), LITERAL)
    tight = Limits(max_wall_seconds=300.0)
    with pytest.raises(ClusterError, match="360 s"):
        candidates(situation(IDLE, job(), limits=tight), LITERAL)


running = st.lists(st.tuples(st.integers(1, 4), st.floats(0.1, 48.0)), max_size=3)
pending = st.lists(st.tuples(st.integers(1, 12), st.floats(0.1, 48.0)), max_size=4)


@given(running, pending, st.floats(1.0, 72.0), st.integers(2, 12))
def test_no_submission_is_above_the_limits(runs, waits, wall_hours, most):
    limits = Limits(max_wall_seconds=wall_hours * HOUR, max_nodes=most, max_node_seconds=400 * HOUR)
    seen = situation(queue(12, runs, waits), job(sizes=(1, 2, 4, 8, 12), nodes=2), limits=limits)
    few = Outlook(samples=2)
    for policy in (Planned(outlook=few), Automatic(outlook=few)):
        for wanted in policy.decide(seen).submit:
            assert wanted.nodes <= most
            assert wanted.wall_seconds <= limits.max_wall_seconds
            assert math.isclose(wanted.wall_seconds % 60.0, 0.0)
