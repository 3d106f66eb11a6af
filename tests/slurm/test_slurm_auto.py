"""Nodes and time limits chosen from a real Slurm's queue, link after link."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from chains import files_of, job_file, noted, outlast, wait
from local_slurm import LocalSlurm

from outlast.cluster.slurm import state_now

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("empty_queue"),
]

# Each link saves one step of very many when it is told to go.
WAITING = """\
import os, sys, time
from pathlib import Path
from outlast.cluster import report_progress
file = Path("count")
count = int(file.read_text()) + 1 if file.exists() else 1
deadline = time.monotonic() + 100
while not Path(f"go-{count}").exists() and time.monotonic() < deadline:
    time.sleep(0.05)
file.write_text(str(count))
report_progress(count, steps=100000, save_seconds=0.01)
sys.exit(3)
"""


def idle_nodes(slurm: LocalSlurm) -> int:
    return len(slurm.run("sinfo", "-hNt", "idle", "-p", "batch", "-o", "%N").split())


def test_links_get_the_nodes_that_are_free_when_they_are_chosen(
    tmp_path: Path, slurm: LocalSlurm, occupant: str
) -> None:
    (tmp_path / "program.py").write_text(WAITING)
    job = job_file(
        tmp_path,
        "auto",
        'slurm.wall_time="auto"',
        "slurm.nodes=[2]",
        "slurm.sizes=[2, 4]",
        f'slurm.command="cd {tmp_path} && {sys.executable} program.py"',
    )
    files = files_of(tmp_path, "auto")
    slurm.run("scontrol", "update", f"JobId={occupant}", "TimeLimit=90")
    assert "just submit one long job, 2 nodes for" in outlast(
        "cluster", "plan", job, "--hours", 0.5
    )
    said = outlast("submit", job, "--hours", 0.5)
    assert "chosen: just submit one long job, 2 nodes for" in said
    assert "predicted to start at once" in said
    # The first link has chosen the second before anybody else's job ended.
    wait(lambda: len(noted(files, "chosen")) == 2, files, 60.0)
    slurm.run("scancel", occupant)
    wait(lambda: state_now(occupant) == "CANCELLED", files, 60.0)
    # A job's nodes are free a little after its end, and the choice asks sinfo for them.
    wait(lambda: idle_nodes(slurm) >= 6, files, 60.0)
    (tmp_path / "go-1").touch()
    wait(lambda: len(noted(files, "chosen")) == 3, files, 60.0)
    (tmp_path / "go-2").touch()
    wait(lambda: len(noted(files, "started")) == 3, files, 60.0)
    first, _, third = noted(files, "started")
    assert (first["nodes"], third["nodes"]) == (2, 4)
    limit = slurm.run("squeue", "-h", "-j", third["job"], "-o", "%D %l").split()
    assert limit == ["4", "2:00:00"], "all that the partition allows, for so much work"
    choice = noted(files, "chosen")[2]
    assert choice["reason"].startswith("4 nodes for 2 h, predicted to start as soon as the job")
    shown = outlast("cluster", "status", files.run)
    assert "predicted" in shown
    assert "chosen: link " in shown
    assert "chosen last: link " in outlast("cluster", "explain", job)
    outlast("cluster", "stop", files.run)
