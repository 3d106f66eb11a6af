"""The interval that a run chooses from its own measurements."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint.cost import (
    NODE_MTBF_SECONDS,
    Failures,
    IntervalEstimator,
    SaveCost,
    optimal_interval_seconds,
)
from outlast.errors import CheckpointError


def fed(
    step: float = 1.0,
    blocked: float = 0.5,
    seconds: float = 0.5,
    slowed: float | None = None,
    **settings: Any,
) -> IntervalEstimator:
    """An estimator that has seen ten plain steps, ten while saving, and three saves."""
    estimator = IntervalEstimator(**settings)
    for _ in range(10):
        estimator.observe_step(step, saving=False)
        estimator.observe_step(step if slowed is None else slowed, saving=True)
    for _ in range(3):
        estimator.observe_save(blocked, seconds)
    return estimator


def test_before_a_save_is_measured_it_asks_for_an_early_one() -> None:
    estimator = IntervalEstimator(first_save_steps=20, longest_seconds=600.0)
    assert estimator.next_interval_steps() == 20
    assert "none has been measured" in estimator.explain()
    estimator.observe_step(100.0, saving=False)
    assert estimator.next_interval_steps() == 6
    estimator.observe_step(1e6, saving=False)
    assert estimator.next_interval_steps() == 1


def test_it_finds_the_optimum_from_what_it_measured() -> None:
    estimator = fed(0.25, 0.5, 4.5, slowed=0.275, mtbf_seconds=5000.0, budget=1.0)
    cost = SaveCost(0.5, 4.0, 0.1)
    best = optimal_interval_seconds(cost, Failures.every(estimator.mtbf_seconds))
    work = best - cost.overhead_seconds
    assert estimator.next_interval_steps() == pytest.approx(work / 0.25, abs=0.51)
    assert "least expected waste" in estimator.explain()


def test_the_slowdown_of_a_whole_step_counts_where_the_write_is_shorter() -> None:
    """Steps of 10 s grow to 11 s although the write takes 0.1 s: the save costs 1 s, not 0.01."""
    estimator = fed(10.0, 0.0, 0.1, slowed=11.0, mtbf_seconds=1e7, longest_seconds=1e9, budget=0.05)
    best = optimal_interval_seconds(SaveCost(1.0), Failures.every(estimator.mtbf_seconds))
    assert estimator.next_interval_steps() == pytest.approx(best / 10.0, abs=1.0)


def test_outliers_do_not_move_it() -> None:
    calm, upset = fed(mtbf_seconds=5e4), fed(mtbf_seconds=5e4)
    upset.observe_step(90.0, saving=False)
    upset.observe_save(60.0, 300.0)
    assert upset.next_interval_steps() == pytest.approx(calm.next_interval_steps(), rel=0.01)


def test_a_changed_machine_is_noticed() -> None:
    estimator = fed(blocked=0.5, mtbf_seconds=5e4)
    for _ in range(50):
        estimator.observe_save(0.5, 0.5)
    before = estimator.next_interval_steps()
    for _ in range(20):
        estimator.observe_save(8.0, 8.0)
    assert estimator.next_interval_steps() > 3 * before


@pytest.mark.parametrize(
    ("settings", "steps", "reason"),
    [
        ({"longest_seconds": 301.2}, 300, "the longest interval allowed"),
        ({"mtbf_seconds": 30.0, "prior_failures": 100.0}, 15, "within the budget"),
        ({"seconds": 40.5, "mtbf_seconds": 30.0, "budget": 1.0}, 40, "becomes durable"),
    ],
)
def test_the_bounds_hold_and_are_named(settings: dict[str, Any], steps: int, reason: str) -> None:
    estimator = fed(**settings)
    assert estimator.next_interval_steps() == steps
    assert reason in estimator.explain()


@given(
    step=st.floats(0.001, 100.0),
    blocked=st.floats(0.0, 100.0),
    write=st.floats(0.0, 1000.0),
    slowdown=st.floats(0.0, 1.0),
    mtbf=st.floats(60.0, 1e9),
    budget=st.floats(0.001, 1.0),
)
def test_the_budget_is_kept_whatever_is_measured(
    step: float, blocked: float, write: float, slowdown: float, mtbf: float, budget: float
) -> None:
    slowed = step * (1.0 + slowdown)
    estimator = fed(step, blocked, blocked + write, slowed, mtbf_seconds=mtbf, budget=budget)
    steps = estimator.next_interval_steps()
    lost = blocked + write * slowdown / (1.0 + slowdown)
    assert isinstance(steps, int)
    assert steps >= 1
    assert lost <= budget * steps * step * (1.0 + 1e-6)


def test_failures_shorten_the_interval_and_time_without_them_lengthens_it() -> None:
    estimator = fed(mtbf_seconds=2e4, longest_seconds=1e6)
    quiet, expected = estimator.next_interval_steps(), estimator.mtbf_seconds
    estimator.observe_failure()
    assert estimator.next_interval_steps() < quiet
    assert estimator.mtbf_seconds == pytest.approx(expected / 3.0)
    for _ in range(100):
        estimator.observe_step(1000.0, saving=True)
    assert estimator.mtbf_seconds > expected


def test_what_is_seen_for_long_outweighs_the_prior() -> None:
    estimator = IntervalEstimator(mtbf_seconds=1e5, nodes=8)
    for _ in range(400):
        estimator.observe_step(5000.0, saving=False)
        estimator.observe_failure()
    assert estimator.mtbf_seconds == pytest.approx(5000.0, rel=0.05)


def test_the_prior_scales_with_the_nodes() -> None:
    assert IntervalEstimator().mtbf_seconds == pytest.approx(NODE_MTBF_SECONDS)
    assert IntervalEstimator(nodes=128).mtbf_seconds == pytest.approx(NODE_MTBF_SECONDS / 128)
    assert pytest.approx(28.8 * 3600.0, rel=0.01) == NODE_MTBF_SECONDS / 128


def test_it_explains_itself_with_the_numbers() -> None:
    text = fed(0.4, 0.25, 3.25, slowed=0.408, mtbf_seconds=86_400.0).explain()
    assert text.startswith("save every ")
    for figure in (
        "blocks 0.25 s",
        "2.0% for 3 s",
        "prior 24 h",
        "0 seen in 8.83 s",
        "budget 3.5%",
    ):
        assert figure in text
    assert "\n" not in text


def test_its_state_survives_json_and_another_number_of_nodes() -> None:
    estimator = fed(0.3, 0.2, 2.0, slowed=0.31, nodes=4)
    estimator.observe_failure()
    state = json.loads(json.dumps(estimator.state_dict()))
    same = IntervalEstimator(nodes=4)
    same.load_state_dict(state)
    assert same.explain() == estimator.explain()
    half = IntervalEstimator(nodes=2)
    half.load_state_dict(state)
    assert half.mtbf_seconds == pytest.approx(2.0 * estimator.mtbf_seconds)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": 0}, "version 0: give one of version 1"),
        ({"blocked": None}, "damaged"),
        ({"plain_steps": ["x"]}, "damaged"),
        ({"plain_steps": [-1.0]}, r"state\['plain_steps'\] = -1.0"),
        ({"failures": -1}, r"state\['failures'\] = -1"),
        ({"writes": []}, "3 blocked and 0 written"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(
    change: dict[str, Any], sentence: str
) -> None:
    estimator = fed()
    before = estimator.state_dict()
    with pytest.raises(CheckpointError, match=sentence):
        estimator.load_state_dict({**before, **change})
    assert estimator.state_dict() == before


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: IntervalEstimator(nodes=0), "nodes = 0 .* at least 1"),
        (lambda: IntervalEstimator(mtbf_seconds=0.0), "mtbf_seconds = 0.0 .* above 0"),
        (lambda: IntervalEstimator(budget=math.nan), "budget = nan"),
        (lambda: IntervalEstimator(first_save_steps=0), "first_save_steps = 0"),
        (lambda: fed().observe_step(-1.0, saving=False), "seconds = -1.0"),
        (lambda: fed().observe_save(math.nan, 1.0), "blocked_seconds = nan"),
    ],
)
def test_a_wrong_number_is_refused_by_name(call, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        call()
