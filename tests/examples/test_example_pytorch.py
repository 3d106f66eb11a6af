"""The example of a hand-written loop runs, continues, and leaves a run that can be shown."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.records import read_run

SCRIPT = Path(__file__).parents[2] / "examples" / "integrations" / "pytorch.py"


def run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.distributed
def test_a_loop_goes_on_and_can_be_shown(tmp_path: Path) -> None:
    settings = ["guard.policy=linear", "log.every_steps=5", "checkpoint.writer=thread"]
    assert "\n0 steps are done\n" in run(tmp_path, str(SCRIPT), *settings, "--steps=10")
    said = run(tmp_path, str(SCRIPT), *settings, "--steps=30").splitlines()
    begun = said.index("10 steps are done")
    assert said[begun - 1].startswith("outlast: runs/bytes resumed at step 10 of 30 from its check")
    assert said[-2].startswith("outlast: runs/bytes is complete after 30 steps")
    assert said[-1] == "30 steps are done; see runs/bytes"
    losses = dict(read_run(tmp_path / "runs" / "bytes").losses())
    assert list(losses) == [5, 10, 15, 20, 25, 30]
    assert losses[30] < losses[5] < 5.6
    run(tmp_path, "-m", "outlast", "report", "runs/bytes")
    page = (tmp_path / "runs" / "bytes" / "report.html").read_text()
    assert "Tokens" in page
