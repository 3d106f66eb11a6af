"""A training loop of your own that continues from memory when one of its processes is killed.

    torchrun --nproc-per-node=2 --standalone --max-restarts=3 examples/restart_from_memory.py

Rank 1 kills itself in the middle of step 6. torchrun starts both processes again; they take the
state from /dev/shm, where it outlived them, and no step that was done is done again. Nothing is
ever written to a disk.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from outlast.recover.restart import Keeper

STEPS, FATAL_STEP = 10, 6


def join() -> None:
    """Join the others, with keys of this life alone.

    torchrun keeps its store when it starts processes again: without a prefix they may find the
    addresses of their dead predecessors there, and wait for them for half an hour.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False)
    life = dist.PrefixStore(f"life-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=life, rank=rank, world_size=world_size)


def main(run: str, memory: str) -> None:
    join()
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    keeper = Keeper({"model": model, "optimizer": optimizer}, run=run, identity="v1", memory=memory)
    recovered = keeper.restore()
    first = recovered.step if recovered else 0
    if recovered and dist.get_rank() == 0:
        print(f"continues from step {first}, found in {recovered.source}", flush=True)
    for step in range(first, STEPS):
        # What a step sees follows from its number alone: a step done again is the same step.
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        loss.backward()
        if first_life and step == FATAL_STEP and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        keeper.settle()  # the state of the step before is safe
        optimizer.step()
        optimizer.zero_grad()
        keeper.keep(step + 1)  # copied while the next step computes
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    keeper.close(forget_run=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main("restart-example", sys.argv[1] if len(sys.argv) > 1 else "/dev/shm")
