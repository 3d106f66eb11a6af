"""The script for Accelerate runs on two processes, and continues with one where it was stopped."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.records import read_run

pytest.importorskip("accelerate")

SCRIPT = Path(__file__).parents[2] / "examples" / "integrations" / "train_accelerate.py"
DEADLINE_SECONDS = 120.0


@pytest.mark.distributed
def test_two_processes_then_one(tmp_path: Path) -> None:
    folder = tmp_path / "accelerate"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    first = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
            str(SCRIPT), str(folder), "2",
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_SECONDS,
    )  # fmt: skip
    assert first.returncode == 0, first.stdout + first.stderr
    assert re.search(r"loss 0\.\d+ after 40 steps", first.stdout)
    again = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), "3"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_SECONDS,
    )
    assert again.returncode == 0, again.stdout + again.stderr
    run = read_run(folder)
    assert [each.world_size for each in run.attempts] == [2, 1]
    assert run.attempts[1].first_step == 40
    assert run.losses()[-1][0] == 60
