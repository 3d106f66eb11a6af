"""What recovery costs, against hand calculation and against chance."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import RecoverError
from outlast.recover.cost import (
    RecoveryTime,
    detection_seconds,
    keep_seconds,
    lost_seconds,
    parity_groups,
    parity_seconds,
    rebuild_seconds,
    share_of_progress,
    transfer_seconds,
)
from outlast.recover.redundancy import even_parts


def test_the_way_back_is_the_sum_of_its_parts() -> None:
    assert RecoveryTime(0.05, 1.0, 0.5).seconds == 1.55


def test_a_dead_process_is_found_half_a_look_later_after_its_silence() -> None:
    assert detection_seconds(look_seconds=0.1) == 0.05
    assert detection_seconds(look_seconds=0.1, silence_seconds=1.0) == 1.05


def test_bytes_over_a_link() -> None:
    assert transfer_seconds(6e9, 2e9, latency_seconds=0.5) == 3.5


def test_a_rebuild_takes_in_all_other_buffers_and_the_slower_of_link_and_memory_counts() -> None:
    assert rebuild_seconds(1e9, 4, link_bytes_per_s=1e9, combine_bytes_per_s=5e9) == 3.0
    assert rebuild_seconds(1e9, 4, link_bytes_per_s=1e10, combine_bytes_per_s=1e9) == 3.0


def test_parity_costs_what_does_not_fit_into_the_slack() -> None:
    assert parity_seconds(1e9, 0, 1e9, 1e9) == 0.0
    assert parity_seconds(1e9, 1, 1e9, 4e9) == 1.5
    assert parity_seconds(1e9, 2, 1e9, 4e9) == 2.75
    assert parity_seconds(1e9, 1, 1e9, 4e9, slack_seconds=1.0) == 0.5
    assert parity_seconds(1e9, 1, 1e9, 4e9, slack_seconds=9.0) == 0.0


@given(st.floats(0.01, 100.0), st.integers(1, 1000))
def test_half_an_interval_is_lost_on_average(step: float, every: int) -> None:
    assert lost_seconds(step, every) == pytest.approx(every * step / 2)


def test_progress_against_a_run_that_is_played_through() -> None:
    back, work, losses, step = RecoveryTime(0.1, 0.9), 1000.0, 50, 4.0
    wall = work
    for number in range(losses):
        wall += back.seconds + step * (number + 0.5) / losses
    predicted = share_of_progress(work, losses, back, lost_seconds(step))
    assert predicted == pytest.approx(work / wall, rel=1e-9)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: RecoveryTime(-1.0, 0.0), "detection_seconds = -1"),
        (lambda: transfer_seconds(1.0, 0.0), "bytes_per_s = 0: give a finite number above 0"),
        (lambda: rebuild_seconds(1.0, 1, 1.0, 1.0), "group = 1: give at least 2"),
        (lambda: parity_seconds(1.0, 3, 1.0, 1.0), "losses = 3"),
        (lambda: lost_seconds(1.0, 0), "every_steps = 0"),
        (lambda: share_of_progress(0.0, 1, RecoveryTime(0, 0), 0.0), "work_seconds = 0"),
    ],
)
def test_what_makes_no_sense_is_refused(call, sentence: str) -> None:
    with pytest.raises(RecoverError, match=sentence):
        call()


def test_keeping_a_state_costs_what_does_not_fit_into_the_slack() -> None:
    assert keep_seconds(6e9, 2e9) == 3.0
    assert keep_seconds(6e9, 2e9, slack_seconds=1.0) == 2.0
    assert keep_seconds(6e9, 2e9, slack_seconds=9.0) == 0.0


@given(st.integers(1, 500), st.integers(2, 40))
def test_groups_of_parity_are_those_that_nodes_are_spread_over(nodes: int, largest: int) -> None:
    sizes = [len(each) for each in even_parts(list(range(nodes)), largest)]
    assert parity_groups(nodes, largest) == (min(sizes), max(sizes))
