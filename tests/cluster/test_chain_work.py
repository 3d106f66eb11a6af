"""What steps took on which node counts, and what is left by that."""

from pathlib import Path

import pytest
from slurm_programs import partition, put_queue, slurm_commands

from outlast.cluster.chain_files import (
    ChainFiles,
    ChainPlan,
    chain_files,
    note,
    write_plan,
    write_progress,
)
from outlast.cluster.choosing import StepTimes, choose_first, speed_of, step_times, work_seconds
from outlast.records import AttemptStarted, StepsDone, TrainingStarted
from outlast.records.log import RecordWriter

PLAN = ChainPlan("abc", "a", "dependent", (2,), 4, 1e6, "/", "python", chooses=True, sizes=(2, 4))


@pytest.fixture
def files(tmp_path: Path) -> ChainFiles:
    found = chain_files(tmp_path / "runs" / "a")
    write_plan(found, PLAN)
    return found


def trained(files: ChainFiles, attempt: int, processes: int, step_seconds: list[float]) -> None:
    """An attempt's records, which continue from step 10 per attempt before."""
    (files.run / "job.toml").write_text("")
    writer = RecordWriter(files.run, attempt=attempt)
    first = 10 * (attempt - 1)
    writer.write(AttemptStarted("f", processes, "slurm", {}, {}, {}, 1000, 8, 64, 1000, 6e3))
    writer.write(TrainingStarted(first, 30.0, {}))
    for index, seconds in enumerate(step_seconds):
        step = first + index + 1
        done = {"compute": seconds}
        writer.write(StepsDone(step, 1, 2.0, 1.0, 1e-3, 64 * step, [seconds], done))
    writer.close()


def test_nothing_is_known_before_the_first_step(files: ChainFiles) -> None:
    assert step_times(files, PLAN) is None
    assert work_seconds(files, PLAN, 2, None) is None


def test_one_measured_count_is_carried_to_others_by_a_power(files: ChainFiles) -> None:
    trained(files, 1, 8, [3.0, 1.0])
    times = step_times(files, PLAN)
    assert times == StepTimes({8: 2.0}, 4)
    assert times.seconds_on(2) == pytest.approx(2.0)
    assert times.seconds_on(4) == pytest.approx(2.0 / 2**0.9)
    assert work_seconds(files, PLAN, 2, times) == pytest.approx(1000 * 2.0)
    assert work_seconds(files, PLAN, 2, times, step=400) == pytest.approx(600 * 2.0)


def test_counts_that_were_measured_count_as_measured(files: ChainFiles) -> None:
    trained(files, 1, 8, [2.0] * 10)
    trained(files, 2, 32, [1.0] * 10)
    times = step_times(files, PLAN)
    assert times is not None
    speed = speed_of(times, 2)
    assert [speed(nodes) for nodes in (2, 4, 8)] == pytest.approx([1.0, 2**0.5, 2.0])
    assert speed(16) == pytest.approx(2.0 * 2**0.9), "beyond what was measured"
    assert speed(1) == pytest.approx(0.5**0.9)


def test_only_the_newest_steps_of_a_count_are_taken(files: ChainFiles) -> None:
    trained(files, 1, 8, [9.0] * 10)
    trained(files, 2, 8, [1.0] * 50)
    assert step_times(files, PLAN) == StepTimes({8: 1.0}, 4)


def test_a_program_of_ones_own_is_measured_by_its_links(files: ChainFiles) -> None:
    for job, processes, first, last in (("1", 8, 0, 50), ("2", 16, 50, 150), ("3", 8, 150, 150)):
        note(files, "started", job=job, number=1, began=1e9, step=first, processes=processes)
        note(files, "ended", job=job, number=1, step=last, seconds=100.0)
    write_progress(files, 150, 1150, None)
    times = step_times(files, PLAN)
    assert times == StepTimes({8: 2.0, 16: 1.0}, 4)
    assert work_seconds(files, PLAN, 4, times) == pytest.approx(1000.0)


def test_nodes_that_were_measured_to_gain_nothing_are_not_chosen(
    files: ChainFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_commands(tmp_path, monkeypatch)
    put_queue(tmp_path, [], partition(10, 10))
    trained(files, 1, 8, [60.0] * 10)
    assert choose_first(files, PLAN, 2).plan.nodes == (4,), "more nodes are hoped to be faster"
    trained(files, 2, 16, [60.0] * 10)
    assert choose_first(files, PLAN, 3).plan.nodes == (2,)
