"""Trainings of a tiny model by Lightning's `Trainer`, in forked processes."""

from __future__ import annotations

import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from forked import run_ranks
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

from outlast.guard.inject import inject, parse_faults
from outlast.integrations.lightning import OutlastCallback, with_outlast
from outlast.records import Predicted, Run, read_run
from outlast.tensorize import tensorize

QUIET = ["checkpoint.writer=thread", "energy.measure=false", "log.every_steps=3"]
EVERY_5 = "checkpoint.every_steps=5"


class Tiny(pl.LightningModule):  # type: ignore[misc]
    """Trains, and writes the loss of each batch to a file; does what it is told in a step."""

    def __init__(self, folder: Path, how: dict[str, Any]) -> None:
        super().__init__()
        self.folder = folder
        self.how = how
        dropout = 0.0 if how.get("devices", 1) > 1 or how.get("plain") else 0.2
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1)
        )
        if how.get("plain"):
            self.net[1] = nn.Identity()
        self.automatic_optimization = "steps_told_in" not in how

    def configure_model(self) -> None:
        if self.how.get("tensorize") and isinstance(self.net[0], nn.Linear):
            tensorize(self.net, form="low_rank", rank=0.5, match="0", force=True)

    def training_step(self, batch: Any, index: int) -> Tensor:
        features, targets = batch["long"] if isinstance(batch, dict) else batch
        loss = nn.functional.mse_loss(self.net(features), targets)
        if isinstance(batch, dict):
            loss = loss + 0.1 * self.net(batch["short"][0]).square().mean()
        name = f"losses{self.global_rank}.jsonl"
        with (self.folder / name).open("a") as file:
            file.write(json.dumps([self.trainer.fit_loop.total_batch_idx, loss.item()]) + "\n")
        if not self.automatic_optimization:
            # A step that Lightning does not count, and one that it counts.
            self.manual_backward(loss)
            self.optimizers(use_pl_optimizer=False).step()
            with Path(self.how["steps_told_in"]).open("a") as file:
                file.write("step\n")
            self.optimizers().step()
        return loss

    def on_validation_start(self) -> None:
        if self.trainer.sanity_checking:
            self.reached()
        else:
            with (self.folder / f"validations{self.global_rank}").open("a") as file:
                file.write(f"{self.global_step}\n")

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if "joules" in self.how:
            meter = Path(self.how["joules"])
            meter.write_text(f"{float(meter.read_text()) + 10.0}\n")
        # After the callbacks of this step.
        self.reached()

    def reached(self) -> None:
        """Do what the plan says for the steps that are done."""
        plan = self.folder / "plan"
        if plan.exists():
            at, what, rank = plan.read_text().split()
            if self.global_step == int(at) and self.global_rank == int(rank):
                plan.unlink()
                if what == "raise":
                    raise ValueError("it went wrong")
                os.kill(os.getpid(), getattr(signal, what))

    def validation_step(self, batch: Any, index: int) -> None:
        features, targets = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(features), targets))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)]


