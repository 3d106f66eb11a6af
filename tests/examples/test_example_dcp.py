"""The example of torch.distributed.checkpoint runs, ends, and continues with fewer processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "integrations" / "dcp.py"


def losses(ranks: int, place: Path, steps: int) -> dict[int, float]:
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={ranks}", str(SCRIPT), str(place), "--steps", str(steps),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
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
    whole = losses(2, tmp_path / "whole", 12)
    assert list(whole) == list(range(1, 13))
    assert whole[12] < whole[1]
    # The newest save of a run of 12 steps is that of step 10.
    after = losses(1, tmp_path / "whole", 12)
    assert after == pytest.approx({11: whole[11], 12: whole[12]}, abs=2e-5)
