"""The example of DeepSpeed runs, ends, and continues with another number of processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "integrations" / "deepspeed" / "train.py"


def losses(ranks: int, place: Path, epochs: int) -> dict[int, float]:
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={ranks}", str(SCRIPT), str(place), "--epochs", str(epochs),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^step (\d+) loss ([\d.]+)$", done.stdout, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.distributed
def test_two_processes_begin_and_one_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed (the extra integrations) is not installed")
    begun = losses(2, tmp_path, 1)
    assert list(begun) == list(range(1, 33))
    after = losses(1, tmp_path, 2)
    assert list(after) == list(range(33, 65))
    assert after[64] < begun[32] < begun[1]
