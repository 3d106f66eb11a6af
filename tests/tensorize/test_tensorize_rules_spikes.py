"""Loss spikes are found, and noise is not taken for them."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.errors import TensorizeError
from outlast.tensorize.spikes import Spike, SpikeDetector


def _curve(seed: int, steps: int, noise: float, power: float) -> np.ndarray:
    """A falling loss with normal noise."""
    generator = np.random.default_rng(seed)
    trend = 2.0 + 8.0 * np.arange(1, steps + 1) ** -power
    return trend + noise * generator.standard_normal(steps)


def _alarms(losses: np.ndarray, detector: SpikeDetector) -> list[Spike]:
    found = [detector.observe(float(loss)) for loss in losses]
    return [spike for spike in found if spike is not None]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.floats(1e-4, 0.5), st.floats(0.05, 1.0))
def test_ordinary_curves_raise_no_alarm(seed: int, noise: float, power: float) -> None:
    assert _alarms(_curve(seed, 800, noise, power), SpikeDetector()) == []


@pytest.mark.parametrize("tail", ["normal", "cauchy", "pareto"])
def test_false_alarms_are_as_rare_as_documented_for_any_tails(tail: str) -> None:
    # No threshold, so that the bound is all there is. The chance of a first alarm in some steps is
    # at most their number times the rate.
    window, patience, runs, steps = 8, 2, 1500, 4
    generator = np.random.default_rng(7)
    draws = {
        "normal": generator.standard_normal,
        "cauchy": generator.standard_cauchy,
        "pareto": lambda size: generator.pareto(0.8, size),
    }
    losses = draws[tail]((runs, window + patience + steps - 1))

    def alarmed(losses: np.ndarray, threshold: float) -> int:
        return sum(bool(_alarms(run, SpikeDetector(window, threshold, patience))) for run in losses)

    most = runs * steps / math.comb(window + patience, patience)
    found = alarmed(losses, 0.0)
    assert 0.5 * most < found < most + 4.0 * math.sqrt(most)
    # A falling trend and a threshold make them rarer.
    assert alarmed(losses - np.arange(losses.shape[1]), 0.0) < found
    assert alarmed(losses, 5.0) < found


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.01, 0.1), st.integers(200, 500), st.integers(3, 40))
def test_a_jump_is_found_once_and_dated(seed: int, noise: float, start: int, length: int) -> None:
    losses = _curve(seed, 700, noise, 0.3)
    losses[start : start + length] += 2.0 + 20.0 * noise
    (spike,) = _alarms(losses, SpikeDetector())
    assert spike.kind == "jump"
    assert spike.step == start
    assert spike.loss == losses[start + 2]
    assert spike.deviations > 5.0
    assert spike.usual == pytest.approx(np.median(losses[start - 128 : start]))


def test_one_odd_batch_is_no_spike_unless_patience_is_one() -> None:
    losses = _curve(0, 400, 0.05, 0.3)
    losses[300] += 5.0
    assert _alarms(losses, SpikeDetector()) == []
    (spike,) = _alarms(losses, SpikeDetector(patience=1))
    assert spike.step == 300


def test_slow_divergence_is_found() -> None:
    losses = _curve(1, 600, 0.02, 0.3)
    losses[300:] += np.linspace(0.0, 4.0, 300)
    spikes = _alarms(losses, SpikeDetector())
    assert spikes
    assert 300 <= spikes[0].step < 360


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_reported_at_once_and_once(bad: float) -> None:
    detector = SpikeDetector()
    spike = detector.observe(bad)
    assert spike is not None
    assert (spike.kind, spike.step, spike.deviations) == ("not finite", 0, math.inf)
    assert math.isnan(spike.usual)
    assert detector.observe(bad) is None
    assert detector.spiking
    assert detector.observe(3.0) is None
    assert not detector.spiking
    spike = detector.observe(bad)
    assert spike is not None
    assert spike.usual == 3.0
    assert spike.step == 3


def test_a_level_that_stays_becomes_usual() -> None:
    detector = SpikeDetector(window=32)
    losses = np.concatenate([_curve(0, 100, 0.05, 0.3), 9 + _curve(1, 200, 0.05, 0.3)])
    assert len(_alarms(losses, detector)) == 1
    assert not detector.spiking
    assert _alarms(np.full(5, 40.0), detector)


def test_spikes_do_not_blunt_the_measure() -> None:
    losses = _curve(3, 900, 0.05, 0.3)
    for start in range(200, 900, 60):
        losses[start : start + 20] += 3.0
    assert len(_alarms(losses, SpikeDetector())) == 12


@pytest.mark.parametrize("cut", [10, 301, 303, 310, 330])
def test_state_goes_through_json(cut: int) -> None:
    losses = _curve(4, 400, 0.05, 0.3)
    losses[300:320] += 3.0
    whole = SpikeDetector()
    expected = [whole.observe(float(loss)) for loss in losses]
    first, second = SpikeDetector(), SpikeDetector()
    found = [first.observe(float(loss)) for loss in losses[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found += [second.observe(float(loss)) for loss in losses[cut:]]
    assert found == expected
    assert sum(spike is not None for spike in found) == 1


def test_settings_out_of_range_are_refused() -> None:
    for settings_ in [(4, 5.0, 3), (16, -1.0, 3), (16, 5.0, 0), (16, math.nan, 1)]:
        with pytest.raises(TensorizeError, match="spike detector must be at least 8, 0 and 1"):
            SpikeDetector(*settings_)


def test_a_spike_is_reported_once_of_either_kind() -> None:
    losses = _curve(5, 400, 0.05, 0.3)
    losses[300:312] += 3.0
    losses[[300, 302, 305, 311]] = math.nan
    (spike,) = _alarms(losses, SpikeDetector())
    assert (spike.kind, spike.step) == ("not finite", 300)
    losses[300:303] = losses[303]
    # A run that is lost is told, even if its loss had jumped before.
    spikes = _alarms(losses, SpikeDetector())
    assert [(spike.kind, spike.step) for spike in spikes] == [("jump", 300), ("not finite", 305)]
