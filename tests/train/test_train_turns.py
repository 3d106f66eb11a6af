"""Taking turns at saving: with real turns, between runs of one folder."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import finish, start_process, wait_for_step
from tiny import tiny_job

from outlast.checkpoint import IntervalEstimator, SaveResult
from outlast.cluster.storage import FolderTurns, ask
from outlast.errors import EXIT_TO_BE_CONTINUED
from outlast.job import Job
from outlast.records import CheckpointInterval, CheckpointSaved, StepsDone, read_run
from outlast.runtime import cadence as taking
from outlast.runtime.cadence import Every, SaveCadence, SaveTurns
from outlast.train.run import run_directory


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taking, "LOOK_SECONDS", 0.0)


def test_a_waiting_save_does_not_look_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taking, "LOOK_SECONDS", 0.5)
    clock = Clock()
    first = by_steps(turns(tmp_path))
    second = by_steps(turns(tmp_path, clock=clock))
    assert first.wants(10)
    assert not second.wants(10)
    first.ended()
    clock.now += 0.4
    assert not second.wants(11)
    clock.now += 0.2
    assert second.wants(12)
    second.ended()


def by_steps(turns: SaveTurns) -> SaveCadence:
    cadence = SaveCadence(Every(steps=10), turns=turns)
    cadence.start(0)
    return cadence


def turns(
    folder: Path, longest_seconds: float = 60.0, clock: Callable[[], float] = time.monotonic
) -> SaveTurns:
    return SaveTurns(
        FolderTurns(folder, "least-waste", ask_slurm=True, load=0.6),
        size_bytes=1e6,
        nodes=1,
        mtbf_seconds=1e5,
        longest_seconds=longest_seconds,
        clock=clock,
    )


def test_a_due_save_waits_for_its_turn_and_stays_due(tmp_path: Path) -> None:
    first, second = by_steps(turns(tmp_path)), by_steps(turns(tmp_path))
    assert not first.wants(9)
    assert first.wants(10)
    assert not second.wants(10)
    first.begun(10)
    assert not second.wants(11)
    assert not first.wants(12)
    first.ended()
    assert second.wants(13)
    second.begun(13)
    second.ended()
    assert not second.wants(19)
    assert second.wants(20)
    second.ended()


def test_a_save_that_is_due_before_the_last_one_has_ended_waits_for_a_turn_of_its_own(
    tmp_path: Path,
) -> None:
    slow, other = by_steps(turns(tmp_path)), by_steps(turns(tmp_path))
    assert slow.wants(10)
    slow.begun(10)
    assert not other.wants(10)
    assert not slow.wants(20), "the turn is that of the save under way"
    slow.ended()
    assert other.wants(11), "the turn is free with the end of the save that had it"
    other.begun(11)
    assert not slow.wants(21)
    other.ended()
    assert slow.wants(22)
    slow.ended()


def test_a_save_that_is_not_due_any_more_blocks_nobody(tmp_path: Path) -> None:
    first, moved = by_steps(turns(tmp_path)), by_steps(turns(tmp_path))
    assert first.wants(10)
    assert not moved.wants(10)
    assert len(list(tmp_path.glob("ticket-*"))) == 1
    # As a group that has taken a peer's state.
    moved.start(30)
    assert not moved.wants(31)
    assert not list(tmp_path.glob("ticket-*"))
    first.start(30)
    assert not first.wants(31)
    assert moved.wants(40), "what was granted and not used is given back"
    moved.ended()


def test_only_who_writes_asks_for_turns(tmp_path: Path) -> None:
    writing, idle = by_steps(turns(tmp_path)), by_steps(turns(tmp_path))
    assert not idle.wants(10, writes=False)
    assert not list(tmp_path.glob("*.json"))
    assert writing.wants(10)
    writing.begun(10)
    assert not writing.wants(11, writes=False)
    assert not idle.wants(11), "the save under way keeps its turn"
    writing.ended()
    writing.observe_save(SaveResult(10, blocked_seconds=0.01, seconds=2.0, bytes=10**9))
    assert len(list(tmp_path.glob("saver-*"))) == 1
    assert not writing.wants(12, writes=False)
    assert not list(tmp_path.glob("saver-*")), "one job is not to be counted as two"
    assert idle.wants(12)
    assert not idle.wants(13, writes=False)
    assert writing.wants(20), "what was granted is given back by who writes no more"
    writing.begun(20)
    writing.ended()
    writing.observe_save(SaveResult(20, blocked_seconds=0.01, seconds=2.0, bytes=10**9))
    assert len(list(tmp_path.glob("saver-*"))) == 1
    for each in (writing, idle):
        each.close()
    assert not list(tmp_path.glob("saver-*"))


def test_nobody_waits_longer_than_allowed(tmp_path: Path) -> None:
    clock = Clock()
    first = by_steps(turns(tmp_path))
    assert first.wants(10)
    hasty = by_steps(turns(tmp_path, longest_seconds=5.0, clock=clock))
    assert not hasty.wants(10)
    clock.now += 6.0
    assert hasty.wants(11)
    first.ended()
    hasty.ended()


def test_a_folder_that_cannot_be_used_hinders_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    cadence = by_steps(turns(tmp_path / "file" / "turns"))
    assert cadence.wants(10)
    cadence.ended()


def test_in_set_10_jobs_of_other_periods_save_side_by_side(tmp_path: Path) -> None:
    clocks = [Clock(), Clock(), Clock()]
    rare, often, as_often = (
        SaveTurns(
            FolderTurns(tmp_path, "set-10", ask_slurm=False, load=0.6),
            size_bytes=1e6,
            nodes=1,
            mtbf_seconds=1e5,
            longest_seconds=60.0,
            clock=clock,
        )
        for clock in clocks
    )
    for clock, seconds in zip(clocks, (3000.0, 30.0, 25.0), strict=True):
        clock.now += seconds
    assert rare.may_save()
    assert often.may_save()
    assert not as_often.may_save()
    often.release()
    assert as_often.may_save()
    as_often.release()
    rare.release()


def test_the_class_of_a_job_is_that_of_its_mean_period(tmp_path: Path) -> None:
    clock, asked = Clock(), []

    class Noting(FolderTurns):
        def ask(self, size_bytes: float, *, period_seconds: float, **about: float) -> Any:
            asked.append(period_seconds)
            return super().ask(size_bytes, period_seconds=period_seconds, **about)

    own = SaveTurns(
        Noting(tmp_path, "fcfs", ask_slurm=False, load=0.6),
        size_bytes=1e6,
        nodes=1,
        mtbf_seconds=1e5,
        longest_seconds=9.0,
        clock=clock,
    )
    for seconds in (100.0, 100.0, 400.0):
        clock.now += seconds
        assert own.may_save()
        own.saving()
        own.release()
    assert asked == [100.0, 100.0, 200.0]


def learnt(cadence: SaveCadence) -> str:
    """What a cadence says of its interval after a few steps and a save."""
    for _ in range(5):
        cadence.observe_step(0.1, saving=False)
    cadence.observe_save(SaveResult(20, blocked_seconds=0.01, seconds=2.0, bytes=10**9))
    news = cadence.news()
    return "" if news is None else news[1]


def chosen(folder: Path, load: float) -> SaveCadence:
    own = SaveTurns(
        FolderTurns(folder, "least-waste", ask_slurm=False, load=load),
        size_bytes=1e6,
        nodes=1,
        mtbf_seconds=1e4,
        longest_seconds=60.0,
    )
    return SaveCadence(Every(), IntervalEstimator(mtbf_seconds=1e4), turns=own)


def test_the_best_interval_leaves_their_share_to_others(tmp_path: Path) -> None:
    # Alone the run would save every 14 s, with 2 s of writing each time.
    first, second = chosen(tmp_path, 0.2), chosen(tmp_path, 0.2)
    assert "others" not in learnt(first)
    # Both together may write for a fifth of the time, so each saves every 20 s.
    assert "save every 200 steps" in (said := learnt(second))
    assert "leaves their share of the file system to others" in said
    assert "save every 200 steps" in learnt(first)
    second.close()
    assert "others" not in learnt(first)
    first.close()


def test_a_fixed_interval_stays_and_is_known_to_others(tmp_path: Path) -> None:
    folder = FolderTurns(tmp_path, "least-waste", ask_slurm=False, load=0.3)
    clock = Clock()
    own = SaveTurns(
        folder, size_bytes=1e6, nodes=1, mtbf_seconds=1e5, longest_seconds=9.0, clock=clock
    )
    fixed, free = by_steps(own), chosen(tmp_path, 0.3)
    clock.now += 10.0
    fixed.begun(10)
    fixed.observe_save(SaveResult(10, blocked_seconds=0.01, seconds=2.0, bytes=10**9))
    assert fixed.news() is None
    # It takes 2 s of every 10, which leaves 2 s of every 20.
    assert "save every 200 steps" in learnt(free)
    fixed.close()
    assert "others" not in learnt(free)
    free.close()


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.distributed
def test_a_run_saves_when_the_job_before_it_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / "turns"
    other = ask(folder, 1e6)
    assert other.ready()
    settings = (f'checkpoint.turns="{folder}"', "checkpoint.every_steps=2", "train.steps=100000")
    job = tiny_job(tmp_path, "polite", *settings)
    process = start_process(job, tmp_path)
    try:
        wait_for_step(job, 10, process)
        assert not saved_steps(job)
        reached = last_step(job)
        other.release()
        deadline = time.monotonic() + 60.0
        while not saved_steps(job) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert saved_steps(job)[0] >= reached
        process.send_signal(signal.SIGTERM)
        code, output = finish(process)
        assert code == EXIT_TO_BE_CONTINUED, output
    finally:
        process.kill()
    again = ask(folder, 1e6)
    assert again.ready()
    assert again.granted
    again.release()


def saved_steps(job: Job) -> list[int]:
    return [event.step for _, event in read_run(run_directory(job).path).of(CheckpointSaved)]


def last_step(job: Job) -> int:
    return [event.step for _, event in read_run(run_directory(job).path).of(StepsDone)][-1]


@pytest.mark.distributed
def test_a_run_makes_way_for_the_saves_of_another_job(tmp_path: Path) -> None:
    folder = tmp_path / "turns"
    other = FolderTurns(folder, "least-waste", ask_slurm=False, load=0.001).saver()
    about = {"nodes": 64, "save_seconds": 60.0, "overhead_seconds": 60.0, "mtbf_seconds": 1e5}
    other.least_seconds(**about, period_seconds=120.0)
    settings = (
        f'checkpoint.turns="{folder}"',
        "checkpoint.turn_load=0.001",
        "checkpoint.every_steps=auto",
        # Alone it would save several times a minute.
        "checkpoint.mtbf_hours=0.001",
        "train.steps=60",
    )
    job = tiny_job(tmp_path, "modest", *settings)
    code, output = finish(start_process(job, tmp_path))
    assert code == 0, output
    told = [event for _, event in read_run(run_directory(job).path).of(CheckpointInterval)]
    assert "leaves their share of the file system to others" in told[0].reason
    assert saved_steps(job)[-1] == 60
    assert len(list(folder.glob("saver-*"))) == 1
    other.close()
