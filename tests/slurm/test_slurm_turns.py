"""Turns at saving between jobs of a real Slurm: whose job has ended loses its turn."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from local_slurm import LocalSlurm

from outlast.cluster.storage import FolderTurns, Request

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("empty_queue"),
]

HOLDER = """\
import sys, time
from outlast.cluster.storage import ask
request = ask(sys.argv[1], 1e6)
assert request.ready() and request.granted
print("granted", flush=True)
time.sleep(600)
"""


def on_another_node(held: Path) -> None:
    """All virtual nodes are one machine; make this owner one that cannot be seen from here."""
    content = json.loads(held.read_text())
    content["owner"].update(host="elsewhere", boot="other")
    held.write_text(json.dumps(content))


def wait_for_turn(folder: Path, seconds: float) -> Path:
    deadline = time.monotonic() + seconds
    while not (found := [each for each in folder.glob("held-*") if each.stat().st_size]):
        assert time.monotonic() < deadline, "the job did not take its turn"
        time.sleep(0.1)
    return found[0]


def test_the_turn_of_a_cancelled_job_is_free_before_its_heartbeat_is_missed(
    slurm: LocalSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, program, script = tmp_path / "turns", tmp_path / "holder.py", tmp_path / "holder.sh"
    program.write_text(HOLDER)
    script.write_text(f"#!/bin/bash\n{sys.executable} {program} {folder}\n")
    answer = slurm.run("sbatch", "--parsable", f"--output={tmp_path}/log", "-t5", str(script))
    job = answer.strip().partition(";")[0]
    try:
        held = wait_for_turn(folder, 60.0)
        owner = json.loads(held.read_text())["owner"]
        assert owner["job"] == job
        monkeypatch.setenv("SLURM_CLUSTER_NAME", owner["cluster"])
        on_another_node(held)
        about = {"nodes": 1, "unsaved_seconds": 9.0, "mtbf_seconds": 1e5, "period_seconds": 9.0}
        waiting = FolderTurns(folder, "least-waste", ask_slurm=True, load=0.6).ask(1e6, **about)
        assert not granted(waiting, held, 3.0)
    finally:
        slurm.run("scancel", job)
    assert granted(waiting, held, 60.0)
    waiting.release()


def granted(waiting: Request, held: Path, seconds: float) -> bool:
    """Whether a request gets the turn while its holder misses heartbeats, and not yet too many."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        os.utime(held, (time.time() - 45.0,) * 2)
        if waiting.ready():
            return waiting.granted
        time.sleep(0.2)
    return False
