"""`outlast submit --script`: a script of two ranks as a chain of jobs on a real Slurm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from chains import ending, files_of, noted, outlast, wait
from running import RANKS_SCRIPT, TORCHRUN

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm", "empty_queue")]


def results(folder: Path) -> list[dict[str, object]]:
    return [torch.load(folder / f"result{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize(
    "plans",
    [
        {1: "8 SIGTERM"},
        # One rank dies while the other hangs, which no collective's time-out ends.
        {0: "8 SIGSTOP", 1: "8 SIGKILL"},
    ],
    ids=["told to stop", "a rank dies"],
)
def test_script_goes_on_in_the_next_link(tmp_path: Path, plans: dict[int, str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(RANKS_SCRIPT)
    subprocess.run([sys.executable, *TORCHRUN, script, "ddp"], check=True, timeout=240)
    expected = results(tmp_path)
    for rank in (0, 1):
        (tmp_path / f"result{rank}.pt").unlink()
    for rank, plan in plans.items():
        (tmp_path / f"plan{rank}").write_text(plan)
    settings = [
        f'run.directory="{tmp_path}/runs"',
        "slurm.nodes=[2]",
        "slurm.wall_time=10min",
        "slurm.restart_seconds=5.0",
        "slurm.lead_seconds=5.0",
        'slurm.setup=["export OMP_NUM_THREADS=1"]',
    ]
    outlast("submit", "--script", f"{script} ddp", *settings)
    files = files_of(tmp_path, "train")
    ended = wait(lambda: ending(files), files, 240.0)
    assert ended["outcome"] == "done"
    assert len(noted(files, "started")) == 2
    for found, other in zip(results(tmp_path), expected, strict=True):
        assert found["losses"] == other["losses"]
