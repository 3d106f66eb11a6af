"""Rates that copiers keep, and rates that make way for others."""

from __future__ import annotations

import math
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.cluster import copying as pace
from outlast.cluster.copying import Backoff, GentlePace, TokenBucket
from outlast.errors import ClusterError


@pytest.mark.alone
def test_a_bucket_keeps_its_rate(monkeypatch):
    monkeypatch.setattr(pace, "_BURST_SECONDS", 0.0)
    bucket = TokenBucket(1e6)
    begun = time.monotonic()
    for _ in range(10):
        bucket.take(30_000)
    assert 0.29 <= time.monotonic() - begun < 0.6
    assert bucket.passed_bytes == 300_000


@pytest.mark.alone
def test_threads_share_one_rate(monkeypatch):
    monkeypatch.setattr(pace, "_BURST_SECONDS", 0.0)
    bucket = TokenBucket(1e6)
    threads = [threading.Thread(target=bucket.take, args=(100_000,)) for _ in range(3)]
    begun = time.monotonic()
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert 0.29 <= time.monotonic() - begun < 0.7


@pytest.mark.alone
def test_a_new_rate_wakes_who_waits():
    bucket = TokenBucket(0.0)
    threading.Timer(0.1, bucket.set_rate, (math.inf,)).start()
    begun = time.monotonic()
    bucket.take(1 << 40, 10.0)
    assert 0.08 <= time.monotonic() - begun < 1.0


def test_without_a_limit_nothing_waits():
    bucket = TokenBucket()
    bucket.take(1 << 40, 0.0)
    assert bucket.passed_bytes == 1 << 40


@pytest.mark.alone
def test_a_wait_ends_at_its_deadline():
    bucket = TokenBucket(1.0)
    begun = time.monotonic()
    with pytest.raises(ClusterError, match=r"waited 0\.2 s"):
        bucket.take(1000, 0.2)
    assert time.monotonic() - begun < 1.0


def test_who_waits_is_told_when_all_stops():
    bucket = TokenBucket(1.0)
    threading.Timer(0.1, bucket.stop).start()
    with pytest.raises(ClusterError, match="stopped"):
        bucket.take(1000, 30.0)
    with pytest.raises(ClusterError, match="stopped"):
        bucket.take(1)


def test_blocks_are_as_small_as_an_even_flow_needs():
    assert TokenBucket(10e6).block_bytes == 1_000_000
    assert TokenBucket(1.0).block_bytes == 64 << 10
    assert TokenBucket().block_bytes == 4 << 20
    with pytest.raises(ClusterError, match="bytes_per_s = -1"):
        TokenBucket(-1.0)


@given(st.lists(st.tuples(st.floats(0, 1e10), st.floats(0, 100)), max_size=50), st.floats(1e6, 1e9))
def test_a_rate_stays_between_its_ends(observed, most):
    found = Backoff(most, least_bytes_per_s=1e6)
    for size, seconds in observed:
        assert 1e6 <= found.observe(size, seconds) <= most


def test_two_copies_settle_at_equal_shares():
    """A resource of 100 MB/s shared in proportion to what is asked for when it is too much."""
    one = Backoff(100e6, start_bytes_per_s=90e6)
    two = Backoff(100e6, start_bytes_per_s=5e6)
    sums = [0.0, 0.0]
    for step in range(4000):
        asked = one.bytes_per_s + two.bytes_per_s
        share = min(1.0, 100e6 / asked)
        got = one.bytes_per_s * share, two.bytes_per_s * share
        if step >= 1000:
            sums = [total + each for total, each in zip(sums, got, strict=True)]
        one.observe(got[0], 1.0)
        two.observe(got[1], 1.0)
    assert sums[0] == pytest.approx(sums[1], rel=0.1)
    assert 0.6 * 100e6 < sum(sums) / 3000 <= 100e6


def test_a_copy_backs_off_and_comes_back():
    found = Backoff(100e6, start_bytes_per_s=100e6)
    assert found.observe(20e6, 1.0) == pytest.approx(10e6)
    for _ in range(30):
        found.observe(found.bytes_per_s, 1.0)
    assert found.bytes_per_s == pytest.approx(100e6)


def test_rates_without_a_meaning_are_refused():
    with pytest.raises(ClusterError, match="the least not above the most"):
        Backoff(1e9, least_bytes_per_s=2e9)


def test_a_gentle_copy_slows_down_while_others_write_and_recovers():
    gentle = GentlePace(Backoff(20e6, least_bytes_per_s=1e6, start_bytes_per_s=20e6), 0.05)
    for _ in range(10):
        gentle.take(100_000)
        # The file system gives 5 MB/s.
        time.sleep(0.02)
    slow = gentle.bytes_per_s
    assert slow < 8e6
    end = time.monotonic() + 3.0
    while gentle.bytes_per_s < 1.5 * slow and time.monotonic() < end:
        gentle.take(20_000)
    assert gentle.bytes_per_s >= 1.5 * slow


def test_a_pause_between_copies_is_no_congestion():
    gentle = GentlePace(Backoff(20e6, start_bytes_per_s=10e6), 0.05)
    for _ in range(4):
        gentle.take(10_000)
        time.sleep(0.1)
    assert gentle.bytes_per_s == 10e6


@pytest.mark.parametrize("most", [1e3, 1e6, 1e9])
def test_a_pace_below_a_limit_never_stops(most):
    gentle = GentlePace.below(most)
    assert 0 < gentle.bytes_per_s <= most
