"""Unmodified scripts of Lightning's Trainer under `outlast run`, killed and started again."""

import signal

import pytest
import torch
from running import outlast, plain

pytest.importorskip("lightning")
pytestmark = [pytest.mark.distributed, pytest.mark.supports("lightning", "checkpoint", "resume")]

SCRIPT = """
import os
import signal
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

HERE = Path(__file__).parent


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def training_step(self, batch, number):
        x, y = batch
        return nn.functional.mse_loss(self.layers(x), y)

    def on_train_batch_end(self, outputs, batch, number):
        plan = HERE / "plan"
        if plan.exists():
            at, what = plan.read_text().split()
            if self.global_step == int(at):
                plan.unlink()
                os.kill(os.getpid(), getattr(signal, what))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main():
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(32, 6), torch.randn(32, 1))
    model = Net()
    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=HERE / "root",
    )
    trainer.fit(model, DataLoader(data, 4, shuffle=True))
    assert trainer.checkpoint_callback.best_model_path
    found = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
    torch.save(
        {"model": model.state_dict(), "step": trainer.global_step, "saved": found["state_dict"]},
        HERE / "result.pt",
    )


if __name__ == "__main__":
    main()
"""
"""Trains for 8 steps an epoch."""


def test_script_killed_and_stopped_ends_with_the_weights_of_plain_python(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ended = plain(script)
    assert ended.code == 0, ended.said
    expected = torch.load(tmp_path / "result.pt")
    (tmp_path / "result.pt").unlink()

    command = ("run", "--every", 3, script)
    (tmp_path / "plan").write_text("8 SIGKILL")
    ended = outlast(*command)
    assert ended.code == -signal.SIGKILL, ended.said
    (tmp_path / "plan").write_text("11 SIGTERM")
    ended = outlast(*command)
    assert ended.code == 3, ended.said
    assert not (tmp_path / "plan").exists()
    ended = outlast(*command)
    assert ended.code == 0, ended.said
    assert "Lightning's Trainer trains this script" in ended.said
    assert "finished after 16 steps" in ended.said

    found = torch.load(tmp_path / "result.pt")
    assert found["step"] == expected["step"]
    for part in ("model", "saved"):
        for name, tensor in expected[part].items():
            assert torch.equal(found[part][name], tensor), name
    ended = outlast(*command)
    assert "this run has finished" in ended.said


def test_processes_that_lightning_would_start_itself_are_refused(tmp_path):
    script = tmp_path / "train.py"
    text = SCRIPT.replace('accelerator="cpu"', 'accelerator="cpu", devices=2, strategy="ddp"')
    script.write_text(text)
    ended = outlast("run", script)
    assert ended.code == 2, ended.said
    assert "start all of them with `outlast run --nproc 2`" in ended.said
    script.write_text(SCRIPT.replace("lightning as L", "pytorch_lightning as L"))
    ended = outlast("run", script)
    assert ended.code == 2, ended.said
    assert "import lightning.pytorch, the same library" in ended.said


EARLIER = """    if not (HERE / "skip").exists():
        L.Trainer(
            max_steps=3, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=HERE / "earlier",
        ).fit(Earlier(), DataLoader(data, 4))
"""
"""Another training before that of `SCRIPT`."""


def test_a_run_that_begins_from_a_named_checkpoint_goes_on_from_its_own(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("max_epochs=2", "max_epochs=1"))
    ended = plain(script)
    assert ended.code == 0, ended.said
    [base] = (tmp_path / "root").rglob("*.ckpt")
    text = SCRIPT.replace(
        "        x, y = batch\n",
        "        x, y = batch\n"
        "        if type(self) is Net:\n"
        '            (HERE / "steps").open("a").write(f"{self.global_step + 1} ")\n',
    )
    text = text.replace("def main():", "class Earlier(Net):\n    pass\n\n\ndef main():")
    text = text.replace("    model = Net()\n", f"{EARLIER}    model = Net()\n")
    loader = "DataLoader(data, 4, shuffle=True)"
    # The fifth argument of `fit` is ckpt_path.
    script.write_text(text.replace(loader, f"{loader}, None, None, {str(base)!r}"))
    (tmp_path / "plan").write_text("12 SIGTERM")
    command = ("run", "--every", 3, script)
    ended = outlast(*command)
    assert ended.code == 3, ended.said
    (tmp_path / "skip").touch()
    ended = outlast(*command)
    assert ended.code == 2, ended.said
    assert "holds a Earlier, but this trainer is given a Net" in ended.said
    (tmp_path / "skip").unlink()
    ended = outlast(*command)
    assert ended.code == 0, ended.said
    assert (tmp_path / "steps").read_text().split() == [str(step) for step in range(9, 17)]
