"""Queue wait, links of a chain and contention against figures worked by hand and laws."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.cluster.cost import LinkOverhead, QueueWait, chain, contended_seconds, save_waste
from outlast.errors import ClusterError

HOUR = 3600.0
OVERHEAD = LinkOverhead(restart_seconds=240.0, save_seconds=60.0, lead_seconds=30.0)
work = st.floats(1.0, 1e7)
waits = st.builds(QueueWait, st.floats(0.0, 1e5), st.floats(0.0, 3.0))


def test_one_long_job_pays_one_wait_and_one_overhead():
    found = chain(10 * HOUR, math.inf, OVERHEAD, QueueWait(600.0, 0.5))
    assert found.links == 1
    assert found.overhead_seconds == 330.0
    assert found.wait_seconds == pytest.approx(600.0 + 0.5 * (10 * HOUR + 330.0))
    assert found.seconds == pytest.approx(10 * HOUR + 330.0 + found.wait_seconds)


def test_a_chain_of_three_links_by_hand():
    # Links of 4 h train 14,070 s each: two full ones, then 7,860 s and the overhead.
    overhead = LinkOverhead(restart_seconds=240.0, save_seconds=60.0, lead_seconds=30.0)
    found = chain(10 * HOUR, 4 * HOUR, overhead, QueueWait(100.0, 0.0))
    assert found.links == 3
    assert found.overhead_seconds == 3 * 330.0
    assert found.wait_seconds == 3 * 100.0 + 2 * 3.0
    assert found.seconds - found.wait_seconds == pytest.approx(10 * HOUR + 990.0)


def test_eight_hour_links_waste_little_and_half_a_step():
    overhead = LinkOverhead(restart_seconds=120.0, save_seconds=30.0, step_seconds=4.0)
    assert overhead.seconds == 152.0
    assert overhead.waste(8 * HOUR) == pytest.approx(152.0 / 28_800.0)


def test_a_wall_time_that_leaves_no_time_to_train_is_refused_with_the_figure():
    with pytest.raises(ClusterError, match="330"):
        chain(HOUR, 330.0, OVERHEAD)
    with pytest.raises(ClusterError, match="330"):
        OVERHEAD.waste(100.0)


@given(work, st.floats(400.0, 1e6), st.floats(1.0, 10.0), waits)
def test_with_an_affine_wait_longer_links_never_cost_more(seconds, wall, by, wait):
    # The notes' b1: without windows the longest wall time is best, links of full length compared.
    links = max(math.ceil(seconds / (wall - OVERHEAD.seconds)), 1)
    full = links * (wall - OVERHEAD.seconds)
    longer = chain(full, wall * by, OVERHEAD, wait)
    assert longer.seconds <= chain(full, wall, OVERHEAD, wait).seconds * (1 + 1e-9)


@given(work, st.floats(400.0, 1e6), waits)
def test_time_is_work_and_overhead_and_waiting(seconds, wall, wait):
    found = chain(seconds, wall, OVERHEAD, wait)
    assert found.seconds == pytest.approx(seconds + found.overhead_seconds + found.wait_seconds)
    assert 0.0 < found.waste <= 1.0


def test_the_wait_is_fitted_and_never_negative():
    found = QueueWait.fit([HOUR, 2 * HOUR, 4 * HOUR], [1000.0, 1360.0, 2080.0])
    assert found.per_wall_second == pytest.approx(0.1)
    assert found.fixed_seconds == pytest.approx(640.0)
    falling = QueueWait.fit([1.0, 2.0], [10.0, 0.0])
    assert falling == QueueWait(5.0, 0.0)
    steep = QueueWait.fit([1.0, 2.0, 3.0], [0.0, 1.0, 4.0])
    assert steep.fixed_seconds == 0.0
    assert steep.per_wall_second == pytest.approx(14.0 / 14.0)
    with pytest.raises(ClusterError, match="at least one"):
        QueueWait.fit([], [])


def test_contention_slows_saves_by_what_others_leave():
    load = 0.5
    assert contended_seconds(30.0, load) == 60.0
    assert save_waste(30.0, 540.0, load_of_others=load) == pytest.approx(0.1)
    assert save_waste(0.0, 0.0) == 0.0
    with pytest.raises(ClusterError, match="no transfer ends"):
        contended_seconds(1.0, 1.0)
