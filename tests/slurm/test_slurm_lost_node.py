"""A node that Slurm has lost while all on it continues: no end of the run, and no second writer.

Only slurmd is killed: the link's own process and its trainer live on, where Slurm cannot reach
them, and `srun` ends with 0.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chains import ending, files_of, job_file, noted, outlast, program_plan, wait
from local_slurm import LocalSlurm, missing

from outlast.cluster.chain import begin, status_of
from outlast.cluster.chain_files import ChainFiles, run_log
from outlast.cluster.slurm import state_now
from outlast.records import AttemptStarted, CheckpointSaved, read_run

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]

LEAVES_SECONDS = 20.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalSlurm]:
    """Three nodes that count as lost after a few seconds of silence."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    before = os.environ.get("SLURM_CONF")
    root = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    with LocalSlurm(root, nodes=3, node_timeout=5) as running:
        os.environ["SLURM_CONF"] = str(running.conf)
        yield running
    if before is None:
        del os.environ["SLURM_CONF"]
    else:
        os.environ["SLURM_CONF"] = before


@pytest.fixture(autouse=True)
def _all_nodes(nodes: LocalSlurm) -> Iterator[None]:
    """The queue is empty and all nodes are back before the next test."""
    yield
    wait_for(lambda: emptied(nodes))
    for name in ("n1", "n2", "n3"):
        if not (nodes.root / "run" / f"slurmd.{name}.pid").exists():
            continue
        if name not in idle(nodes):
            nodes.kill_slurmd(name)
            nodes.start_node(name)
            nodes.run("scontrol", "update", f"NodeName={name}", "State=RESUME", check=False)
    wait_for(lambda: len(idle(nodes)) == 3)


def emptied(slurm: LocalSlurm) -> bool:
    """Whether no job is left; a link that ends may have submitted another meanwhile."""
    jobs = slurm.run("squeue", "-h", "-o", "%A", check=False).split()
    if jobs:
        slurm.run("scancel", *jobs, check=False)
    return not jobs


def idle(slurm: LocalSlurm) -> list[str]:
    return slurm.run("sinfo", "-hNt", "idle", "-p", "batch", "-o", "%N").split()


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def own_loop(folder: Path, steps: int, step_seconds: float = 0.02, **settings: Any) -> ChainFiles:
    """A chain of a hand-written loop under `outlast.Run`, which has begun."""
    script = Path(__file__).with_name("own_loop.py")
    words = ["srun", sys.executable, script, folder / "runs", "own", steps, step_seconds]
    command = f"OMP_NUM_THREADS=1 {shlex.join(map(str, words))}"
    files, plan = program_plan(folder, command, **settings)
    begin(files, plan, "")
    return files


def alive(processes: list[int]) -> list[int]:
    """Those that have not ended."""
    found = []
    for pid in processes:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(pid)
    return found


def trainers(processes: list[int]) -> list[int]:
    """Those that train: not the link's own process, nor its srun."""
    found = []
    for pid in alive(processes):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        python = b"python" in words[0]
        if python and not {b"outlast.cluster.chain", b"srun"} & {*words}:
            found.append(pid)
    return found


def lose(files: ChainFiles, slurm: LocalSlurm, host: str, *, waits: bool = False) -> None:
    """Kill a node's slurmd; Slurm finds out by itself, or is told by an administrator."""
    slurm.kill_slurmd(host)
    if not waits:
        slurm.run("scontrol", "update", f"NodeName={host}", "State=DOWN", "Reason=lost")
    job = str(noted(files, "started")[0]["job"])
    wait(lambda: state_now(job) != "RUNNING", files, 90.0)


def one_writer(files: ChainFiles) -> None:
    """Once an attempt has begun, no earlier one saves."""
    newest = 0
    for record in read_run(files.run).records:
        if isinstance(record.event, AttemptStarted):
            newest = max(newest, record.attempt)
        elif isinstance(record.event, CheckpointSaved):
            assert record.attempt == newest, f"attempt {record.attempt}: {record.event}"