class Stream(IterableDataset[Any]):
    """Data without a length."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return (self.data[index] for index in range(len(self.data)))


def loaders(how: dict[str, Any]) -> tuple[Any, Any]:
    """For training, 12 batches of an epoch of one process, and for validation."""
    data = TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
    size = how.get("batch", 8)
    if how.get("stream"):
        return DataLoader(Stream(data), size), DataLoader(data, 48)
    if how.get("several"):
        short = TensorDataset(data.tensors[0][:40])
        both = {
            "long": DataLoader(data, size, shuffle=True),
            "short": DataLoader(short, size, True),
        }
        return both, DataLoader(data, 48)
    sampler: Any = RandomSampler(data)
    if how.get("plain"):
        # On one process, Lightning would not make one.
        ranks, rank = how.get("devices", 1), int(os.environ["RANK"])
        sampler = DistributedSampler(data, ranks, rank, shuffle=True)
    return (
        DataLoader(data, size, sampler=sampler, num_workers=how.get("workers", 0)),
        DataLoader(data, 48),
    )


def fit(folder: Path, settings: list[str], how: dict[str, Any]) -> int:
    """One start of the training script; the exit code."""
    warnings.simplefilter("ignore")
    torch.manual_seed(7)
    model = Tiny(folder, how)
    training, validation = loaders(how)
    torch.manual_seed(8)
    arguments: dict[str, Any] = {}
    if "keeping" in how:
        arguments["callbacks"] = [ModelCheckpoint(folder / "plain", **how["keeping"])]
    if not how.get("without"):
        place = [f'run.directory="{folder}/runs"', "run.name=it"]
        own = [ModelCheckpoint(folder / "own", **how["saving"])] if "saving" in how else []
        prediction = Predicted(0.5, 0.4, 0.6, 1e8, 5e7, 1e12, 64.0) if "fault" in how else None
        arguments = with_outlast(
            settings=[*QUIET, *place, *settings], callbacks=own, prediction=prediction
        )
        if "fault" in how:
            arguments["callbacks"].append(Faulty(arguments["callbacks"][0], how["fault"]))
    trainer = pl.Trainer(
        max_epochs=how.get("epochs", 3),
        max_steps=how.get("steps", -1),
        accelerator="cpu",
        devices=how.get("devices", 1),
        strategy="ddp" if how.get("devices", 1) > 1 else "auto",
        accumulate_grad_batches=how.get("accumulate", 1),
        val_check_interval=how.get("validate_every", 1.0),
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=not how.get("without") or "keeping" in how,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    path = how.get("from", None if how.get("without") else "last")
    before = signal.getsignal(signal.SIGTERM)
    try:
        trainer.fit(model, training, validation if how.get("validate") else None, ckpt_path=path)
        # A script that continues after the training can be ended again.
        assert signal.getsignal(signal.SIGTERM) == before
    except SystemExit as end:
        return int(end.code or 0)
    except Exception:
        if how.get("devices", 1) == 1:
            raise
        # The other process is gone.
        return 1
    torch.save(model.state_dict(), folder / f"result{trainer.global_rank}.pt")
    return 0


class Faulty(pl.Callback):  # type: ignore[misc]
    """Flips a bit."""

    def __init__(self, outlast: OutlastCallback, fault: str) -> None:
        self.outlast = outlast
        self.fault = fault

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        inject(self.outlast.guard, parse_faults([self.fault]), seed=1)


def start(folder: Path, *settings: str, plan: str = "", **how: Any) -> list[int | None]:
    """Start the training once; exit codes by rank, None where it was killed.

    Args:
        folder: Of its files.
        settings: Of the run, beside `QUIET`.
        plan: Steps done, the name of the signal that comes then, and the rank that it comes to.
        how: Options of the script.
    """
    folder.mkdir(exist_ok=True)
    if plan:
        (folder / "plan").write_text(plan if len(plan.split()) == 3 else f"{plan} 0")
    ranks = how.get("devices", 1)
    codes = run_ranks(ranks, fit, folder, [*settings], how, may_die=range(ranks))
    assert not (folder / "plan").exists()
    return codes


def finish(folder: Path, *settings: str, **how: Any) -> None:
    """Run the training to its end."""
    assert set(start(folder, *settings, **how)) == {0}


def losses(folder: Path, rank: int = 0) -> dict[int, float]:
    """Loss by batch; of a batch that was done again, the last one."""
    lines = (folder / f"losses{rank}.jsonl").read_text().splitlines()
    return dict(json.loads(each) for each in lines)


def assert_same(folder: Path, other: Path, ranks: int = 1) -> None:
    """Losses and weights are the same, bit for bit."""
    for rank in range(ranks):
        assert losses(folder, rank) == losses(other, rank)
        one, two = (
            torch.load(each / f"result{rank}.pt", weights_only=True) for each in (folder, other)
        )
        assert one.keys() == two.keys()
        for key, tensor in two.items():
            assert torch.equal(one[key], tensor), key


def records(folder: Path) -> Run:
    """What the run has recorded."""
    return read_run(folder / "runs" / "it")
