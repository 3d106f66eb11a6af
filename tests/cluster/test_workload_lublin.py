"""The generator gives what its model says."""

import numpy as np
import pytest

from outlast.cluster.workload import ROUND_LIMITS, LublinModel, lublin
from outlast.errors import ClusterError


def test_the_seed_decides() -> None:
    one, same, other = lublin(500, 64, seed=1), lublin(500, 64, seed=1), lublin(500, 64, seed=2)
    assert one.submit_seconds.tolist() == same.submit_seconds.tolist()
    assert one.run_seconds.tolist() == same.run_seconds.tolist()
    assert one.run_seconds.tolist() != other.run_seconds.tolist()


@pytest.mark.parametrize("nodes", [1, 3, 128, 10_000])
def test_sizes(nodes: int) -> None:
    jobs = lublin(20_000, nodes, seed=3)
    assert jobs.nodes.min() == 1
    assert jobs.nodes.max() <= nodes
    if nodes == 128:
        serial = np.mean(jobs.nodes == 1)
        powers = np.mean((jobs.nodes > 1) & (jobs.nodes & (jobs.nodes - 1) == 0))
        # 0.244 and 0.576, and some sizes that are a power of two by chance.
        assert serial == pytest.approx(0.244, abs=0.02)
        assert 0.56 <= powers <= 0.68
        # 86 % of parallel jobs lie below 2^4.5, but for rounding.
        assert np.mean(jobs.nodes[jobs.nodes > 1] <= 23) == pytest.approx(0.86, abs=0.05)


def test_larger_jobs_run_longer() -> None:
    jobs = lublin(20_000, 128, seed=4)
    small, large = jobs.run_seconds[jobs.nodes == 1], jobs.run_seconds[jobs.nodes >= 64]
    # Share of short jobs: 0.775 at one node, at most 0.43 at 64 and more.
    assert np.median(large) > 5 * np.median(small)
    assert jobs.run_seconds.max() <= np.exp(LublinModel().longest)


def test_mean_logarithm_of_serial_run_times() -> None:
    """0.7746 short of mean 4.2 * 0.94 and the rest of mean 312 * 0.03, below 12."""
    jobs = lublin(40_000, 128, seed=5)
    found = np.log(jobs.run_seconds[jobs.nodes == 1]).mean()
    assert found == pytest.approx(0.7746 * 4.2 * 0.94 + 0.2254 * 9.36, abs=0.15)


@pytest.mark.parametrize("load", [0.6, 0.95])
def test_load_is_reached_and_the_day_keeps_its_shape(load: float) -> None:
    jobs = lublin(20_000, 128, seed=6, load=load)
    assert jobs.load == pytest.approx(load, rel=0.01)
    hours = np.histogram(jobs.submit_seconds / 3600 % 24, 24, (0, 24))[0]
    assert 2 <= np.argmin(hours) <= 6
    assert 10 <= np.argmax(hours) <= 16
    assert hours.max() > 4 * hours.min()


def test_requests_over_estimate_and_are_round() -> None:
    jobs = lublin(20_000, 128, seed=7, at_limit=0.2)
    assert np.all(np.isin(jobs.limit_seconds, ROUND_LIMITS))
    assert np.mean(jobs.run_seconds >= jobs.limit_seconds) == pytest.approx(0.2, abs=0.01)
    used = np.minimum(jobs.run_seconds / jobs.limit_seconds, 1)
    assert 0.2 < used.mean() < 0.6


def test_no_job_is_longer_than_the_queue_allows() -> None:
    jobs = lublin(5000, 128, seed=8, longest_limit_seconds=4 * 3600)
    assert jobs.limit_seconds.max() == 4 * 3600


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"jobs": 0}, "jobs = 0"),
        ({"nodes": 0}, "nodes = 0"),
        ({"at_limit": 2}, "at_limit = 2"),
        ({"longest_limit_seconds": 0}, "longest_limit_seconds = 0"),
        ({"load": 0}, "load = 0"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, int], words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        lublin(**{"jobs": 10, "nodes": 4, **changes})  # type: ignore[arg-type]
