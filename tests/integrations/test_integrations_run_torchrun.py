"""`outlast.Run` under torchrun: a killed rank, and a group that starts again from memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import torchrun

from outlast.records import CheckpointSaved, CorruptionDetected, StateRecovered, read_run

pytestmark = pytest.mark.distributed

SCRIPT = """
import gc
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outlast

HERE, name = Path(__file__).parent, sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(5)
model = nn.Sequential(
    nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4)
)
data = TensorDataset(torch.randn(96, 8), torch.randn(96, 4))
torch.manual_seed(100 + rank)
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
average = torch.optim.swa_utils.AveragedModel(model)
loader = DataLoader(data, 8, sampler=DistributedSampler(data))
settings = [f'run.directory="{HERE}/runs"', f"run.name={name}", f'recover.memory="{HERE}/memory"']
settings += ["guard.policy=full"] if name == "struck" else []
settings += ["checkpoint.writer=thread", "energy.measure=false", "log.every_steps=1"]
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
with outlast.Run(
    model=wrapped, optimizer=optimizer, loader=loader, epochs=3, settings=settings, fresh=True
) as run:
    run.state["average"] = average
    for features, targets in run:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(wrapped(features), targets)
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        run.log(loss)
        if name == "killed" and first and rank == 1 and run.step == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "struck" and first and run.step == 10:
            # On both ranks, so that no replica is right.
            words = model[0].weight.data.view(-1).view(torch.int32)
            words[3 + rank : 4 + rank].bitwise_xor_(1 << 20)
found = {**model.state_dict(), **{f"of {key}": mean for key, mean in average.state_dict().items()}}
result = HERE / f"{name}{rank}.pt"
if not result.exists():
    torch.save(found, result)
# What still holds a process group keeps its threads, and torch 2.13 may then abort at exit.
wrapped = average = run = loss = None
gc.collect()
dist.destroy_process_group()
"""
"""Does 6 steps an epoch on two ranks.

A rank that dies on its way out starts the group again, when nothing is left to train.
"""


def _torchrun(script: Path, name: str) -> None:
    """One of these is started as users do, in interpreters of its own; all others are forked."""
    options = "--nproc-per-node=2", "--max-restarts=2"
    if name != "killed":
        forked = torchrun(script.parent / f"output-{name}", *options, script, name)
        assert forked.code == 0, forked.said
        return
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *options, script, name],
        # As the documentation says: a restarted group must not find the addresses of a dead one.
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script, and the results of a whole run of it."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "train.py").write_text(SCRIPT)
    _torchrun(folder / "train.py", "whole")
    return folder


def _assert_as_whole(place: Path, name: str) -> None:
    for file in place.glob(f"{name}[01].pt"):
        file.unlink()
    _torchrun(place / "train.py", name)
    for rank in (0, 1):
        whole, found = (
            torch.load(place / f"{each}{rank}.pt", weights_only=True) for each in ("whole", name)
        )
        assert [key for key in whole if not torch.equal(whole[key], found[key])] == []


@pytest.mark.supports("pytorch", "recover", "resume")
def test_a_killed_rank_costs_one_step_at_most_and_no_bit(place: Path) -> None:
    _assert_as_whole(place, "killed")
    means = [
        torch.load(place / f"whole{rank}.pt", weights_only=True)["1.running_mean"]
        for rank in (0, 1)
    ]
    assert not torch.equal(*means), "each rank has statistics of its own; the first's continue"
    # `fresh` is for the command, not for each of its starts.
    run = read_run(place / "runs" / "killed")
    assert len(run.attempts) == 2
    [(_, recovered)] = run.of(StateRecovered)
    assert recovered.source == "memory"
    # Ten steps were done; a group that is ended may not come to keep the last of them.
    assert recovered.step in (9, 10)
    assert run.losses()[-1][0] == 18
    # All is saved at the end, and nothing is left in memory.
    assert [event.step for _, event in run.of(CheckpointSaved)] == [18]
    assert not list((place / "memory").rglob("rank-*"))


@pytest.mark.supports("pytorch", "recover", "guard")
def test_after_a_memory_fault_the_group_starts_again_from_before_it(place: Path) -> None:
    _assert_as_whole(place, "struck")
    run = read_run(place / "runs" / "struck")
    assert {event.outcome for _, event in run.of(CorruptionDetected)} == {"restored"}
    back, again = (event for _, event in run.of(StateRecovered))
    # Eleven steps were done, of which the last was kept after the fault.
    assert (back.source, back.step, again.source, again.step) == ("memory", 10, "memory", 10)
    assert back.cause.startswith("a memory fault (")
    assert len(run.attempts) == 2
    assert [event.step for _, event in run.of(CheckpointSaved)] == [18]
    assert not list((place / "memory").rglob("rank-*"))
