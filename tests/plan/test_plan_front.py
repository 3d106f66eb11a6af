from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from outlast.errors import PlanError
from outlast.plan import pareto as fronts
from outlast.plan.pareto import (
    extremes,
    knee,
    nondominated,
    thinned,
)


def by_definition(values: np.ndarray) -> np.ndarray:
    no_worse = (values[:, None] <= values[None]).all(axis=2)
    better = (values[:, None] < values[None]).any(axis=2)
    return ~(no_worse & better).any(axis=0)


def random_space(seed: int) -> np.ndarray:
    """Coarse grids (many ties), duplicates, smooth spaces and spaces that are all front."""
    rng = np.random.default_rng(seed)
    count, axes = int(rng.integers(1, 400)), int(rng.integers(1, 6))
    kind = seed % 4
    if kind == 0:
        return rng.integers(0, int(rng.integers(1, 12)), (count, axes)).astype(float)
    if kind == 1:
        some = rng.random((count, axes))
        return some[rng.integers(0, count, count)]
    if kind == 2:
        return rng.lognormal(0.0, 2.0, (count, axes))
    return rng.dirichlet(np.ones(axes), count)


@pytest.mark.parametrize("seeds", [range(at, at + 25) for at in range(0, 100, 25)])
def test_front_equals_brute_force(seeds: range) -> None:
    for seed in seeds:
        values = random_space(seed)
        assert (nondominated(values) == by_definition(values)).all(), seed


small = arrays(
    float,
    st.tuples(st.integers(1, 40), st.integers(1, 5)),
    elements=st.integers(-3, 6).map(float),
)


@given(small)
def test_equal_points_stay_or_go_together(values: np.ndarray) -> None:
    twice = nondominated(np.concatenate([values, values]))
    once = nondominated(values)
    assert (twice[: len(values)] == once).all()
    assert (twice[len(values) :] == once).all()


@given(small, st.randoms(use_true_random=False))
def test_front_knows_no_order_and_no_unit(values: np.ndarray, random) -> None:
    order = list(range(len(values)))
    random.shuffle(order)
    units = np.array([3600.0, 1e-3, 7.0, 1.0 / 3.6e6, 2.0**30])[: values.shape[1]]
    assert (nondominated(values[order] * units) == nondominated(values)[order]).all()


@given(small, st.integers(0, 10_000))
def test_a_dominated_point_changes_nothing(values: np.ndarray, pick: int) -> None:
    worse = values[pick % len(values)] + np.eye(values.shape[1])[pick % values.shape[1]]
    found = nondominated(np.vstack([values, worse]))
    assert not found[-1]
    assert (found[:-1] == nondominated(values)).all()


def test_large_spaces_go_through_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(3).random((3000, 3))
    monkeypatch.setattr(fronts, "PASS", 1000)
    assert (nondominated(values) == by_definition(values)).all()
    with pytest.raises(PlanError, match="fewer options"):
        nondominated(np.random.default_rng(3).dirichlet(np.ones(3), 3000))


def test_a_hundred_thousand_points_that_all_stay() -> None:
    values = np.random.default_rng(0).dirichlet(np.ones(4), 100_000)
    assert nondominated(values).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(PlanError, match="objective 1 of point 2"):
        nondominated(np.array([[1.0, 2.0], [2.0, 1.0], [0.0, bad]]))


def test_an_empty_space_has_an_empty_front() -> None:
    assert nondominated(np.empty((0, 3))).shape == (0,)


@given(st.integers(0, 500), st.sampled_from([0.01, 0.05, 0.3]))
def test_each_point_left_out_has_a_near_one_that_stays(seed: int, epsilon: float) -> None:
    values = np.random.default_rng(seed).lognormal(0.0, 1.0, (120, 3))
    stays = thinned(values, ["log"] * 3, epsilon)
    left = values[~stays]
    covered = (values[stays][None] <= left[:, None] * (1 + epsilon) * (1 + 1e-9)).all(axis=2)
    assert covered.any(axis=1).all()
    assert (values[stays].min(axis=0) == values.min(axis=0)).all()


def test_thinning_by_difference_takes_zero_and_less() -> None:
    values = np.column_stack([np.linspace(-1, 1, 101), np.linspace(1, -1, 101)])
    stays = thinned(values, ["linear", "linear"], 0.1)
    assert 9 <= stays.sum() <= 22
    assert stays[0]
    assert stays[-1]
    with pytest.raises(PlanError, match="epsilon = 0"):
        thinned(values, ["linear", "linear"], 0)


def test_knee_is_where_the_curve_bends() -> None:
    hours = np.array([10.0, 11.0, 12.0, 20.0, 40.0])
    kwh = np.array([100.0, 60.0, 35.0, 33.0, 32.0])
    values = np.column_stack([hours, kwh])
    assert knee(values, ["linear", "linear"]) == 2
    assert knee(values * [3600.0, 3.6e6], ["linear", "linear"]) == 2
    assert knee(np.column_stack([hours, kwh, np.full(5, 4.0)]), ["log"] * 3) == 2


def test_knee_of_one_or_of_equal_points_is_the_first() -> None:
    assert knee(np.ones((3, 2)), ["log", "log"]) == 0
    with pytest.raises(PlanError, match="empty front"):
        knee(np.empty((0, 2)), ["log", "log"])


def test_extremes_break_ties_by_the_other_axes() -> None:
    values = np.array([[1.0, 9.0], [1.0, 3.0], [5.0, 2.0]])
    assert extremes(values).tolist() == [1, 2]
