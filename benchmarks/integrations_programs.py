"""One training in one framework, with its own saving or with Outlast's: a process of its own.

    python benchmarks/integrations_programs.py FRAMEWORK plain|outlast FOLDER STEPS SAVES WIDTH

It prints one line of JSON: ``steps`` (CPU seconds of each step), ``walls`` (wall seconds of each),
``saves`` (numbers of the steps after which was saved) and ``bytes`` (of what is in FOLDER at the
end). A step begins with the model's forward pass, so that everything that a framework does
between two of them is in it. The same model learns the same batches in all of them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

BATCH = 32
LAYERS = 4
OUTLAST_KEEPS = 1000
"""As many as the plain side, which deletes nothing."""


class Model(nn.Module):
    """Some layers; gives its loss, as a Trainer wants it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())
            for _ in range(LAYERS)
        ]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.layers(x)
        return {"loss": (found - labels).square().mean(), "logits": found}


class Rows(torch.utils.data.Dataset):
    """Samples that follow from their numbers."""

    def __init__(self, width: int, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, width, generator=generator)
        self.labels = self.x.sin().sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.labels[index]}


class Clock:
    """When each step has begun, in CPU seconds of this process and in wall seconds."""

    def __init__(self, model: nn.Module) -> None:
        self.cpu: list[float] = []
        self.wall: list[float] = []
        model.register_forward_pre_hook(self._begun)

    def _begun(self, *_: Any) -> None:
        self.cpu.append(time.process_time())
        self.wall.append(time.perf_counter())


class Training:
    """What all programs share.

    Attributes:
        folder: Where checkpoints go.
        steps: How many.
        every: Steps between two saves.
        ours: Whether Outlast saves.
    """

    def __init__(self, folder: Path, ours: bool, steps: int, saves: int, width: int) -> None:
        self.folder, self.ours, self.steps, self.width = folder, ours, steps, width
        self.every = max(steps // (saves + 1), 1)
        torch.manual_seed(0)
        self.model = Model(width)
        self.clock = Clock(self.model)
        self.rows = Rows(width, BATCH * steps)

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def loader(self) -> torch.utils.data.DataLoader:
        return torch.utils.data.DataLoader(self.rows, batch_size=BATCH)

    def settings(self, *more: str) -> Any:
        """Saves alone: no guard, no meter, no state in memory."""
        from outlast.job import load_loop_job

        return load_loop_job(
            None,
            [
                f"run.directory={self.folder}",
                "guard.policy=off",
                "energy.measure=false",
                "recover.mode=off",
                *more,
            ],
        )

    def saves_after(self, step: int) -> bool:
        return step % self.every == 0 and step < self.steps


def pytorch(training: Training) -> None:
    import outlast

    model, optimizer, loader = training.model, training.optimizer(), training.loader()

    def step(batch: dict[str, torch.Tensor]) -> None:
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    if training.ours:
        job = training.settings(
            f"checkpoint.every_steps={training.every}", f"checkpoint.keep={OUTLAST_KEEPS}"
        )
        with outlast.Run(job, model=model, optimizer=optimizer, loader=loader) as run:
            for batch in run:
                step(batch)
        return
    for number, batch in enumerate(loader, 1):
        step(batch)
        if training.saves_after(number):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, training.folder / f"step-{number}.pt")


def dcp(training: Training) -> None:
    """Saves in the background; training is blocked while DCP copies the state."""
    _dcp(training, background=True)


def dcp_waiting(training: Training) -> None:
    """Saves that training waits for."""
    _dcp(training, background=False)


def _dcp(training: Training, *, background: bool) -> None:
    import torch.distributed.checkpoint as checkpoint

    from outlast.checkpoint.dcp import OutlastWriter

    model, optimizer = training.model, training.optimizer()
    writer = OutlastWriter(training.folder, keep=OUTLAST_KEEPS) if training.ours else None
    under_way = None
    for number, batch in enumerate(training.loader(), 1):
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        if not training.saves_after(number):
            continue
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        place = f"step-{number}" if writer is not None else training.folder / f"step-{number}"
        if not background:
            checkpoint.save(state, storage_writer=writer, checkpoint_id=place)
            continue
        if under_way is not None:
            under_way.result()
        under_way = checkpoint.async_save(state, storage_writer=writer, checkpoint_id=place)
    if under_way is not None:
        under_way.result()


