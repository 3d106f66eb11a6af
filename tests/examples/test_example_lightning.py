"""The example of Lightning's Trainer runs, and continues where it was stopped."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning.pytorch")

SCRIPT = Path(__file__).parents[2] / "examples" / "integrations" / "train_lightning.py"
STEPS = 16
"""Of an epoch."""


def begun(place: Path, epochs: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(place), "--epochs", str(epochs)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


def losses(said: str) -> dict[int, float]:
    found = re.findall(r"^epoch (\d+) step \d+ loss ([\d.]+)$", said, re.MULTILINE)
    return {int(epoch): float(loss) for epoch, loss in found}


@pytest.mark.distributed
def test_a_stopped_training_goes_on(tmp_path: Path) -> None:
    with begun(tmp_path, 10**6) as stopped:
        assert stopped.stdout is not None
        said = stopped.stdout.readline()
        assert [*losses(said)] == [0]
        stopped.send_signal(signal.SIGTERM)
        said, _ = stopped.communicate(timeout=240)
    assert stopped.returncode == 3
    found = re.search(r"stopped after step (\d+) \(SIGTERM\)", said)
    assert found is not None
    epochs = int(found[1]) // STEPS
    with begun(tmp_path, epochs + 2) as after:
        said, _ = after.communicate(timeout=240)
    assert after.returncode == 0
    assert [*losses(said)] == [epochs, epochs + 1]
