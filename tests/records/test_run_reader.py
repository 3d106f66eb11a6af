"""What a run's events add up to, over attempts that do steps again."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.errors import RunError
from outlast.records import (
    LOST,
    PURPOSES,
    AttemptEnded,
    AttemptStarted,
    RecordWriter,
    RunDirectory,
    StepsDone,
    TrainingStarted,
    Warned,
    read_run,
)

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.records import Run


@dataclass
class Interval:
    steps: int
    seconds: dict[str, float]


@dataclass
class Start:
    """One attempt: where it continues from, and the intervals that it lives to record."""

    first_step: int
    startup_seconds: float
    intervals: list[Interval]
    ended: dict[str, float] | None = None

    @property
    def last_step(self) -> int:
        return self.first_step + sum(each.steps for each in self.intervals)


def write_run(path: Path, starts: list[Start]) -> Run:
    directory = RunDirectory(path)
    directory.create("[train]")
    for start in starts:
        writer = RecordWriter(path, attempt=directory.next_attempt())
        writer.write(AttemptStarted("f", 4, "single", {"shard": 4}, {}, {}, 100, 8, 64, 1000, 6e3))
        writer.write(TrainingStarted(start.first_step, start.startup_seconds, {}))
        step = start.first_step
        for each in start.intervals:
            step += each.steps
            writer.write(
                StepsDone(step, each.steps, 100.0 - step, 1.0, 0.1, step, [], each.seconds)
            )
        if start.ended is not None:
            writer.write(AttemptEnded(step, "completed", "", start.ended))
        writer.close()
    return read_run(path)


def compute(*steps: int) -> list[Interval]:
    """Intervals of so many steps, one second of compute each step."""
    return [Interval(each, {"compute": float(each)}) for each in steps]


def test_run_without_restart(tmp_path: Path) -> None:
    run = write_run(tmp_path, [Start(0, 5.0, compute(10, 10), {"checkpoint": 2.0})])
    assert run.losses() == [(10, 90.0), (20, 80.0)]
    expected = dict.fromkeys([*PURPOSES, LOST], 0.0)
    assert run.seconds() == expected | {"startup": 5.0, "compute": 20.0, "checkpoint": 2.0}
    (attempt,) = run.attempts
    assert (attempt.number, attempt.first_step, attempt.world_size) == (1, 0, 4)
    assert attempt.outcome == "completed"
    assert attempt.end_time - attempt.start_time >= 5.0


def test_steps_done_again_count_once_and_their_first_time_is_lost(tmp_path: Path) -> None:
    run = write_run(
        tmp_path, [Start(0, 5.0, compute(10, 10, 10)), Start(20, 7.0, compute(10, 10), {})]
    )
    assert [step for step, _ in run.losses()] == [10, 20, 30, 40]
    assert [record.attempt for record, _ in run.steps()] == [1, 1, 2, 2]
    seconds = run.seconds()
    assert seconds["compute"] == 40.0
    assert seconds[LOST] == 10.0
    assert (seconds["startup"], seconds["restart"]) == (5.0, 7.0)
    assert [each.outcome for each in run.attempts] == ["died", "completed"]


def test_interval_across_the_restart_is_lost_in_part(tmp_path: Path) -> None:
    run = write_run(tmp_path, [Start(0, 1.0, compute(10, 10)), Start(14, 1.0, compute(6), {})])
    assert [(event.step, event.steps) for _, event in run.steps()] == [(10, 10), (20, 6)]
    assert run.seconds()[LOST] == pytest.approx(6.0)
    assert run.seconds()["compute"] == pytest.approx(20.0)


def test_several_restarts_from_ever_older_checkpoints(tmp_path: Path) -> None:
    starts = [
        Start(0, 1.0, compute(10, 10, 10)),
        Start(20, 1.0, compute(10)),
        Start(10, 1.0, compute(10, 10, 10), {}),
    ]
    run = write_run(tmp_path, starts)
    assert [record.attempt for record, _ in run.steps()] == [1, 3, 3, 3]
    assert [step for step, _ in run.losses()] == [10, 20, 30, 40]
    assert run.seconds()[LOST] == 30.0


def test_restart_that_recorded_no_step_still_gave_up_the_later_ones(tmp_path: Path) -> None:
    run = write_run(tmp_path, [Start(0, 1.0, compute(10, 10)), Start(10, 1.0, [])])
    assert [step for step, _ in run.losses()] == [10]
    assert run.seconds()[LOST] == 10.0


def test_attempt_that_died_before_it_was_ready_changes_nothing(tmp_path: Path) -> None:
    write_run(tmp_path, [Start(0, 1.0, compute(10))])
    writer = RecordWriter(tmp_path, attempt=RunDirectory(tmp_path).next_attempt())
    writer.write(Warned("no memory"))
    writer.close()
    run = read_run(tmp_path)
    assert [step for step, _ in run.losses()] == [10]
    assert [(each.outcome, each.first_step) for each in run.attempts] == [
        ("died", 0),
        ("died", None),
    ]


SECONDS = st.dictionaries(
    st.sampled_from([*PURPOSES, "a purpose of tomorrow"]), st.floats(0, 1e3), max_size=4
)
INTERVALS = st.lists(st.builds(Interval, st.integers(1, 7), SECONDS), max_size=6)


@st.composite
def histories(draw: st.DrawFn) -> list[Start]:
    """Runs whose attempts continue from any step that was reached before."""
    starts: list[Start] = []
    for _ in range(draw(st.integers(1, 5))):
        reached = starts[-1].last_step if starts else 0
        starts.append(
            Start(
                draw(st.integers(0, reached)),
                draw(st.floats(0, 1e3)),
                draw(INTERVALS),
                draw(st.none() | SECONDS),
            )
        )
    return starts


@given(histories())
@settings(deadline=None, max_examples=60)
def test_laws_of_any_history(tmp_path_factory: pytest.TempPathFactory, starts: list[Start]) -> None:
    run = write_run(tmp_path_factory.mktemp("run"), starts)
    seconds = run.seconds()

    wall_seconds = sum(
        start.startup_seconds
        + sum(sum(each.seconds.values()) for each in start.intervals)
        + sum((start.ended or {}).values())
        for start in starts
    )
    assert sum(seconds.values()) == pytest.approx(wall_seconds, abs=1e-9, rel=1e-12)

    # One step at a time: its time is lost if some later attempt continued from before it.
    lost_seconds = 0.0
    for number, start in enumerate(starts):
        kept_until = min((each.first_step for each in starts[number + 1 :]), default=10**9)
        step = start.first_step
        for each in start.intervals:
            for _ in range(each.steps):
                step += 1
                if step > kept_until:
                    lost_seconds += sum(each.seconds.values()) / each.steps
    assert seconds[LOST] == pytest.approx(lost_seconds, abs=1e-9)
    assert all(value >= 0 for value in seconds.values())

    covered = [range(event.step - event.steps, event.step) for _, event in run.steps()]
    assert all(one.stop <= other.start for one, other in itertools.pairwise(covered))
    if starts[-1].intervals:
        assert covered[-1].stop == starts[-1].last_step


def test_other_ranks_are_read_and_kept_apart(tmp_path: Path) -> None:
    write_run(tmp_path, [Start(0, 1.0, compute(10))])
    for rank in (1, 11):
        writer = RecordWriter(tmp_path, rank=rank)
        writer.write(Warned(f"from {rank}"))
        writer.write(StepsDone(10, 10, 9.0, 1.0, 0.1, 10, [], {"compute": 99.0}))
        writer.close()
    (tmp_path / "events.copy.jsonl").write_bytes((tmp_path / "events.jsonl").read_bytes())
    run = read_run(tmp_path)
    assert [event.message for _, event in run.of(Warned, rank=11)] == ["from 11"]
    assert {record.rank for record in run.records} == {0, 1, 11}
    assert run.losses() == [(10, 90.0)]
    assert run.seconds()["compute"] == 10.0
    assert len(run.attempts) == 1


def test_clock_that_is_set_back_changes_no_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(1_000_000, 0, -1000))
    monkeypatch.setattr("outlast.records.log.time.time", lambda: float(next(now)))
    run = write_run(tmp_path, [Start(0, 1.0, compute(5, 5)), Start(10, 1.0, compute(5), {})])
    assert [step for step, _ in run.losses()] == [5, 10, 15]
    assert [each.outcome for each in run.attempts] == ["died", "completed"]


def test_ranks_are_merged_by_time(tmp_path: Path) -> None:
    RunDirectory(tmp_path).create("")
    writers = [RecordWriter(tmp_path, rank=rank) for rank in range(2)]
    for number in range(6):
        writers[number % 2].write(Warned(str(number)))
    messages = [record.event.message for record in read_run(tmp_path).records]
    assert messages == ["0", "1", "2", "3", "4", "5"]


def test_run_that_never_wrote_an_event_is_readable(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "fresh").create("[train]\n")
    run = read_run(tmp_path / "fresh")
    assert (run.name, run.job_text, run.attempts, run.losses()) == ("fresh", "[train]\n", [], [])
    assert sum(run.seconds().values()) == 0.0


def test_other_folder_is_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is not a run directory: it has no job\.toml; name a fold"):
        read_run(tmp_path)
