"""Probe runs: near the best set, within the budget, the same each time."""

import itertools

import numpy as np
import pytest

from outlast.errors import PlanError
from outlast.plan.probes import Budget, choose_probes, information


def problem(seed, count=11, constants=5):
    random = np.random.default_rng(seed)
    jacobian = random.exponential(size=(count, constants)) * (
        random.random((count, constants)) < 0.6
    )
    jacobian /= np.maximum(jacobian.sum(axis=1, keepdims=True), 1e-9)
    return jacobian, random.uniform(2.0, 100.0, constants), random.uniform(5.0, 60.0, count)


def best_gain(jacobian, precision, costs, budget):
    sets = (
        list(rows)
        for size in range(1, budget.most + 1)
        for rows in itertools.combinations(range(len(costs)), size)
    )
    return max(
        information(jacobian[rows], precision)
        for rows in sets
        if costs[rows].sum() <= budget.seconds
    )


def test_plan_probes_against_the_best_of_all_sets():
    shares = []
    for seed in range(10):
        jacobian, precision, costs = problem(seed)
        budget = Budget(seconds=0.4 * costs.sum(), most=5)
        found = choose_probes(jacobian, precision, costs, budget)
        assert found.gain == pytest.approx(information(jacobian[found.rows], precision))
        shares.append(found.gain / best_gain(jacobian, precision, costs, budget))
    assert min(shares) >= 0.63
    assert np.median(shares) >= 0.95
    assert max(shares) <= 1 + 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_plan_probes_keep_the_budget_and_repeat_nothing(seed):
    jacobian, precision, costs = problem(seed, 400, 12)
    found = choose_probes(jacobian, precision, costs, Budget(seconds=120.0))
    assert found.seconds == pytest.approx(costs[found.rows].sum())
    assert found.seconds <= 120.0
    assert len(set(found.rows.tolist())) == len(found.rows) <= 12
    again = choose_probes(jacobian, precision, costs, Budget(seconds=120.0))
    assert again.rows.tolist() == found.rows.tolist()


def test_plan_probes_beat_a_random_choice():
    jacobian, precision, costs = problem(3, 300, 12)
    found = choose_probes(jacobian, precision, costs, Budget(seconds=300.0, most=8))
    random = np.random.default_rng(0)
    gains = [
        information(jacobian[random.choice(300, 8, replace=False)], precision) for _ in range(50)
    ]
    assert found.gain > max(gains)


def test_plan_probes_more_money_teaches_more():
    jacobian, precision, costs = problem(4, 200, 10)
    gains = [
        choose_probes(jacobian, precision, costs, Budget(seconds=seconds)).gain
        for seconds in (60.0, 120.0, 240.0, 480.0)
    ]
    assert gains == sorted(gains)


def test_plan_probes_gains_fall():
    jacobian, precision, costs = problem(5, 200, 10)
    found = choose_probes(jacobian, precision, np.ones_like(costs), Budget(seconds=12.0))
    assert len(found.rows) == 12
    assert np.all(np.diff(found.gains) <= 1e-9)
    assert found.shortage == ""


def test_plan_probes_prefer_what_is_unknown():
    # Constant 1 is known to 1 %, constant 0 to a factor of e.
    jacobian = np.array([[0.9, 0.1], [0.1, 0.9]])
    found = choose_probes(
        jacobian, np.array([1.0, 1e4]), np.ones(2), Budget(seconds=1.0, fewest=1, most=1)
    )
    assert found.rows.tolist() == [0]


def test_plan_probes_prefer_quiet_runs():
    jacobian = np.ones((2, 1))
    found = choose_probes(
        jacobian,
        np.ones(1),
        np.ones(2),
        Budget(seconds=1.0, fewest=1, most=1),
        noise=np.array([0.3, 0.03]),
    )
    assert found.rows.tolist() == [1]


def test_plan_probes_say_when_there_are_too_few():
    jacobian, precision, costs = problem(6)
    small = choose_probes(jacobian, precision, costs, Budget(seconds=float(costs.min())))
    assert len(small.rows) == 1
    assert "raise the budget" in small.shortage
    few = choose_probes(jacobian[:3], precision, costs[:3], Budget(seconds=1e6))
    assert "only 3 candidates" in few.shortage


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"budget": Budget(seconds=1.0)}, "budget = 1 s"),
        ({"jacobian": np.zeros((0, 5))}, "jacobian has shape"),
        ({"jacobian": np.full((11, 5), np.nan)}, "jacobian is not finite"),
        ({"costs_seconds": np.zeros(11)}, "costs_seconds has values"),
        ({"prior_precision": np.ones(4)}, "needs prior_precision"),
    ],
)
def test_plan_probes_refuse(change, words):
    jacobian, precision, costs = problem(0)
    arguments = {
        "jacobian": jacobian,
        "prior_precision": precision,
        "costs_seconds": costs,
        "budget": Budget(seconds=100.0),
    }
    with pytest.raises(PlanError, match=words):
        choose_probes(**{**arguments, **change})
