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

from outlast.cluster.storage.identity import this_process
from outlast.cluster.storage.job import turns_for
from outlast.cluster.storage.slurm_jobs import SlurmJobs
from outlast.job import load_job


def owner(job="7", cluster=""):
    return dataclasses.replace(this_process(), job=job, cluster=cluster)


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


def test_nobody_waits_for_an_answer_that_does_not_come():
    answer = threading.Event()
    asked = []

    def state(job):
        asked.append(job)
        answer.wait(30.0)
        return "FAILED"

    jobs = SlurmJobs(state)
    assert [jobs(owner()) for _ in range(5)] == [None] * 5
    answer.set()
    assert answered(jobs, owner()) is False
    assert jobs(owner()) is False
    assert asked == ["7"]


def test_an_unknown_job_is_asked_for_again():
    states = iter([None, "RUNNING", "TIMEOUT"])
    jobs = SlurmJobs(lambda job: next(states), ask_again_seconds=0.0)
    assert answered(jobs, owner()) is True
    deadline = time.monotonic() + 30.0
    while jobs(owner()) is not False:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_jobs_of_other_clusters_and_processes_outside_of_slurm_are_not_asked_about():
    jobs = SlurmJobs(lambda job: pytest.fail("asked"))
    assert jobs(owner(job="")) is None
    assert jobs(owner(cluster="elsewhere")) is None


def test_a_controller_that_is_down_says_nothing(tmp_path, monkeypatch):
    slurm_commands(tmp_path, monkeypatch)
    put_command(tmp_path, "squeue", "echo 'Invalid job id specified' >&2; exit 1")
    jobs = SlurmJobs(ask_again_seconds=0.0)
    assert jobs(owner()) is None


@pytest.mark.parametrize("ask_slurm", [True, False])
def test_the_job_decides_who_is_asked_and_in_which_order(tmp_path, monkeypatch, ask_slurm):
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
    os.utime(held, (time.time() - 60.0,) * 2)
    first._ended.set()
    second = turns.ask(1.0, **about)
    assert second.wait(20.0 if ask_slurm else 0.5) is ask_slurm
    second.release()


def test_without_a_folder_there_are_no_turns():
    assert turns_for(load_job(None, []).checkpoint) is None
