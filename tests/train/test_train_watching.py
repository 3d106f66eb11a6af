"""Runs of which processes are killed, stopped or hang: noticed, recorded, continued with."""

import os
import signal
import time
from pathlib import Path

import pytest
from runs import finish, start_process
from tiny import losses, tiny_job

from outlast.distributed.ranks import ALONE
from outlast.errors import EXIT_DONE
from outlast.job import Job
from outlast.records import MemberLost, RunDirectory, read_run
from outlast.recover.hang import HangMonitor, StepDeadline
from outlast.recover.phase_page import PhasePage, arm, pages_folder, read_pages
from outlast.runtime.watching import Watcher, under_watch
from outlast.train.run import Start, run_directory, work

SETTINGS = ("train.steps=60", "checkpoint.every_steps=10", "launch.nproc=2")


def pages_of(job: Job) -> Path:
    """Where the pages of a run are that has just been started, as soon as there is one."""
    directory, deadline = run_directory(job), time.monotonic() + 120.0
    while time.monotonic() < deadline:
        if (directory.path / "id").exists():
            pages = pages_folder(job.recover.memory, directory)
            if len(read_pages(pages)) == job.launch.nproc:
                return pages
        time.sleep(0.01)
    raise AssertionError("no process has come up in 120 s")


def lost(job: Job) -> list[MemberLost]:
    run = read_run(run_directory(job).path)
    return [event for rank in range(2) for _, event in run.of(MemberLost, rank)]


@pytest.mark.distributed
def test_a_rank_that_is_killed_is_noted_once_and_the_run_goes_on(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "killed", *SETTINGS)
    process = start_process(job, tmp_path)
    try:
        pages = pages_of(job)
        arm(pages, 1, "reduce", step=25)
        code, output = finish(process)
    finally:
        process.kill()
    assert code == EXIT_DONE, output
    [event] = lost(job)
    assert (event.step, event.member, event.cause) == (25, "rank 1", "dead")
    assert event.note == "killed in phase reduce"
    assert len(losses(job)) == 60
    assert not pages.exists()


@pytest.mark.distributed
def test_a_rank_that_stays_stopped_is_killed_and_the_run_goes_on(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "stopped", *SETTINGS, "recover.hang_seconds=2")
    process = start_process(job, tmp_path)
    try:
        arm(pages_of(job), 1, "forward", step=25, number=signal.SIGSTOP)
        code, output = finish(process)
    finally:
        process.kill()
    assert code == EXIT_DONE, output
    [event] = lost(job)
    assert (event.member, event.cause) == ("rank 1", "stopped")
    assert "hang_seconds" in event.note
    assert len(losses(job)) == 60
    [folder] = (run_directory(job).path / "stacks").iterdir()
    assert "forward_backward" in (folder / "rank-0.txt").read_text()


def test_all_phases_of_a_step_are_marked_in_their_order(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "phases", "train.steps=2", "evaluate.every_steps=1")
    told: list[tuple[str, int | None]] = []
    original = HangMonitor.mark

    def mark(self: HangMonitor, phase: str, step: int | None = None) -> None:
        told.append((phase, step))
        original(self, phase, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HangMonitor, "mark", mark)
        assert work(Start(job), ALONE) == EXIT_DONE
    step = [("forward", None), ("backward", None), ("vote", None), ("optimizer", None)]
    assert told[:2] == [("heal", None), ("idle", 0)]
    assert told[2:9] == [("data", 0), *step, ("agree", None), ("evaluate", None)]
    assert told[9:15] == [("data", 1), *step, ("agree", None)]
    assert told[15:] == [("idle", 2), ("evaluate", None), ("save", None), ("idle", None)]


def test_the_page_is_there_while_a_process_is_under_watch(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "page", f'recover.memory="{tmp_path}"')
    directory = run_directory(job)
    directory.create("")
    with under_watch(job, ALONE, directory) as mark:
        mark("data", 4)
        [page] = read_pages(pages_folder(str(tmp_path), directory))
        assert (page.step, page.phase, page.pid) == (4, "data", os.getpid())
        assert page.deadline_seconds == job.launch.timeout_seconds
    assert read_pages(pages_folder(str(tmp_path), directory)) == []


def test_what_died_before_the_watcher_looked_is_not_its_business(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "before", f'recover.memory="{tmp_path}"')
    directory = run_directory(job)
    directory.create("")
    if (child := os.fork()) == 0:
        PhasePage(pages_folder(str(tmp_path), directory), 0)
        os._exit(0)
    os.waitpid(child, 0)
    with Watcher(job, directory) as watcher:
        watcher.look()
        watcher.look()
    assert not (directory.path / "events.jsonl").exists()
    # Nor does it leave what it finds there.
    assert not pages_folder(str(tmp_path), directory).exists()


def test_no_deadline_where_it_is_switched_off(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "off", f'recover.memory="{tmp_path}"', "recover.hang_seconds=0")
    directory = RunDirectory(tmp_path / "run")
    directory.create("")
    with under_watch(job, ALONE, directory):
        [page] = read_pages(pages_folder(str(tmp_path), directory))
        assert page.deadline_seconds == 0.0
    assert StepDeadline(600.0, 0.0).seconds == 0.0