def test_a_lost_node_is_no_end_of_the_run(tmp_path: Path, nodes: LocalSlurm) -> None:
    steps = 2000
    files = own_loop(tmp_path, steps)
    wait(lambda: run_log(files).step >= 100, files)
    host = noted(files, "started")[0]["hosts"][0]
    processes = nodes.tasks_on(host)
    assert trainers(processes)
    lose(files, nodes, host, waits=True)
    wait(lambda: len(noted(files, "started")) == 2, files, 60.0)
    wait(lambda: not alive(processes), files, LEAVES_SECONDS)
    second = noted(files, "started")[1]
    assert 100 <= second["step"] < steps
    assert [each["verdict"] for each in noted(files, "ended")] in ([], ["continue"])
    assert ending(files) is None, "not done"
    found = status_of(files)
    assert (found.outcome, found.links[-1].verdict) == ("running", "running")
    # It comes back, with what it had run.
    nodes.start_node(host)
    assert wait(lambda: ending(files), files, 120.0)["outcome"] == "done"
    assert run_log(files).step == steps
    assert read_run(files.run).attempts[-1].outcome == "completed"
    one_writer(files)


def test_a_trainer_that_was_suspended_saves_nothing_when_it_wakes_up(
    tmp_path: Path, nodes: LocalSlurm
) -> None:
    files = own_loop(tmp_path, 100_000)
    wait(lambda: run_log(files).step >= 40, files)
    host = noted(files, "started")[0]["hosts"][0]
    suspended = trainers(nodes.tasks_on(host))
    for pid in suspended:
        os.kill(pid, signal.SIGSTOP)
    lose(files, nodes, host)
    wait(lambda: len(noted(files, "started")) == 2, files, 60.0)
    saved = noted(files, "started")[1]["step"]
    wait(lambda: run_log(files).step > saved, files, 60.0)
    assert trainers(suspended) == suspended
    for pid in suspended:
        os.kill(pid, signal.SIGCONT)
    wait(lambda: not trainers(suspended), files, LEAVES_SECONDS)
    step = run_log(files).step
    wait(lambda: run_log(files).step > step, files, 60.0)
    one_writer(files)


def test_a_job_that_is_requeued_takes_over_from_its_own_earlier_start(
    tmp_path: Path, nodes: LocalSlurm
) -> None:
    files = own_loop(tmp_path, 100_000, directives=("--requeue",))
    wait(lambda: run_log(files).step >= 40, files)
    start = noted(files, "started")[0]
    host, job = start["hosts"][0], str(start["job"])
    processes = nodes.tasks_on(host)
    lose(files, nodes, host)
    wait(lambda: not alive(processes), files, LEAVES_SECONDS)
    assert ending(files) is None
    # Slurm lets a requeued job wait for two minutes.
    nodes.run("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)
    wait(lambda: len(noted(files, "started")) == 2, files, 150.0)
    again = noted(files, "started")[1]
    assert (str(again["job"]), again["number"]) == (job, 1)
    wait(lambda: run_log(files).step > again["step"], files, 60.0)
    one_writer(files)


def test_of_two_nodes_one_is_lost(tmp_path: Path, nodes: LocalSlurm) -> None:
    """The one without the link's own process: its rank finds the lease gone."""
    job = job_file(
        tmp_path,
        "two",
        "train.steps=1000000",
        "checkpoint.every_steps=50",
        "slurm.nodes=[2]",
        "slurm.wall_time=10min",
    )
    outlast("submit", job)
    files = files_of(tmp_path, "two")
    wait(lambda: run_log(files).step >= 50, files)
    hosts = noted(files, "started")[0]["hosts"]
    processes = [pid for host in hosts for pid in nodes.tasks_on(host)]
    assert len(trainers(processes)) >= 2
    lose(files, nodes, hosts[1])
    wait(lambda: not alive(processes), files, 60.0)
    wait(lambda: len(noted(files, "started")) == 2, files, 60.0)
    saved = noted(files, "started")[1]["step"]
    wait(lambda: run_log(files).step > saved, files, 60.0)
    one_writer(files)


def test_a_restarted_slurmd_and_a_dead_srun(tmp_path: Path, nodes: LocalSlurm) -> None:
    """The first changes nothing; the second ends the link, and its trainer with it."""
    files = own_loop(tmp_path, 100_000)
    wait(lambda: run_log(files).step >= 40, files)
    start = noted(files, "started")[0]
    host, job = start["hosts"][0], str(start["job"])
    nodes.kill_slurmd(host)
    nodes.start_node(host)
    step = run_log(files).step
    wait(lambda: run_log(files).step > step + 40, files)
    assert state_now(job) == "RUNNING"
    processes = nodes.tasks_on(host)
    for pid in processes:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if words[0].endswith(b"srun"):
            os.kill(pid, signal.SIGKILL)
    wait(lambda: not alive(processes), files, 60.0)
    wait(lambda: len(noted(files, "started")) == 2, files, 60.0)
    assert noted(files, "ended")[0]["verdict"] == "continue"
    one_writer(files)
