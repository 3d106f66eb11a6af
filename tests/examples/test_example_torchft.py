"""The example of torchft runs as it stands."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "integrations" / "train_torchft.py"


@pytest.mark.distributed
def test_the_sound_group_finishes_and_the_faulty_one_leaves() -> None:
    pytest.importorskip("torchft", reason="torchft (the extra ft) is not installed")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "group 0: step 40, loss" in done.stdout
    assert "group 1: step 11: this group's numbers are wrong and stay so" in done.stdout
    assert "exit codes 0 4" in done.stdout
