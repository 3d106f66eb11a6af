"""When a step counts as hung, and who is slow."""

from hypothesis import given
from hypothesis import strategies as st

from outlast.recover.hang import (
    FIRST_STEPS,
    LEAST_SECONDS,
    MEDIANS,
    SLACK,
    WINDOWS,
    SlowRanks,
    StepDeadline,
)


def after(deadline: StepDeadline, steps: list[float]) -> float:
    for seconds in steps:
        deadline.observe(seconds)
    return deadline.seconds


def test_the_first_steps_may_take_as_long_as_another_process_is_waited_for() -> None:
    assert StepDeadline(600.0).seconds == 600.0
    assert after(StepDeadline(600.0), [0.1] * (FIRST_STEPS - 1)) == 600.0


def test_then_the_deadline_follows_from_the_steps() -> None:
    assert after(StepDeadline(600.0), [20.0] * 20) == MEDIANS * 20.0
    assert after(StepDeadline(600.0), [20.0] * 19 + [100.0]) == SLACK * 100.0
    assert after(StepDeadline(600.0), [0.01] * 20) == LEAST_SECONDS
    assert after(StepDeadline(600.0, least_seconds=600.0), [0.01] * 20) == 600.0


def test_steps_long_ago_are_forgotten() -> None:
    assert after(StepDeadline(600.0), [100.0] * 20 + [10.0] * 300) == MEDIANS * 10.0


def test_a_given_deadline_holds_from_the_second_step_on() -> None:
    assert StepDeadline(600.0, fixed_seconds=5.0).seconds == 600.0
    assert after(StepDeadline(600.0, fixed_seconds=5.0), [0.1]) == 5.0
    assert StepDeadline(600.0, fixed_seconds=900.0).seconds == 900.0


def test_zero_means_no_deadline() -> None:
    assert StepDeadline(600.0, fixed_seconds=0.0).seconds == 0.0
    assert after(StepDeadline(600.0, fixed_seconds=0.0), [0.1] * 50) == 0.0


@given(st.lists(st.floats(1e-3, 1e3), min_size=FIRST_STEPS, max_size=600))
def test_no_step_that_was_usual_lately_passes_the_deadline(steps: list[float]) -> None:
    deadline = StepDeadline(first_seconds=1e9)
    for seconds in steps:
        deadline.observe(seconds)
    assert deadline.seconds >= max(steps[-256:])


def test_who_is_slow_for_long_is_told_of_once() -> None:
    slow = SlowRanks(4)
    told = [slow.observe([10.0, 10.0, 15.0, 11.0]) for _ in range(3 * WINDOWS)]
    assert told[WINDOWS - 1] == [(2, 1.5)]
    assert sum(map(len, told)) == 1


def test_short_steps_are_added_up_before_they_are_compared() -> None:
    slow = SlowRanks(2)
    told = [slow.observe([1.0, 1.5]) for _ in range(10 * WINDOWS)]
    assert not any(told[:-1])
    assert told[-1] == [(1, 1.5)]


def test_who_is_slow_now_and_then_is_not() -> None:
    slow = SlowRanks(2)
    for window in range(10 * WINDOWS):
        assert slow.observe([10.0, 10.0 if window % WINDOWS == 0 else 20.0]) == []


def test_of_two_the_slower_one_is_slow() -> None:
    slow = SlowRanks(2)
    told = [found for _ in range(WINDOWS) for found in slow.observe([30.0, 10.0])]
    assert told == [(0, 3.0)]


def test_a_clock_that_stands_makes_nobody_slow() -> None:
    slow = SlowRanks(2)
    assert [slow.observe([0.0, 0.0]) for _ in range(WINDOWS)] == [[]] * WINDOWS
