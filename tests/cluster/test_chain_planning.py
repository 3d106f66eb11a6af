"""From a job to the plan of its chain, and what is refused."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outlast.cluster.chain import links_of, status_of
from outlast.cluster.chain_files import (
    ChainFiles,
    ChainPlan,
    RunLog,
    note,
    read_plan,
    run_log,
    write_plan,
)
from outlast.cluster.planning import costs_of, files_of, links_needed, plan_chain
from outlast.cluster.slurm import UNKNOWN_SITE, SiteLimits
from outlast.cluster.submission import batch_script, warning_seconds
from outlast.errors import ClusterError
from outlast.job import Job, load_job
from outlast.records import AttemptEnded, TrainingStarted
from outlast.records.log import RecordWriter

SITE = SiteLimits(limit_seconds=24 * 3600.0, nodes=8, preemptible=True)


def job(folder: Path, *settings: str) -> Job:
    return load_job(None, [f'run.directory="{folder}"', "run.name=a", *settings])


def saved(folder: Path, seconds: float, restart: float, saves: int = 5) -> None:
    """A run that has started once and saved several times."""
    run = folder / "a"
    run.mkdir(parents=True)
    save = {"kind": "checkpoint_saved", "seconds": seconds}
    events = [{"kind": "ready", "step": 0, "seconds": restart, "parts": {}}]
    events += [{**save, "step": 10 * (index + 1)} for index in range(saves)]
    lines = [json.dumps({"v": 1, **event}) for event in events]
    (run / "events.jsonl").write_text("\n".join(lines) + "\n")


def test_without_a_wall_time_a_link_is_as_long_as_the_partition_allows(tmp_path: Path) -> None:
    plan = plan_chain(job(tmp_path, "slurm.nodes=[4, 2]"), SITE)
    assert plan.limit_seconds == 24 * 3600.0
    assert plan.preemptible
    assert [plan.nodes_of(number) for number in (1, 2, 3, 9)] == [4, 2, 2, 2]
    assert plan_chain(job(tmp_path), UNKNOWN_SITE).limit_seconds is None


def test_a_plan_reads_back(tmp_path: Path) -> None:
    settings = ["slurm.nodes=[4, 2]", 'slurm.setup=["module load x"]', "slurm.wall_time=8h"]
    plan = plan_chain(job(tmp_path, *settings), SITE)
    files = files_of(job(tmp_path))
    with pytest.raises(ClusterError, match="has no chain: `outlast submit"):
        read_plan(files)
    write_plan(files, plan)
    assert read_plan(files) == plan


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["slurm.wall_time=2-0"], "slurm.wall_time = 2-00:00:00 is more than the 1-00:00:00"),
        (["slurm.nodes=[2, 9]"], "slurm.nodes = 9 is more than the 8 nodes"),
        (
            ["slurm.wall_time=1min"],
            r"00:01:00 leaves no time to train: .* needs 60 s .* 30 s for its last .*, 90 s in all",
        ),
        (["slurm.link_seconds=20.0"], r"slurm.link_seconds = 20 leaves no time to train"),
    ],
)
def test_what_cannot_work_is_refused_with_the_figure(
    tmp_path: Path, settings: list[str], words: str
) -> None:
    with pytest.raises(ClusterError, match=words):
        plan_chain(job(tmp_path, *settings), SITE)


def test_one_job_at_a_time_is_enough_for_one_link(tmp_path: Path) -> None:
    site = SiteLimits(limit_seconds=3600.0, submitted_jobs=1)
    assert plan_chain(job(tmp_path, "slurm.links=1"), site).links == 1
    with pytest.raises(ClusterError, match=r"2 jobs at once .* slurm.links = 1 and submit again"):
        plan_chain(job(tmp_path), site)


def test_measured_starts_and_saves_take_the_place_of_assumed_ones(tmp_path: Path) -> None:
    saved(tmp_path, seconds=40.0, restart=25.0)
    with pytest.raises(ClusterError, match=r"needs 25 s .* 40 s .*\(measured in this run\)"):
        plan_chain(job(tmp_path, "slurm.wall_time=1min"), SITE)
    saved(tmp_path / "quick", seconds=0.5, restart=8.0)
    plan = plan_chain(job(tmp_path / "quick", "slurm.wall_time=1min"), SITE)
    costs = costs_of(plan, run_log(files_of(job(tmp_path / "quick"))))
    assert 5.5 < costs.lead_seconds < 10.0


def test_links_that_are_needed() -> None:
    plan = ChainPlan("c", "n", "dependent", (1,), 1, 3600.0, "/", "python", restart_seconds=60.0)
    costs = costs_of(plan, RunLog(Path(), save_seconds=[10.0] * 20))
    assert links_needed(plan, costs, 60.0) == 1
    room = 3600.0 - 60.0 - costs.lead_seconds
    assert links_needed(plan, costs, 10 * room) == 10
    assert links_needed(plan, costs, 10 * room + 1.0) == 11
    assert links_needed(plan, costs, None) is None


def test_slurms_signal_is_the_back_up_of_the_links_own_clock() -> None:
    plan = ChainPlan("c", "n", "dependent", (1,), 1, 3600.0, "/", "python")
    assert warning_seconds(plan, 75.4) == 75
    assert warning_seconds(plan, 5000.0) == 1200, "never in the first two thirds of a link"
    assert warning_seconds(plan, 0.2) == 10


def test_each_link_has_its_own_script(tmp_path: Path) -> None:
    files = ChainFiles(tmp_path)
    plan = ChainPlan("abc", "n", "dependent", (4, 2), 1, 3600.0, "/", "python")
    for number, nodes in ((1, 4), (3, 2)):
        script = batch_script(files, plan, number)
        assert f"#SBATCH --nodes={nodes}\n" in script
        assert f"#SBATCH --comment=outlast:abc:{number}\n" in script
    array = batch_script(files, replace(plan, kind="array", links=5, nodes=(2,)), 2)
    assert "#SBATCH --array=0-3%1\n" in array


def test_the_log_is_read_as_it_grows(tmp_path: Path) -> None:
    saved(tmp_path, seconds=2.0, restart=3.0)
    file = tmp_path / "a" / "events.jsonl"
    log = RunLog(file)
    assert log.read()
    assert (log.step, log.save_seconds, log.restart_seconds) == (50, [2.0] * 5, [3.0])
    assert not log.read()
    with file.open("a") as more:
        more.write('{"v": 1, "kind": "checkpoint_saved", "step": 60, "seconds": 4.0}\n{"kind": "ch')
    assert log.read()
    assert (log.step, len(log.save_seconds)) == (60, 6), "a torn line waits for its end"
    with file.open("a") as more:
        more.write('eckpoint_failed", "step": 70, "reason": "no space"}\n')
    assert log.read()
    assert (log.step, log.failure) == (60, "no space")
    with file.open("a") as more:
        more.write('{"v": 1, "kind": "checkpoint_saved", "step": 80, "seconds": 4.0}\n')
    assert log.read()
    assert (log.step, log.failure) == (80, "")


def test_what_an_earlier_start_still_writes_is_not_of_this_one(tmp_path: Path) -> None:
    """An orphan, on a node that Slurm has lost, and the start of the link after it."""
    file = tmp_path / "events.jsonl"

    def write(attempt: int, kind: str, **fields: Any) -> None:
        event = {"v": 1, "kind": kind, "attempt": attempt, "total_steps": 400, **fields}
        with file.open("a") as log:
            log.write(json.dumps(event) + "\n")

    def late() -> None:
        write(1, "checkpoint_saved", step=900, seconds=9.0)
        write(1, "checkpoint_failed", step=900, reason="it has lost its lease")
        write(1, "stop_requested")
        write(1, "ready", seconds=9.0)
        write(1, "attempt_ended", outcome="failed")

    write(1, "attempt_started")
    write(1, "checkpoint_saved", step=100, seconds=1.0)
    log = RunLog(file)
    log.read()
    # The link that follows has begun, and its trainer has not.
    log.over = log.attempt
    late()
    write(2, "attempt_started")
    late()
    write(2, "checkpoint_saved", step=120, seconds=1.0)
    late()
    log.read()
    assert (log.step, log.failure, log.stops, log.outcome) == (120, "", 0, "")
    assert (log.save_seconds, log.restart_seconds) == ([1.0, 1.0], [])
    # The count of starts was lost, and begins again.
    write(1, "attempt_started")
    write(1, "attempt_ended", outcome="completed")
    log.read()
    assert (log.attempt, log.outcome) == (1, "completed")


def test_status_without_slurm_tells_links_gaps_and_time_left(tmp_path: Path) -> None:
    files = ChainFiles(tmp_path / "a" / "chain")
    plan = ChainPlan("abc", "a", "dependent", (2,), 1, 100.0, "/", "python", steps=400)
    write_plan(files, plan)
    note(files, "submitted", job="1", number=1)
    begun = {"processes": 2, "nodes": 2}
    note(files, "started", job="1", number=1, began=1e9, step=0, **begun)
    ended = note(
        files,
        "ended",
        job="1",
        number=1,
        code=3,
        verdict="continue",
        reason="",
        step=100,
        seconds=100.0,
    )
    after = ended["time"] + 2.5
    note(files, "started", job="2", number=2, began=after, step=100, **begun)
    found = status_of(files, ask_slurm=False)
    assert [each.verdict for each in found.links] == ["continue", "lost"]
    assert found.gaps_seconds == [pytest.approx(2.5)]
    # Nothing is saved yet in the run's own records: 400 steps at a second each, and four waits.
    assert found.left_seconds == pytest.approx(400.0 + 4 * 2.5)
    assert links_of(plan, [], 0, "2", {}) == []


def test_goodput_counts_running_and_lost_links_and_only_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ChainFiles(tmp_path / "a" / "chain")
    write_plan(files, ChainPlan("abc", "a", "dependent", (1,), 1, 7200.0, "/", "python"))
    now = time.time()
    note(files, "started", job="1", number=1, began=now - 3000.0, step=0)
    note(files, "submitted", job="2", number=2)
    note(files, "started", job="2", number=2, began=now - 1000.0, step=0)
    ended = ["1", "NODE_FAIL", "00:08:20"]
    running = ["2", "RUNNING", "1", "1:00", "1", "2", "3", "1", "None", ""]
    for name, fields in (("sacct", ended), ("squeue", running)):
        command = tmp_path / name
        command.write_text("#!/bin/sh\nprintf '%s\\n' '" + "\x1f".join(fields) + "'\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = status_of(files)
    assert [each.seconds for each in found.links] == [500.0, pytest.approx(1000.0, abs=5.0)]
    assert found.goodput is None, "a program of the user's own keeps no records"
    assert found.seconds == {"not known": pytest.approx(1500.0, abs=5.0)}
    (files.run / "job.toml").write_text("")
    writer = RecordWriter(files.run)
    writer.write(TrainingStarted(0, 30.0, {}))
    writer.write(AttemptEnded(9, "to_be_continued", "", {"compute": 720.0}))
    writer.close()
    assert status_of(files).goodput == pytest.approx(720.0 / 1500.0, rel=0.01)


def test_burst_buffers_are_asked_for_in_the_script(tmp_path: Path) -> None:
    for name in ("a.bin", "b.bin"):
        (tmp_path / name).write_bytes(b"tokens" * 100)
    staged = job(
        tmp_path,
        "data.source=tokens",
        f'data.train=["{tmp_path}/a.bin"]',
        f'data.validation=["{tmp_path}/b.bin"]',
        "staging.burst_buffer=datawarp",
        "staging.burst_buffer_gigabytes=3",
        'staging.directory="$DW_JOB_STRIPED"',
        'slurm.directives=["--constraint=dw"]',
    )
    plan = plan_chain(staged, SITE)
    script = batch_script(files_of(staged), plan, 1).splitlines()
    assert "#SBATCH --constraint=dw" in script
    capacity = script.index("#DW jobdw type=scratch access_mode=striped capacity=3GB")
    copies = [line for line in script if line.startswith("#DW stage_in")]
    assert len(copies) == 2
    commands = [place for place, line in enumerate(script) if line and line[0] != "#"]
    assert capacity < commands[0]
    (tmp_path / "b.bin").unlink()
    with pytest.raises(ClusterError, match="does not exist"):
        plan_chain(staged, SITE)
