"""Delay models: their laws and their settings."""

import numpy as np
import pytest

from outlast.coding.delays import DelayModel, Markov, ShiftedExponential, Slow, sample
from outlast.errors import CodingError

MODELS: list[DelayModel] = [ShiftedExponential(0.5), Slow(0.1, 10.0), Markov(0.1, 0.9, 4.0)]


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
    slowdown = sample(ShiftedExponential(scale), 200, 500, seed=2).slowdown
    assert slowdown.min() >= 1.0
    assert slowdown.mean() == pytest.approx(1.0 + scale, rel=0.02)
    assert slowdown.std() == pytest.approx(scale, rel=0.02)


@pytest.mark.parametrize(("share", "persistence"), [(0.05, 0.05), (0.05, 0.95), (0.3, 0.7)])
def test_markov_keeps_its_share_and_persistence(share: float, persistence: float) -> None:
    slowdown = sample(Markov(share, persistence, 10.0), 200, 100, steps=40, seed=4).slowdown
    slow = slowdown == 10.0
    assert np.all(slow | (slowdown == 1.0))
    assert slow.mean() == pytest.approx(share, rel=0.06)
    assert slow[:, 0].mean() == pytest.approx(share, rel=0.15)
    assert slow[:, 1:][slow[:, :-1]].mean() == pytest.approx(persistence, rel=0.05)


def test_slow_workers_are_drawn_anew_in_each_step() -> None:
    slow = sample(Slow(0.1, 5.0), 300, 50, steps=10, seed=5).slowdown == 5.0
    assert slow.mean() == pytest.approx(0.1, rel=0.03)
    assert slow[:, 1:][slow[:, :-1]].mean() == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize(
    ("refused", "named"),
    [
        (lambda: Slow(1.5, 2.0), "share = 1.5"),
        (lambda: Slow(0.5, 0.5), "factor = 0.5"),
        (lambda: ShiftedExponential(-1.0), "scale = -1.0"),
        (lambda: Markov(0.8, 0.1, 2.0), "at least 0.75"),
        (lambda: Markov(1.0, 1.0, 2.0), r"take Slow\(1, factor\)"),
        (lambda: sample(Slow(0.1, 2.0), 0, 3), "draws = 0"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(refused, named: str) -> None:
    with pytest.raises(CodingError, match=named):
        refused()
