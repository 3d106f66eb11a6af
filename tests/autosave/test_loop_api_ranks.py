"""`outlast.autosave.loop` in a script of two ranks, under torchrun."""

import pytest
import torch
from forked import torchrun
from torch import nn

from outlast.autosave import loop
from outlast.checkpoint import CheckpointStore
from outlast.errors import AutosaveError

SCRIPT = """
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from outlast.autosave import loop
from outlast.checkpoint import CheckpointStore

HERE = Path(__file__).parent


def train(folder, until=None):
    torch.manual_seed(5)
    model = nn.Linear(4, 1)
    # Each rank has data of its own.
    torch.manual_seed(50 + dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
    loader = DataLoader(data, 4, shuffle=True)
    losses = []
    state = {"model": model, "optimizer": optimizer}
    with CheckpointStore(folder) as store:
        for x, y in loop(loader, state=state, store=store, every_steps=2):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            for each in model.parameters():
                dist.all_reduce(each.grad)
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == until:
                break
    return losses


dist.init_process_group("gloo")
found = [train(HERE / "whole"), train(HERE / "run", 4), train(HERE / "run")]
torch.save(found, HERE / f"result{dist.get_rank()}.pt")
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_ranks_save_together_and_each_goes_on_in_its_own_data(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = torchrun(tmp_path / "output", "--nproc-per-node=2", script)
    assert done.code == 0, done.said
    first, second = (torch.load(tmp_path / f"result{rank}.pt") for rank in (0, 1))
    assert first[0] != second[0]
    for whole, begun, resumed in (first, second):
        assert begun == whole[:4]
        # It broke out of the fourth step, before that was saved.
        assert resumed == whole[2:]

    state = {"model": nn.Linear(4, 1)}
    with (
        CheckpointStore(tmp_path / "run") as store,
        pytest.raises(AutosaveError, match="was saved by 2 processes and 1 continue"),
    ):
        next(iter(loop([1], state=state, store=store)))
