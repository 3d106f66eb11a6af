"""A loop of DeepSpeed's that may be killed at any time, and continues where it was.

    torchrun --nproc-per-node=2 train.py runs/
    torchrun --nproc-per-node=1 train.py runs/      # continues, on one process

Three lines are Outlast's: the import, the `with`, and the loss for the records. Ctrl-C saves and
ends with exit code 3; the same command continues. `outlast report runs/deepspeed` shows how it
went.
"""

import argparse
import os

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from outlast.integrations.deepspeed import Run

SYMBOLS, WIDTH, SAMPLES, LENGTH, BATCH = 32, 64, 512, 16, 16


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(SYMBOLS, WIDTH),
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.GELU(),
        nn.Linear(4 * WIDTH, SYMBOLS),
    )


def samples() -> TensorDataset:
    starts = torch.randint(SYMBOLS, (SAMPLES, 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset((starts + 3 * torch.arange(LENGTH + 1)) % SYMBOLS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs")
    parser.add_argument("--epochs", type=int, default=3)
    chosen = parser.parse_args()
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    ranks = int(os.environ["WORLD_SIZE"])
    config = {
        "train_batch_size": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = deepspeed.initialize(model=model(), config=config)
    dataset = samples()
    loader = DataLoader(dataset, BATCH // ranks, sampler=DistributedSampler(dataset))
    settings = [f"run.directory={chosen.runs}", "run.name=deepspeed", "guard.policy=linear"]
    with Run(engine=engine, loader=loader, epochs=chosen.epochs, settings=settings) as run:
        for (batch,) in run:
            tokens = batch.to(engine.device)
            logits = engine(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
            run.log(loss)
            if engine.global_rank == 0:
                print(f"step {run.step + 1} loss {loss.item():.6f}", flush=True)
    engine.destroy()


if __name__ == "__main__":
    main()
