"""A node that Slurm has lost while all on it goes on: no end of the run, and no second writer.

Only slurmd is killed: the link's own process and its trainer live on, where Slurm cannot reach
them. `srun` ends with 0.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chains import ending, noted, program_plan, wait
from local_slurm import LocalSlurm, missing

from outlast.cluster.chain.manage import begin
from outlast.cluster.chain.plan import ChainFiles
from outlast.cluster.chain.progress import run_log
from outlast.cluster.slurm.history import state_now
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


def own_loop(folder: Path, steps: int, step_seconds: float, **settings: Any) -> ChainFiles:
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


def lost(files: ChainFiles, slurm: LocalSlurm, *, step: int) -> tuple[str, list[int]]:
    """Let the first link's node be lost once `step` is saved; its job and its processes."""
    wait(lambda: run_log(files).step >= step, files)
    start = noted(files, "started")[0]
    host = start["hosts"][0]
    processes = slurm.tasks_on(host)
    assert processes
    slurm.kill_slurmd(host)
    wait(lambda: state_now(str(start["job"])) == "NODE_FAIL", files, 60.0)
    return host, processes


def test_a_lost_node_is_no_end_of_the_run(tmp_path: Path, nodes: LocalSlurm) -> None:
    steps = 2400
    files = own_loop(tmp_path, steps, 0.02)
    host, processes = lost(files, nodes, step=100)
    wait(lambda: len(noted(files, "started")) == 2, files, 60.0)
    begun = time.monotonic()
    wait(lambda: not alive(processes), files, LEAVES_SECONDS)
    print("the orphan left after", time.monotonic() - begun)
    second = noted(files, "started")[1]
    assert 100 <= second["step"] < steps
    assert ending(files) is None, "not done"
    assert wait(lambda: ending(files), files, 90.0)["outcome"] == "done"
    nodes.start_node(host)
    run = read_run(files.run)
    assert run_log(files).step == steps
    assert [each.outcome for each in run.attempts][-1] == "completed"
    one_writer(files)


def one_writer(files: ChainFiles) -> None:
    """Once an attempt has begun, no earlier one saves."""
    newest = 0
    for record in read_run(files.run).records:
        if isinstance(record.event, AttemptStarted):
            newest = max(newest, record.attempt)
        elif isinstance(record.event, CheckpointSaved):
            assert record.attempt == newest, f"attempt {record.attempt}: {record.event}"
