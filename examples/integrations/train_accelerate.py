"""A loop on Accelerate with checkpoints, guard, records, a stop in time, and restarts from memory.

    accelerate launch --cpu --num_processes 2 examples/integrations/train_accelerate.py
    python examples/integrations/train_accelerate.py          # continues with one process

Kill it at any time, and run it again; `outlast report runs/accelerate` shows the run. With
`--max_restarts 3` a killed process costs a step.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from outlast.integrations.accelerate import (
    add_checkpoints,
    add_guard,
    add_records,
    add_recover,
    add_stop,
)
from outlast.job import load_loop_job

GLOBAL_BATCH = 16


def train(accelerator: Accelerator, folder: Path, epochs: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    x = torch.randn(320, 8)
    batch = GLOBAL_BATCH // accelerator.num_processes
    loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    job = load_loop_job(None, [f'run.directory="{folder.parent}"', f"run.name={folder.name}"])
    saving = add_checkpoints(accelerator, folder / "checkpoints")
    memory = add_recover(accelerator, saving, job)
    if saving.newest() is not None:
        accelerator.load_state()
    guard = add_guard(accelerator, "linear")
    steps = epochs * len(loader)
    tracker = add_records(accelerator, job, steps=steps, guard=guard, saving=saving)
    stop = add_stop(accelerator, saving=saving, tracker=tracker)

    for epoch in range(saving.steps // len(loader), epochs):
        loader.set_epoch(epoch)
        done = saving.steps - epoch * len(loader)
        for features, targets in accelerator.skip_first_batches(loader, done):
            loss = nn.functional.mse_loss(model(features), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"loss": loss.item()}, step=saving.steps)
            memory.keep()
            if stop(saving.steps):
                accelerator.save_state(folder / "stopped")
                stop.leave()
            if saving.steps % 10 == 0:
                accelerator.save_state(folder / f"step-{saving.steps}")
    accelerator.print(f"loss {loss.item():.4f} after {saving.steps} steps")


def main(folder: Path, epochs: int) -> None:
    seeds = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
    accelerator = Accelerator(cpu=True, dataloader_config=seeds)
    train(accelerator, folder, epochs)
    # A replicated model that outlives its process group may keep the process from ending.
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    main(
        Path(sys.argv[1] if len(sys.argv) > 1 else "runs/accelerate"),
        int(sys.argv[2]) if len(sys.argv) > 2 else 3,
    )
