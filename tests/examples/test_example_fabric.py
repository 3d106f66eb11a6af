"""The example of Fabric runs on two processes, and continues with one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning.fabric")

SCRIPT = Path(__file__).parents[2] / "examples" / "integrations" / "train_fabric.py"


def losses(ranks: int, place: Path, epochs: int) -> dict[int, float]:
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={ranks}", str(SCRIPT), str(place), "--epochs", str(epochs),
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
    begun = losses(2, tmp_path, 1)
    assert [*begun] == [*range(1, 9)]
    after = losses(1, tmp_path, 3)
    assert [*after] == [*range(9, 25)]
    assert after[24] < begun[1]
