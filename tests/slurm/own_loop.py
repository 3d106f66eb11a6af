"""A hand-written loop under `outlast.Run` whose steps take a known time, for chains on Slurm."""

from __future__ import annotations

import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import outlast

if __name__ == "__main__":
    folder, name, steps, step_seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(2 * steps, 4)), batch_size=1)
    settings = [
        f'run.directory="{folder}"',
        f"run.name={name}",
        "checkpoint.every_steps=20",
        'checkpoint.writer="thread"',
        'guard.policy="off"',
        "energy.measure=false",
        "log.every_steps=1",
    ]
    with outlast.Run(
        model=model, optimizer=optimizer, loader=loader, steps=steps, settings=settings
    ) as run:
        for (batch,) in run:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss)
            time.sleep(float(step_seconds))
