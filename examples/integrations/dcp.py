"""FSDP2 whose checkpoints go through torch.distributed.checkpoint into a store of Outlast.

    torchrun --nproc-per-node=2 dcp.py checkpoints/
    torchrun --nproc-per-node=1 dcp.py checkpoints/ --steps 40     # continues, on one process

Three lines are Outlast's: the writer, the reader, and the question whether there is anything to
load. The loss of each step depends on the step alone, so a run that was killed and started again
prints what it would have printed without.
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

from outlast.checkpoint.dcp import OutlastReader, OutlastWriter

SYMBOLS, WIDTH, SAMPLES, LENGTH = 32, 64, 8, 16


class Training(Stateful):
    """The model, its optimizer and the steps that are done."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Embedding(SYMBOLS, WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, SYMBOLS),
        )
        for layer in (self.model[1], self.model[3], self.model):
            fully_shard(layer)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.step = 0

    def state_dict(self) -> dict[str, object]:
        """What is saved."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take over what was loaded."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]


def train_step(training: Training) -> float:
    """One step on this process's share of the samples; the mean loss of all."""
    generator = torch.Generator().manual_seed(training.step)
    starts = torch.randint(SYMBOLS, (SAMPLES, 1), generator=generator)
    samples = (starts + torch.arange(LENGTH + 1) ** 2) % SYMBOLS
    mine = samples.chunk(dist.get_world_size())[dist.get_rank()]
    logits = training.model(mine[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.step += 1
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoints")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5)
    chosen = parser.parse_args()
    dist.init_process_group("gloo")
    # The saves in the background have messages of their own.
    background = dist.new_group(backend="gloo")
    training = Training()
    writer = OutlastWriter(chosen.checkpoints, keep=3)
    reader = OutlastReader(chosen.checkpoints)
    if reader.newest() is not None:
        dcp.load({"training": training}, storage_reader=reader)
    saving = None
    while training.step < chosen.steps:
        loss = train_step(training)
        if dist.get_rank() == 0:
            print(f"step {training.step} loss {loss:.6f}", flush=True)
        if training.step % chosen.every == 0:
            if saving is not None:
                saving.result()
            saving = dcp.async_save(
                {"training": training},
                storage_writer=writer,
                checkpoint_id=f"step-{training.step}",
                process_group=background,
            )
    if saving is not None:
        saving.result()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
