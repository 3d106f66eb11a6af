"""When `outlast run` saves, and when it stops for its time limit."""

import pytest

from outlast.checkpoint import SaveResult
from outlast.errors import AutosaveError
from outlast.runtime.cadence import Every, SaveCadence, cadence_of, every_of, seconds_of
from outlast.runtime.stop import Stop


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("100", Every(steps=100)),
        ("10m", Every(seconds=600.0)),
        ("90s", Every(seconds=90.0)),
        ("1.5h", Every(seconds=5400.0)),
        ("auto", Every()),
    ],
)
def test_every_reads_steps_and_times(text, every):
    assert every_of(text) == every


@pytest.mark.parametrize("text", ["0", "-5", "0s", "often", "5x", "", "1:30", "²"])
def test_every_refuses_what_is_neither(text):
    with pytest.raises(AutosaveError, match=r"--every .* is neither a number of steps"):
        every_of(text)


@pytest.mark.parametrize("text", ["0", "soon", "-1h"])
def test_time_limit_refuses_what_is_no_time(text):
    with pytest.raises(AutosaveError, match=r"--time-limit .* is no length of time above 0 s"):
        seconds_of("--time-limit", text)
    assert seconds_of("--time-limit", "4h") == 14400.0


def test_steps_are_counted_from_the_start_of_the_run_and_not_of_the_process():
    fresh, resumed = SaveCadence(Every(steps=4)), SaveCadence(Every(steps=4))
    resumed.begun(6, 0.0)
    assert due_steps(fresh, range(13)) == [4, 8, 12]
    assert due_steps(resumed, range(6, 13)) == [8, 12]


def due_steps(pace, steps):
    """The steps among those at which somebody asks, and saves when it is due."""
    found = []
    for step in steps:
        if pace.due(step, 0.0):
            pace.begun(step, 0.0)
            found.append(step)
    return found


def test_a_save_that_nobody_asked_for_in_time_comes_late():
    # As in accumulations of gradients.
    assert due_steps(SaveCadence(Every(steps=5)), range(0, 37, 4)) == [8, 12, 16, 20, 28, 32, 36]


def test_seconds_are_counted_from_the_save_before():
    pace = SaveCadence(Every(seconds=10.0))
    assert not pace.due(0, 100.0)
    assert not pace.due(1, 109.0)
    assert pace.due(2, 110.0)
    pace.begun(2, 110.0)
    assert not pace.due(3, 119.0)


def test_best_interval_follows_what_saves_cost_and_is_remembered(tmp_path):
    memory = tmp_path / "pace.json"

    def steps_to_next(pace):
        pace.begun(0, 0.0)
        return next(step for step in range(1, 100_000) if pace.due(step, 10.0 * step))

    pace = cadence_of(Every(), memory, nodes=1, failed_before=False)
    for _ in range(30):
        pace.observe_step(0.1, saving=False)
    before = steps_to_next(pace)
    pace.observe_save(SaveResult(20, 0.01, 0.02, 1))
    dear = steps_to_next(pace)
    assert dear > before
    again = cadence_of(Every(), memory, nodes=1, failed_before=False)
    for _ in range(30):
        again.observe_step(0.1, saving=False)
    assert steps_to_next(again) == pytest.approx(dear, rel=0.2)
    failed = cadence_of(Every(), memory, nodes=1, failed_before=True)
    for _ in range(30):
        failed.observe_step(0.1, saving=False)
    assert steps_to_next(failed) < dear


def test_time_limit_leaves_room_for_a_step_and_the_save():
    stop = Stop(1000.0)
    assert stop() == ""
    stop.observe_step(1100.0)
    assert stop() == "the time limit"
    stop = Stop(1000.0)
    stop.observe_save(700.0)
    assert stop() == "the time limit"
