"""The script for Hugging Face's Trainer runs as it stands, and continues where it was killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outlast.records import read_run

pytest.importorskip("accelerate")

SCRIPT = Path(__file__).parents[2] / "examples" / "integrations" / "train_transformers.py"
DEADLINE_SECONDS = 120.0


def started(output: Path, steps: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(output), str(steps)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.distributed
def test_killed_and_started_again(tmp_path: Path) -> None:
    output = tmp_path / "out"
    program = started(output, 100_000)
    deadline = time.monotonic() + DEADLINE_SECONDS
    try:
        while len(list(output.glob("checkpoint-*"))) < 2:
            assert program.poll() is None, program.communicate()[0]
            assert time.monotonic() < deadline, "no second checkpoint came"
            time.sleep(0.05)
        program.send_signal(signal.SIGKILL)
    finally:
        program.kill()
        program.communicate()
    done = max(step for step, _ in read_run(output).losses())
    again = started(output, done + 20)
    text, _ = again.communicate(timeout=DEADLINE_SECONDS)
    assert again.returncode == 0, text
    assert f"after {done + 20} steps" in text
    run = read_run(output)
    assert len(run.attempts) == 2
    # The second checkpoint folder is made when the first version is published.
    assert (run.attempts[1].first_step or 0) > 0
