"""Probe runs: near the best set, within the budget, the same each time."""

import itertools

import numpy as np
import pytest

from outlast.plan.probes import choose_probes

NOISE = 0.03


def problem(seed, count=11, constants=5):
    """Slopes in units of the noise and of what is known before, and what each run costs."""
    random = np.random.default_rng(seed)
    jacobian = random.exponential(size=(count, constants)) * (
        random.random((count, constants)) < 0.6
    )
    jacobian /= np.maximum(jacobian.sum(axis=1, keepdims=True), 1e-9)
    precision, costs = random.uniform(2.0, 100.0, constants), random.uniform(5.0, 60.0, count)
    return jacobian / NOISE / np.sqrt(precision), costs


def information(design):
    """Nats that runs add to what was known before."""
    return np.linalg.slogdet(np.eye(design.shape[1]) + design.T @ design)[1] / 2.0


def best_gain(design, costs, seconds, most):
    sets = (
        list(rows)
        for size in range(1, most + 1)
        for rows in itertools.combinations(range(len(costs)), size)
    )
    return max(information(design[rows]) for rows in sets if costs[rows].sum() <= seconds)


def test_plan_probes_against_the_best_of_all_sets():
    shares = []
    for seed in range(10):
        design, costs = problem(seed)
        seconds = 0.4 * costs.sum()
        rows, gains = choose_probes(design, costs, seconds, 5)
        assert sum(gains) == pytest.approx(information(design[rows]))
        shares.append(sum(gains) / best_gain(design, costs, seconds, 5))
    assert min(shares) >= 0.63
    assert np.median(shares) >= 0.95
    assert max(shares) <= 1 + 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_plan_probes_keep_the_budget_and_repeat_nothing(seed):
    design, costs = problem(seed, 400, 12)
    rows, _ = choose_probes(design, costs, 120.0, 12)
    assert costs[rows].sum() <= 120.0
    assert len(set(rows)) == len(rows) <= 12
    assert choose_probes(design, costs, 120.0, 12)[0] == rows


def test_plan_probes_beat_a_random_choice():
    design, costs = problem(3, 300, 12)
    _, gains = choose_probes(design, costs, 300.0, 8)
    random = np.random.default_rng(0)
    others = [information(design[random.choice(300, 8, replace=False)]) for _ in range(50)]
    assert sum(gains) > max(others)


def test_plan_probes_more_money_teaches_more():
    design, costs = problem(4, 200, 10)
    gains = [
        sum(choose_probes(design, costs, seconds, 12)[1]) for seconds in (60.0, 120.0, 240.0, 480.0)
    ]
    assert gains == sorted(gains)


def test_plan_probes_gains_fall():
    design, costs = problem(5, 200, 10)
    rows, gains = choose_probes(design, np.ones_like(costs), 12.0, 12)
    assert len(rows) == 12
    assert np.all(np.diff(gains) <= 1e-9)


def test_plan_probes_prefer_what_is_unknown():
    # Constant 1 is known to 1 %, constant 0 to a factor of e.
    design = np.array([[0.9, 0.1], [0.1, 0.9]]) / np.sqrt([1.0, 1e4]) / NOISE
    assert choose_probes(design, np.ones(2), 1.0, 1)[0] == [0]


def test_plan_probes_prefer_quiet_runs():
    design = np.ones((2, 1)) / np.array([[0.3], [0.03]])
    assert choose_probes(design, np.ones(2), 1.0, 1)[0] == [1]


def test_plan_probes_are_as_many_as_the_time_pays_for():
    design, costs = problem(6)
    assert len(choose_probes(design, costs, float(costs.min()), 12)[0]) == 1
    assert len(choose_probes(design[:3], costs[:3], 1e6, 12)[0]) == 3
