"""Delay models: their laws, their settings, and what is recovered from measured seconds."""

import math

import numpy as np
import pytest

from outlast.coding.delays import (
    Additive,
    ChunkCosts,
    Combined,
    DelayModel,
    FailStop,
    Fixed,
    LoadIndependent,
    Markov,
    Pareto,
    ShiftedExponential,
    Slow,
    Trace,
    sample,
)
from outlast.errors import CodingError

TABLE = np.random.default_rng(3).exponential(0.5, (7, 9))
MODELS: list[DelayModel] = [
    ShiftedExponential(0.5),
    Pareto(2.0),
    Slow(0.1, 10.0),
    Markov(0.1, 0.9, 4.0),
    Additive(0.3),
    Trace(TABLE),
    Trace(TABLE, proportional=True),
    Fixed((1.0, 2.0, 1.0, 1.5, 3.0)),
    FailStop(0.2),
    ChunkCosts(0.3),
    Combined((Slow(0.1, 2.0), Additive(0.1), FailStop(0.05))),
    LoadIndependent(Pareto(2.0), 0.1),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_every_model_draws_delays_that_can_be(model: DelayModel) -> None:
    assert isinstance(model, DelayModel)
    delays = sample(model, 4, 5, steps=3, seed=1)
    for drawn in (delays.start_seconds, delays.slowdown, delays.chunk_cost):
        assert drawn.shape == (4, 3, 5)
    assert np.all(delays.start_seconds >= 0.0)
    assert np.all(delays.slowdown > 0.0)
    assert np.all(np.isfinite(delays.slowdown))
    assert np.all(delays.chunk_cost > 0.0)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_equal_seeds_draw_equal_delays(model: DelayModel) -> None:
    first, again = (sample(model, 3, 5, steps=4, seed=7) for _ in range(2))
    assert np.array_equal(first.slowdown, again.slowdown)
    assert np.array_equal(first.start_seconds, again.start_seconds)
    assert np.array_equal(first.chunk_cost, again.chunk_cost)


@pytest.mark.parametrize("scale", [0.1, 0.5, 2.0])
def test_shifted_exponential_has_its_mean_and_deviation_beyond_one(scale: float) -> None:
    slowdown = ShiftedExponential(scale).sample(200, 500, seed=2).slowdown
    assert slowdown.min() >= 1.0
    assert slowdown.mean() == pytest.approx(1.0 + scale, rel=0.02)
    assert slowdown.std() == pytest.approx(scale, rel=0.02)


@pytest.mark.parametrize("shape", [1.5, 2.0, 4.0])
def test_pareto_has_its_tail(shape: float) -> None:
    slowdown = Pareto(shape).sample(200, 500, seed=2).slowdown
    for level in (1.5, 3.0):
        assert (slowdown > level).mean() == pytest.approx(level**-shape, rel=0.05)


@pytest.mark.parametrize(("share", "persistence"), [(0.05, 0.05), (0.05, 0.95), (0.3, 0.7)])
def test_markov_keeps_its_share_and_persistence(share: float, persistence: float) -> None:
    slowdown = Markov(share, persistence, 10.0).sample(200, 100, steps=40, seed=4).slowdown
    slow = slowdown == 10.0
    assert np.all(slow | (slowdown == 1.0))
    assert slow.mean() == pytest.approx(share, rel=0.06)
    assert slow[:, 0].mean() == pytest.approx(share, rel=0.15)
    assert slow[:, 1:][slow[:, :-1]].mean() == pytest.approx(persistence, rel=0.05)


def test_slow_workers_are_drawn_anew_in_each_step() -> None:
    slow = Slow(0.1, 5.0).sample(300, 50, steps=10, seed=5).slowdown == 5.0
    assert slow.mean() == pytest.approx(0.1, rel=0.03)
    assert slow[:, 1:][slow[:, :-1]].mean() == pytest.approx(0.1, rel=0.1)


def test_a_trace_is_replayed_round_after_round_for_the_same_workers() -> None:
    starts = Trace(TABLE).sample(20, 5, steps=9, seed=6).start_seconds
    for stretch in starts:
        row = int(np.nonzero(stretch[0, 0] == TABLE)[0][0])
        columns = [int(np.nonzero(TABLE[row] == seconds)[0][0]) for seconds in stretch[0]]
        assert len(set(columns)) == 5
        rows = (row + np.arange(9)) % len(TABLE)
        assert np.array_equal(stretch, TABLE[rows][:, columns])


def test_a_proportional_trace_is_in_units_of_its_median() -> None:
    delays = Trace(TABLE, proportional=True).sample(500, 9, seed=1)
    assert np.all(delays.start_seconds == 0.0)
    assert np.median(delays.slowdown) == pytest.approx(1.0, rel=0.05)


def test_dead_workers_never_begin() -> None:
    delays = FailStop(0.1).sample(200, 100, seed=8)
    assert np.isinf(delays.start_seconds).mean() == pytest.approx(0.1, rel=0.05)
    assert set(np.unique(delays.start_seconds)) == {0.0, math.inf}


def test_chunk_costs_go_with_the_chunk_and_have_mean_one() -> None:
    delays = ChunkCosts(0.4).sample(300, 300, seed=9)
    assert np.all(delays.slowdown == 1.0)
    assert delays.chunk_cost.mean() == pytest.approx(1.0, rel=0.01)
    assert np.log(delays.chunk_cost).std() == pytest.approx(0.4, rel=0.01)


def test_causes_combine_by_sum_and_product() -> None:
    fixed = Fixed((1.0, 2.0))
    both = Combined((fixed, Fixed((3.0, 4.0)), LoadIndependent(fixed, 0.5)))
    delays = both.sample(1, 2)
    assert delays.slowdown.tolist() == [[[3.0, 8.0]]]
    assert delays.start_seconds.tolist() == [[[0.0, 0.5]]]


def test_load_independent_delays_are_those_of_the_model_without_its_load() -> None:
    proportional = ShiftedExponential(0.5).sample(5, 6, seed=3)
    once = LoadIndependent(ShiftedExponential(0.5), 2.0).sample(5, 6, seed=3)
    assert once.start_seconds == pytest.approx(2.0 * (proportional.slowdown - 1.0))
    assert np.all(once.slowdown == 1.0)


@pytest.mark.parametrize(
    ("refused", "named"),
    [
        (lambda: Slow(1.5, 2.0), "share = 1.5"),
        (lambda: Slow(0.5, 0.5), "factor = 0.5"),
        (lambda: Pareto(0.0), "shape = 0.0"),
        (lambda: ShiftedExponential(-1.0), "scale = -1.0"),
        (lambda: Markov(0.8, 0.1, 2.0), "at least 0.75"),
        (lambda: Markov(1.0, 1.0, 2.0), "take Fixed"),
        (lambda: Fixed((1.0, 0.0)), "0.0"),
        (lambda: Fixed((1.0, 1.0)).sample(1, 3), "workers = 3"),
        (lambda: Trace(TABLE).sample(1, 10), "the 9 of the trace"),
        (lambda: Trace(TABLE[0]), "rounds, workers"),
        (lambda: FailStop(math.nan), "probability = nan"),
        (lambda: Slow(0.1, 2.0).sample(0, 3), "draws = 0"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(refused, named: str) -> None:
    with pytest.raises(CodingError, match=named):
        refused()
