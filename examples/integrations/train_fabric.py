"""A loop of Lightning Fabric on FSDP2, with all of Outlast around it.

    torchrun --nproc-per-node=2 train_fabric.py runs/
    torchrun --nproc-per-node=1 train_fabric.py runs/ --epochs 6     # continues, on one process

Kill it at any time and start it again: it continues with the next sample.
"""

import argparse
import os

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from outlast.integrations.fabric import Run


def parallelize(model: nn.Module, mesh: object) -> nn.Module:
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs")
    parser.add_argument("--epochs", type=int, default=3)
    chosen = parser.parse_args()
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    strategy = ModelParallelStrategy(
        parallelize, data_parallel_size=processes, tensor_parallel_size=1
    )
    fabric = Fabric(accelerator="cpu", devices=processes, strategy=strategy)
    fabric.launch()
    torch.manual_seed(1)
    model = fabric.setup_module(nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    x = torch.linspace(-3, 3, 256)[torch.randperm(256), None]
    loader = fabric.setup_dataloaders(
        DataLoader(TensorDataset(x, torch.sin(2 * x)), batch_size=32 // processes)
    )
    settings = [f'run.directory="{chosen.runs}"', "run.name=curve", "checkpoint.every_steps=8"]
    with Run(
        fabric,
        model=model,
        optimizer=optimizer,
        loader=loader,
        epochs=chosen.epochs,
        settings=settings,
    ) as run:
        for x, y in run:
            loss = nn.functional.mse_loss(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss)
            mean = fabric.all_reduce(loss.detach())
            fabric.print(f"step {run.step + 1} loss {mean:.6f}", flush=True)
    # Fabric leaves it to the script; gloo may abort a process that ends without.
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
