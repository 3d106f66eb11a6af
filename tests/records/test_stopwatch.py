"""Every second counts for exactly one purpose."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.records import Stopwatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("outlast.records.stopwatch.time", clock)
    return clock


def test_inner_purpose_pauses_the_outer(clock: Clock) -> None:
    watch = Stopwatch("other")
    clock.now += 1
    with watch("compute"):
        clock.now += 2
        with watch("data"):
            clock.now += 4
        clock.now += 8
    clock.now += 16
    assert watch.lap() == {"other": 17, "compute": 10, "data": 4}


def test_purpose_may_be_entered_within_itself(clock: Clock) -> None:
    watch = Stopwatch()
    with watch("data"), watch("data"):
        clock.now += 3
    assert watch.lap() == {"other": 0, "data": 3}


def test_lap_begins_anew_within_a_purpose(clock: Clock) -> None:
    watch = Stopwatch()
    with watch("checkpoint"):
        clock.now += 2
        assert watch.lap() == {"other": 0, "checkpoint": 2}
        clock.now += 5
    assert watch.lap() == {"other": 0, "checkpoint": 5}


def test_moved_seconds_change_the_purpose_and_not_the_sum(clock: Clock) -> None:
    watch = Stopwatch()
    with watch("compute"):
        clock.now += 10
        watch.move(3, to="communication")
    assert watch.lap() == {"other": 0, "compute": 7, "communication": 3}


def test_error_inside_a_purpose_ends_it(clock: Clock) -> None:
    watch = Stopwatch()
    with contextlib.suppress(KeyError), watch("data"):
        clock.now += 1
        raise KeyError
    clock.now += 2
    assert watch.lap() == {"other": 2, "data": 1}


ACTIONS = st.recursive(
    st.tuples(st.just("wait"), st.floats(0, 1e3)) | st.just(("lap",)),
    lambda inner: st.tuples(st.sampled_from("abc"), st.lists(inner, max_size=4)),
    max_leaves=20,
)


@given(st.lists(ACTIONS, max_size=8))
def test_purposes_sum_to_the_wall_time(actions: list[Any]) -> None:
    clock, laps = Clock(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outlast.records.stopwatch.time", clock)
        watch = Stopwatch()

        def play(actions: list[Any]) -> None:
            for action in actions:
                match action:
                    case ("wait", seconds):
                        clock.now += seconds
                    case ("lap",):
                        laps.append(watch.lap())
                    case (purpose, inner):
                        with watch(purpose):
                            play(inner)

        play(actions)
        laps.append(watch.lap())
    total_seconds = sum(sum(lap.values()) for lap in laps)
    assert total_seconds == pytest.approx(clock.now - 100.0, abs=1e-9, rel=1e-12)
    assert all(value >= 0 for lap in laps for value in lap.values())


def test_real_clock_is_measured_in_seconds() -> None:
    begun = time.perf_counter()
    watch = Stopwatch()
    with watch("data"):
        time.sleep(0.02)
    lap = watch.lap()
    assert 0.02 <= lap["data"] <= sum(lap.values()) <= time.perf_counter() - begun
