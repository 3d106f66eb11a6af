"""A Lightning program with two processes that Lightning itself has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning.pytorch")

from outlast.records import StopRequested, read_run

SCRIPT = """
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from outlast.integrations.lightning import with_outlast

HERE = Path(__file__).parent


class Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def on_train_batch_end(self, outputs, batch, index):
        if self.global_rank == 0:
            print("done", self.global_step, flush=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    trainer = pl.Trainer(
        max_steps=int(sys.argv[1]), max_epochs=-1, accelerator="cpu", devices=2, strategy="ddp",
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=HERE,
        **with_outlast(settings=[f'run.directory="{HERE}/runs"', "run.name=it"]),
    )
    trainer.fit(Line(), DataLoader(TensorDataset(torch.ones(64, 1)), 2), ckpt_path="last")
"""


def begun(script: Path, steps: int) -> subprocess.Popen[str]:
    # None of the variables of a launcher.
    environment = {name: value for name, value in os.environ.items() if "RANK" not in name}
    return subprocess.Popen(
        [sys.executable, str(script), str(steps)],
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.distributed
@pytest.mark.supports("lightning", "chain")
def test_the_program_ends_with_exit_code_3_and_so_do_both_processes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with begun(script, 10**6) as stopped:
        assert stopped.stdout is not None
        while not stopped.stdout.readline().startswith("done"):
            assert stopped.poll() is None
        # To the first process alone: Lightning's own handler would kill the second.
        stopped.send_signal(signal.SIGTERM)
        said, _ = stopped.communicate(timeout=240)
    assert stopped.returncode == 3, said
    [(_, event)] = read_run(tmp_path / "runs" / "it").of(StopRequested)
    assert f"stopped after step {event.step} (SIGTERM)" in said
    with begun(script, event.step + 2) as after:
        said, _ = after.communicate(timeout=240)
    assert after.returncode == 0
    steps = [int(line.split()[1]) for line in said.splitlines() if line.startswith("done")]
    assert steps == [event.step + 1, event.step + 2]
