"""The learning rate over a run: its corners, its limits, its direction."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.job import ScheduleSection
from outlast.train.loop import learning_rate_factor, warmup_note, warmup_steps_of


def curve(steps, **settings):
    schedule = ScheduleSection(**settings)
    return [learning_rate_factor(step, steps, schedule) for step in range(steps)]


@st.composite
def runs(draw):
    steps = draw(st.integers(2, 400))
    warmup = draw(st.integers(0, 2 * steps))
    schedule = ScheduleSection(
        name=draw(st.sampled_from(["cosine", "wsd", "constant"])),
        warmup_steps=warmup,
        decay_fraction=draw(st.floats(0.0, 1.0)),
        final_fraction=draw(st.floats(0.0, 1.0)),
    )
    return steps, schedule


@pytest.mark.parametrize("name", ["cosine", "wsd", "constant"])
def test_warm_up_is_a_straight_line_that_ends_at_the_peak(name):
    assert curve(100, name=name, warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("name", ["cosine", "wsd", "constant"])
def test_without_warm_up_the_first_step_has_the_peak(name):
    assert curve(10, name=name, warmup_steps=0, final_fraction=0.0)[0] == 1.0


def test_cosine_is_half_way_in_the_middle_and_final_after_the_last_step():
    schedule = ScheduleSection(name="cosine", warmup_steps=20, final_fraction=0.2)
    assert learning_rate_factor(70, 120, schedule) == pytest.approx(0.6)
    assert learning_rate_factor(119, 120, schedule) == pytest.approx(0.2, abs=1e-3)
    assert learning_rate_factor(120, 120, schedule) == pytest.approx(0.2)


def test_wsd_stays_at_the_peak_and_falls_in_a_straight_line():
    rates = curve(10, name="wsd", warmup_steps=2, decay_fraction=0.4, final_fraction=0.0)
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


def test_wsd_without_decay_stays_at_the_peak():
    assert curve(5, name="wsd", decay_fraction=0.0, final_fraction=0.0) == [1.0] * 5


def test_constant_ignores_the_final_fraction():
    assert curve(5, name="constant", final_fraction=0.0) == [1.0] * 5


@given(runs())
@settings(deadline=None)
def test_factors_are_positive_and_at_most_one(run):
    steps, schedule = run
    for step in range(steps):
        assert 0.0 < learning_rate_factor(step, steps, schedule) <= 1.0


@given(runs())
@settings(deadline=None)
def test_rates_rise_in_the_warm_up_and_never_after_it(run):
    steps, schedule = run
    rates = [learning_rate_factor(step, steps, schedule) for step in range(steps)]
    warmup = warmup_steps_of(schedule, steps)
    assert all(low < high for low, high in itertools.pairwise(rates[:warmup]))
    after = rates[warmup:]
    assert all(high >= low for high, low in itertools.pairwise(after))
    assert min(after) >= min(schedule.final_fraction, 1.0) - 1e-12


@pytest.mark.parametrize(
    ("name", "warmup", "left"),
    [("cosine", 9, 9), ("cosine", 20, 9), ("wsd", 6, 6), ("wsd", 7, 6), ("constant", 10, 9)],
)
def test_a_warm_up_that_is_too_long_is_cut_short_and_said(name, warmup, left):
    schedule = ScheduleSection(name=name, warmup_steps=warmup, decay_fraction=0.4)
    assert warmup_steps_of(schedule, 10) == left
    assert max(curve(10, name=name, warmup_steps=warmup, decay_fraction=0.4)) == 1.0
    note = warmup_note(schedule, 10)
    assert bool(note) == (left < warmup)
    assert not note or f"schedule.warmup_steps = {warmup} does not fit into a run of 10" in note
