"""A training by Lightning's `Trainer`, with all of Outlast in two lines.

    python train_lightning.py runs/                  # kill it at any time, and start it again
    python train_lightning.py runs/ --epochs 6

The two lines are those with `with_outlast` and `ckpt_path="last"`.
"""

import argparse

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from outlast.integrations.lightning import with_outlast


class Curve(pl.LightningModule):
    """Learns a curve."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Dropout(0.05), nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """The loss of a batch."""
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def on_train_epoch_end(self) -> None:
        """Say how far it is."""
        loss = self.trainer.callback_metrics.get("loss", torch.tensor(0.0))
        print(f"epoch {self.current_epoch} step {self.global_step} loss {loss:.6f}", flush=True)

    def on_train_batch_end(
        self, outputs: dict[str, torch.Tensor], batch: object, index: int
    ) -> None:
        """Let Lightning average the loss over the epoch."""
        self.log("loss", outputs["loss"], on_step=False, on_epoch=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs")
    parser.add_argument("--epochs", type=int, default=4)
    chosen = parser.parse_args()
    pl.seed_everything(1, verbose=False)
    x = torch.linspace(-3, 3, 256)[:, None]
    loader = DataLoader(TensorDataset(x, torch.sin(2 * x)), batch_size=16, shuffle=True)
    settings = [f'run.directory="{chosen.runs}"', "run.name=curve", "checkpoint.every_steps=8"]
    trainer = pl.Trainer(
        max_epochs=chosen.epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **with_outlast(settings=settings),
    )
    trainer.fit(Curve(), loader, ckpt_path="last")


if __name__ == "__main__":
    main()
