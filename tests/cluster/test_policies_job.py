"""What links of a malleable job cost and get done."""

import math

import pytest
from cluster_policy_queues import HOUR, job
from hypothesis import given
from hypothesis import strategies as st

from outlast.cluster.policies.decision import Limits, PowerSpeed, TableSpeed
from outlast.errors import ClusterError


def test_speeds_are_one_on_the_reference_nodes():
    assert PowerSpeed(8, 0.9)(8) == 1.0
    assert PowerSpeed(8, 0.9)(32) == pytest.approx(4**0.9)


def test_measured_speeds_are_interpolated_and_extrapolated_only_if_that_is_asked_for():
    speed = TableSpeed(((4, 1.0), (16, 4.0)))
    assert speed(8) == pytest.approx(2.0)
    assert speed(64) == 4.0
    assert speed(1) == 1.0
    assert speed(4) == 1.0
    hopeful = TableSpeed(((4, 1.0), (16, 4.0)), beyond=0.5)
    assert [hopeful(nodes) for nodes in (1, 8, 64)] == pytest.approx([0.5, 2.0, 8.0])
    with pytest.raises(ClusterError, match="ascending"):
        TableSpeed(((4, 1.0), (2, 0.5)))


def test_a_link_by_hand():
    work = job(hours=20.0)
    # 300 s restart, 60 s save: 4 h train 14,040 s; on half the nodes at 2^-0.9 of the speed.
    assert work.progress(4, 4 * HOUR) == 14_040.0
    assert work.progress(2, 4 * HOUR) == pytest.approx(14_040.0 * 0.5**0.9)
    assert work.progress(4, 300.0) == 0.0
    assert work.progress(4, 100 * HOUR) == 20 * HOUR
    assert work.run_seconds(4) == 20 * HOUR + 360.0
    # A tenth more than that, in whole minutes.
    assert work.wall_to_finish(4) == math.ceil(1.1 * (20 * HOUR + 360) / 60) * 60
    # It holds its nodes for what it needs, or for its limit.
    assert work.link_seconds(4, 30 * HOUR) == 20 * HOUR + 360.0
    assert work.link_seconds(4, 4 * HOUR) == 4 * HOUR


def test_another_number_of_nodes_costs_resharding():
    work = job(reshard_seconds=100.0)
    assert work.restart(2) == 300.0
    later = work.after(HOUR, 4)
    assert later.restart(4) == 300.0
    assert later.restart(2) == 400.0
    assert later.work_seconds == 19 * HOUR


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 4]))
def test_the_wall_time_to_finish_does_finish(seconds, nodes):
    work = job(hours=seconds / HOUR)
    assert work.run_seconds(nodes) <= work.wall_to_finish(nodes)
    assert work.progress(nodes, work.wall_to_finish(nodes)) == pytest.approx(work.work_seconds)


def test_limits_cut_sizes_and_wall_times():
    limits = Limits(max_wall_seconds=8 * HOUR + 59.0, max_nodes=2)
    assert limits.sizes(job()) == (2, 1)
    assert limits.longest == 8 * HOUR
    assert limits.wall_to_finish(job(), 4) == 8 * HOUR
    assert limits.wall_to_finish(job(hours=1.0), 4) == job(hours=1.0).wall_to_finish(4)
    with pytest.raises(ClusterError, match="at most 3"):
        Limits(max_nodes=3).sizes(job(nodes=8, sizes=(4, 8)))


def test_impossible_jobs_are_refused():
    with pytest.raises(ClusterError, match="reference of 4"):
        job(sizes=(1, 2))
    with pytest.raises(ClusterError, match="save_seconds = -1"):
        job(save_seconds=-1.0)
    with pytest.raises(ClusterError, match="at least 60 s"):
        Limits(max_wall_seconds=10.0)