def transformers(training: Training) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(training.folder),
        max_steps=training.steps,
        per_device_train_batch_size=BATCH,
        save_steps=training.every,
        save_strategy="steps",
        logging_steps=10,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(training.model, arguments, train_dataset=training.rows)
    if training.ours:
        from outlast.integrations.hf_trainer import add_checkpoints

        add_checkpoints(trainer)
    trainer.train()


def accelerate(training: Training) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(
        training.model, training.optimizer(), training.loader()
    )
    if training.ours:
        from outlast.integrations.accelerate import add_checkpoints

        add_checkpoints(accelerator, training.folder / "store")
    for number, batch in enumerate(loader, 1):
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        if training.saves_after(number):
            accelerator.save_state(str(training.folder / f"step-{number}"))
    accelerator.end_training()


def lightning(training: Training) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = training.model

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return training.optimizer()

    saving = ModelCheckpoint(
        training.folder / "files", every_n_train_steps=training.every, save_top_k=-1, save_last=True
    )
    more: dict[str, Any] = {"callbacks": [saving]}
    if training.ours:
        from outlast.integrations.lightning import with_outlast

        more = with_outlast(training.settings(), callbacks=[saving])
    trainer = Trainer(
        max_steps=training.steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )
    trainer.fit(Module(), training.loader())


def fabric(training: Training) -> None:
    from lightning.fabric import Fabric

    plugins = []
    if training.ours:
        from outlast.integrations.fabric import StoreCheckpointIO

        plugins = [StoreCheckpointIO(training.folder / "store", training.settings().checkpoint)]
    fabric = Fabric(accelerator="cpu", devices=1, plugins=plugins)
    fabric.launch()
    model, optimizer = fabric.setup(training.model, training.optimizer())
    for number, batch in enumerate(fabric.setup_dataloaders(training.loader()), 1):
        fabric.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        if training.saves_after(number):
            state = {"model": model, "optimizer": optimizer}
            fabric.save(training.folder / f"step-{number}.ckpt", state)
    fabric.strategy.teardown()


def deepspeed(training: Training) -> None:
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", DS_ACCELERATOR="cpu"
    )
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))
    # Outlast's adapter looks for a stale lock before DeepSpeed would wait for it.
    from outlast.integrations.deepspeed import OutlastCheckpointEngine  # isort: skip
    import deepspeed as package

    configuration = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 10**9,
    }
    engine, *_ = package.initialize(
        model=training.model,
        model_parameters=training.model.parameters(),
        config=configuration,
        dist_init_required=True,
    )
    if training.ours:
        engine.checkpoint_engine = OutlastCheckpointEngine(training.folder, keep=OUTLAST_KEEPS)
    for number, batch in enumerate(training.loader(), 1):
        engine.backward(engine(**batch)["loss"])
        engine.step()
        if training.saves_after(number):
            engine.save_checkpoint(str(training.folder), tag=f"step-{number}")
    if training.ours:
        engine.checkpoint_engine.cleanup()


PROGRAMS = {
    each.__name__: each
    for each in (
        pytorch,
        transformers,
        accelerate,
        lightning,
        fabric,
        deepspeed,
        dcp,
        dcp_waiting,
    )
}


def _bytes_in(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())


def main() -> None:
    framework, side, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    steps, saves, width = (int(each) for each in sys.argv[4:7])
    torch.set_num_threads(1)
    # What frameworks print is not for the one line that is read.
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    training = Training(folder, side == "outlast", steps, saves, width)
    PROGRAMS[framework](training)
    cpu, wall = training.clock.cpu, training.clock.wall
    found = {
        "steps": [later - earlier for earlier, later in pairwise(cpu)],
        "walls": [later - earlier for earlier, later in pairwise(wall)],
        "saves": [each for each in range(1, steps) if training.saves_after(each)],
        "bytes": _bytes_in(folder),
    }
    print(json.dumps(found), file=report, flush=True)


if __name__ == "__main__":
    main()
