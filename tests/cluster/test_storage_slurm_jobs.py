"""Whether the Slurm job of a silent owner has ended: asked beside, and what it answers."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import threading
import time

import pytest
from slurm_programs import put_command, shown, slurm_commands

from outlast.cluster import storage as storage_job
from outlast.cluster.storage import SlurmJobs, job_state, turns_for
from outlast.job import load_job
from outlast.records.claims import Owner


def owner(job="7", cluster=""):
    return dataclasses.replace(Owner.here(), job=job, cluster=cluster)


def answered(ask, about):
    """What is known once Slurm has answered."""
    deadline = time.monotonic() + 30.0
    while (found := ask(about)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


@pytest.mark.parametrize(
    ("state", "expected"),
    [("RUNNING", True), ("COMPLETING", True), ("COMPLETED", False), ("PENDING", False)],
)
def test_a_job_that_has_ended_or_waits_again_has_no_processes(
    tmp_path, monkeypatch, state, expected
):
    slurm_commands(tmp_path, monkeypatch, squeue=shown("7", state))
    assert answered(SlurmJobs(), owner()) is expected


def test_nobody_waits_for_an_answer_that_does_not_come(monkeypatch):
    answer = threading.Event()
    asked = []

    def state(job):
        asked.append(job)
        answer.wait(30.0)
        return "FAILED"

    monkeypatch.setattr(storage_job, "job_state", state)
    jobs = SlurmJobs()
    assert [jobs(owner()) for _ in range(5)] == [None] * 5
    answer.set()
    assert answered(jobs, owner()) is False
    assert jobs(owner()) is False
    assert asked == ["7"]


def test_an_unknown_job_is_asked_for_again(monkeypatch):
    states = iter([None, "RUNNING", "TIMEOUT"])
    monkeypatch.setattr(storage_job, "job_state", lambda job: next(states))
    monkeypatch.setattr(storage_job, "ASK_AGAIN_SECONDS", 0.0)
    jobs = SlurmJobs()
    assert answered(jobs, owner()) is True
    deadline = time.monotonic() + 30.0
    while jobs(owner()) is not False:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_requeued_job_lives_again_when_it_runs(monkeypatch):
    states = iter(["PENDING", "RUNNING", "COMPLETED"])
    asked = []

    def state(job):
        asked.append(job)
        return next(states)

    monkeypatch.setattr(storage_job, "job_state", state)
    monkeypatch.setattr(storage_job, "ASK_AGAIN_SECONDS", 0.0)
    jobs = SlurmJobs()
    deadline = time.monotonic() + 30.0
    for expected in (False, True, False):
        while jobs(owner()) is not expected:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    # Who has ended does not come back, and nobody is asked again.
    assert jobs(owner()) is False
    assert len(asked) == 3


def test_jobs_of_other_clusters_and_processes_outside_of_slurm_are_not_asked_about(monkeypatch):
    monkeypatch.setattr(storage_job, "job_state", lambda job: pytest.fail("asked"))
    jobs = SlurmJobs()
    assert jobs(owner(job="")) is None
    assert jobs(owner(cluster="elsewhere")) is None


def test_a_controller_that_is_down_says_nothing(tmp_path, monkeypatch):
    slurm_commands(tmp_path, monkeypatch)
    put_command(tmp_path, "squeue", "echo 'slurm_load_jobs error: Access denied' >&2; exit 1")
    put_command(tmp_path, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    answers = []
    answered_once = threading.Event()

    def state(job):
        answers.append(job_state(job))
        answered_once.set()
        return answers[-1]

    monkeypatch.setattr(storage_job, "job_state", state)
    monkeypatch.setattr(storage_job, "ASK_AGAIN_SECONDS", 600.0)
    jobs = SlurmJobs()
    assert jobs(owner()) is None
    # The thread is waited for, so that it asks these commands and no others.
    assert answered_once.wait(60.0)
    assert answers == [None]
    assert jobs(owner()) is None


@pytest.mark.parametrize("ask_slurm", [True, False])
def test_the_job_decides_who_is_asked_and_in_which_order(tmp_path, monkeypatch, ask_slurm):
    # What other tests have been told of job 7 is not known here.
    monkeypatch.setattr(storage_job, "still_runs", SlurmJobs())
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    slurm_commands(tmp_path, monkeypatch, squeue=shown("7", "CANCELLED"))
    folder = tmp_path / "turns"
    overrides = [
        f'checkpoint.turns="{folder}"',
        "checkpoint.turn_order=fcfs",
        f"checkpoint.turn_ask_slurm={str(ask_slurm).lower()}",
    ]
    turns = pickle.loads(pickle.dumps(turns_for(load_job(None, overrides).checkpoint)))
    about = {"nodes": 1, "unsaved_seconds": 9.0, "mtbf_seconds": 1e5, "period_seconds": 9.0}
    first = turns.ask(1e6, **about)
    assert first.ready()
    assert first.granted
    [held] = folder.glob("held-*")
    content = json.loads(held.read_text())
    content["owner"].update(host="elsewhere", boot="other")
    held.write_text(json.dumps(content))
    # Silent enough to be asked about, and not yet for so long that it counts as dead.
    os.utime(held, (time.time() - 32.0,) * 2)
    first._ended.set()
    second = turns.ask(1.0, **about)
    assert second.wait(55.0 if ask_slurm else 0.5) is ask_slurm
    second.release()


def test_without_a_folder_there_are_no_turns():
    assert turns_for(load_job(None, []).checkpoint) is None
